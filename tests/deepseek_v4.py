"""Tiny random DeepSeek-V4 checkpoints in each dialect, made by transformers, which is also the
oracle for loading them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from sglcore.models.drafts.deepseek_v4_nextn import DeepseekV4NextN
from tests.checkpoints import Oracle

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {SPARSE: 4, HEAVY: 16}
SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 128,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 8,
        "sliding_window": 16,
        "max_position_embeddings": 4096,
        "layer_types": (SLIDING, HEAVY, SPARSE, HEAVY, SPARSE),
        "mlp_layer_types": ("hash_moe", "hash_moe", "moe", "moe", "moe"),
        "compress_rates": RATES,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
"""With 16 heads no indexer score is 0 by chance, which would be a tie."""
YARN = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1}


def deepseek_v4(seed: int = 0, **changes: Any) -> Oracle:
    """Return a random model in float32, with no parameter left at its initial value."""
    given = {**SIZES, "rope_parameters": dict(YARN), **changes}
    lists = {name: list(value) for name, value in given.items() if isinstance(value, tuple)}
    config = transformers.DeepseekV4Config(**{**given, **lists, "compress_rates": dict(given["compress_rates"])})
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, values in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" not in name:
                values.copy_(_random(name, values))
    return model


def _random(name: str, values: Tensor) -> Tensor:
    noise = torch.randn(values.shape)
    if name.endswith("tid2eid"):
        experts = SIZES["n_routed_experts"]
        return torch.stack([torch.randperm(experts)[: values.shape[1]] for _ in range(values.shape[0])])
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith(("position_bias", "base")):
        return 0.5 * noise
    if name.endswith("scale"):
        return 0.5 + torch.rand(values.shape)
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    return noise if name.endswith("sinks") else noise * values.shape[-1] ** -0.5


def with_module_names(model: Oracle, folder: Path) -> Path:
    """Save with transformers' module names, fused experts, and transformers' configuration."""
    return _write(folder, model.config.to_dict(), {**model.state_dict()})


def with_published_names(model: Oracle, folder: Path) -> Path:
    """Save with the names that DeepSeek publishes, with MTP layers and the published
    configuration."""
    own = revert_weight_conversion(model, model.state_dict())
    weights = {re.sub(r"^model\.", "", name): values for name, values in own.items()}
    weights = {_published(name): values for name, values in weights.items()}
    return _write(folder, published_config(model.config), {**weights, **_next_token(weights)})


def _published(name: str) -> str:
    name = name.replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def published_config(config: Any) -> dict[str, Any]:
    """Return the configuration in its published form, if it has words for the compression
    ratios."""
    found = config.to_dict()
    ratios = {SLIDING: 0, SPARSE: 4, HEAVY: 128}
    found["compress_ratios"] = [*(ratios[kind] for kind in found.pop("layer_types")), 0]
    found["num_hash_layers"] = found.pop("mlp_layer_types").count("hash_moe")
    found["qk_rope_head_dim"] = int(found["head_dim"] * found.pop("partial_rotary_factor"))
    found["rope_scaling"] = {("type" if name == "rope_type" else name): value for name, value in YARN.items()}
    found["window_size"] = found.pop("sliding_window")
    del found["rope_parameters"]
    return found


def _next_token(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of the MTP layers, with the last layer's sizes without compressor and
    indexer."""
    torch.manual_seed(7)
    last = max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    layer = {
        name.replace(f"layers.{last}.", "mtp.0."): values
        for name, values in weights.items()
        if name.startswith(f"layers.{last}.") and ".compressor" not in name and ".indexer" not in name
    }
    size = weights["embed.weight"].shape[1]
    ends = {f"mtp.0.{name}": weights[name] for name in ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale")}
    shared = {"mtp.0.emb.tok_emb.weight": weights["embed.weight"], "mtp.0.head.weight": weights["head.weight"]}
    second = {"mtp.1.norm.weight": torch.ones(size)}
    norms = {f"mtp.0.{name}.weight": 1 + 0.1 * torch.randn(size) for name in ("enorm", "hnorm")}
    joined = {f"mtp.0.{name}.weight": torch.randn(size, size) * size**-0.5 for name in ("e_proj", "h_proj")}
    made = {name: values + 0.01 * torch.randn(values.shape) for name, values in {**layer, **ends}.items()}
    return {**made, **shared, **norms, **joined, **second}


class DenseStreams:
    """The MTP layer of a checkpoint with published names, in transformers' modules: a window-only
    layer with the input and output parts of a model."""

    def __init__(self, folder: Path) -> None:
        one = {"num_hidden_layers": 1, "layer_types": (SLIDING,), "mlp_layer_types": ("moe",)}
        self._shell, stored = deepseek_v4(**one), load_file(folder / "model.safetensors")
        own = {DeepseekV4NextN.own_name(name): values for name, values in stored.items()}
        own |= {"model.embed_tokens.weight": stored["embed.weight"], "lm_head.weight": stored["head.weight"]}
        experts = [f"model.layers.0.mlp.experts.{expert}" for expert in range(8)]
        gate_up = [torch.cat((own[f"{e}.gate_proj.weight"], own[f"{e}.up_proj.weight"])) for e in experts]
        own["model.layers.0.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        own["model.layers.0.mlp.experts.down_proj"] = torch.stack([own[f"{e}.down_proj.weight"] for e in experts])
        self._shell.load_state_dict({name: own[name] for name in self._shell.state_dict()})
        self._own = own

    def __call__(self, ids: Tensor, streams: Tensor) -> Tensor:
        """Take tokens [T] and the streams [T, n * H] of the tokens before them; returns the streams
        after the layer."""
        model, count, places = self._shell.model, len(ids), torch.arange(len(ids))
        before = self._projected("h", streams.view(count, -1, 64))
        begun = self._projected("e", model.embed_tokens(ids)).unsqueeze(1)
        distance = places.unsqueeze(1) - places
        mask = torch.zeros(count, count).masked_fill((distance < 0) | (distance >= 16), -torch.inf)
        turned = {"main": model.rotary_emb(begun, places.unsqueeze(0), layer_type="main")}
        given = {"input_ids": ids[None], "position_ids": places[None], "attention_mask": mask[None, None]}
        return model.layers[0]((begun + before)[None], position_embeddings=turned, **given)[0].flatten(1)

    def logits(self, streams: Tensor) -> Tensor:
        """Map streams [N, n * H] to logits [N, vocab]."""
        model = self._shell.model
        return self._shell.lm_head(model.norm(model.hc_head(streams.view(1, len(streams), -1, 64))))[0]

    @torch.no_grad()
    def propose(self, following: Sequence[int], features: Tensor, path: Sequence[int]) -> Tensor:
        """See `DenseDraft.propose`."""
        ids, rows, found = list(following), features, []
        for token in (*path, 0):
            made = self(torch.tensor(ids), rows)[-1:]
            found.append(torch.log_softmax(self.logits(made), -1)[0])
            ids, rows = [*ids, token], torch.cat([rows, made])
        return torch.stack(found)

    def _projected(self, side: str, x: Tensor) -> Tensor:
        own = self._own
        normed = torch.nn.functional.rms_norm(x, (64,), own[f"model.{side}norm.weight"], 1e-6)
        return normed @ own[f"model.{side}_proj.weight"].T


@torch.no_grad()
def streams_of(model: Oracle, tokens: Sequence[int]) -> Tensor:
    """Return each token's streams after the last layer, [n, streams * H]."""
    found: list[Tensor] = []
    hook = model.model.hc_head.register_forward_pre_hook(lambda module, given: found.append(given[0][0].flatten(1)))
    model(torch.tensor([tokens]))
    hook.remove()
    return found[0]


def _write(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["DeepseekV4ForCausalLM"]}))
    whole = {name: values.detach().contiguous().clone() for name, values in weights.items() if "inv_freq" not in name}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_float8(folder: Path, block: int = 32) -> tuple[Path, Path]:
    """From a checkpoint with published names, write one with float8 projections and power-of-two
    block scales, and one with the values that these decode to."""
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    floats, values = dict(weights), dict(weights)
    for name, weight in weights.items():
        if re.fullmatch(r".*\.(w[qo]_[ab]|w[123]|wkv|[eh]_proj)\.weight", name) and ".compressor." not in name:
            parts = weight.unflatten(0, (-1, block)).unflatten(-1, (-1, block))
            scale = torch.exp2(torch.ceil(torch.log2(parts.abs().amax((1, 3)) / 448)))
            codes = (parts / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            floats[name] = codes.flatten(2).flatten(0, 1)
            floats[f"{name.removesuffix('weight')}scale"] = scale.to(torch.float8_e8m0fnu)
            values[name] = (codes.float() * scale[:, None, :, None]).flatten(2).flatten(0, 1)
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block], "scale_fmt": "ue8m0"}
    coded = _write(folder / "float8", {**config, "quantization_config": method}, floats)
    return coded, _write(folder / "values", config, values)
