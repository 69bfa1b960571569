"""Tiny random drafts in the published formats, and their draft tokens in dense torch: each by a
forward from scratch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from tests.checkpoints import SIZES, Oracle, save

LAYERS = 6
AUX_IDS = (0, 2, 4)
"""The layers with hidden states that a draft takes as features, as its configuration names them."""

TARGET: Mapping[str, Any] = MappingProxyType({"num_hidden_layers": LAYERS})


class Eagle3Layer(nn.Module):
    """An EAGLE-3 layer: transformers' attention over the token's embedding and the features,
    concatenated."""

    input_layernorm: nn.Module
    hidden_norm: nn.Module
    post_attention_layernorm: nn.Module

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(
                self.self_attn,
                name,
                nn.Linear(2 * size, getattr(self.self_attn, name).out_features, config.attention_bias),
            )
        self.mlp = LlamaMLP(config)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, LlamaRMSNorm(size, config.rms_norm_eps))
        self.norm_before_residual = norm_before_residual

    def forward(self, token: Tensor, features: Tensor, **given: Any) -> Tensor:
        normed = self.hidden_norm(features)
        joined = torch.cat([self.input_layernorm(token), normed], -1)
        summed = (normed if self.norm_before_residual else features) + self.self_attn(hidden_states=joined, **given)[0]
        return summed + self.mlp(self.post_attention_layernorm(summed))


class DenseDraft(nn.Module):
    """Base of all drafts. `target` has the embedding and the output layer; module names are those
    of published files."""

    target: Any
    config: Any
    rotary: Any

    def __init__(self, target: Oracle, **changes: Any) -> None:
        super().__init__()
        # Set outside the module's parameters, which hold only the draft's own.
        self.__dict__["target"] = target
        self.__dict__["config"] = LlamaConfig(**{**SIZES, "num_hidden_layers": 1, **changes})
        self.config._attn_implementation = "eager"
        self.__dict__["rotary"] = LlamaRotaryEmbedding(self.config)

    def turned(self, count: int) -> dict[str, Any]:
        """Return the further arguments of layers: positions from 0, and a causal mask."""
        places = torch.arange(count)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        return {
            "position_embeddings": self.rotary(torch.zeros(1), places[None]),
            "attention_mask": mask,
            "position_ids": places[None],
        }

    def project(self, features: Tensor) -> Tensor:
        return features

    def logits(self, recurrent: Tensor) -> Tensor:
        return self.target.lm_head(recurrent)

    @torch.no_grad()
    def propose(self, following: Sequence[int], features: Tensor, path: Sequence[int]) -> Tensor:
        """Return log-probabilities [len(path) + 1, vocab] after the KV entries of `features` [L, F]
        with their next tokens `following`, and after each draft token of a path."""
        ids, rows, found = list[Any](following), self.project(features), []
        for token in (*path, None):
            recurrent = self(self.target.model.embed_tokens(torch.tensor(ids))[None], rows[None])[0]
            found.append(torch.log_softmax(self.logits(recurrent[-1:]), -1)[0])
            rows = torch.cat([rows, recurrent[-1:]])
            ids.append(token)
        return torch.stack(found)


class DenseEagle(DenseDraft):
    def __init__(self, target: Oracle, has_bias: bool = True, has_qkv_bias: bool = False, **changes: Any) -> None:
        super().__init__(target, attention_bias=has_qkv_bias, **changes)
        self.fc = nn.Linear(2 * self.config.hidden_size, self.config.hidden_size, has_bias)
        self.layers = nn.ModuleList(LlamaDecoderLayer(self.config, i) for i in range(self.config.num_hidden_layers))
        self.layers[0].register_module("input_layernorm", nn.Identity())
        for layer in self.layers:
            cast(Any, layer).self_attn.o_proj.bias = None

    def forward(self, token: Tensor, features: Tensor) -> Tensor:
        hidden = self.fc(torch.cat([token, features], -1))
        for layer in self.layers:
            hidden = layer(hidden, **self.turned(token.shape[1]))
        return hidden


class DenseEagle3(DenseDraft):
    d2t: Any

    def __init__(
        self,
        target: Oracle,
        rows: int,
        norm_output: bool = False,
        has_fc_norm: bool = False,
        norm_before_fc: bool = False,
        norm_before_residual: bool = False,
        **changes: Any,
    ) -> None:
        super().__init__(target, **changes)
        config, wide = self.config, target.config.hidden_size
        self.norm_output = norm_output
        self.fc = nn.Linear(3 * wide, config.hidden_size, bias=False)
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(wide, config.rms_norm_eps) for _ in range(3 * has_fc_norm))
        self.input_norm = LlamaRMSNorm(3 * wide, config.rms_norm_eps) if norm_before_fc else nn.Identity()
        self.midlayer = Eagle3Layer(config, norm_before_residual)
        self.layers = nn.ModuleDict({str(i): LlamaDecoderLayer(config, i) for i in range(1, config.num_hidden_layers)})
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        if rows:
            self.lm_head = nn.Linear(config.hidden_size, rows, bias=False)
            ids = torch.randperm(config.vocab_size)[:rows].sort().values
            self.register_buffer("d2t", ids - torch.arange(rows))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True))

    def project(self, features: Tensor) -> Tensor:
        parts = self.input_norm(features).chunk(3, -1)
        return self.fc(torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=False)] or parts, -1))

    def forward(self, token: Tensor, features: Tensor) -> Tensor:
        given = self.turned(token.shape[1])
        hidden = self.midlayer(token, features, **given)
        for layer in self.layers.values():
            hidden = layer(hidden, **given)
        return self.norm(hidden) if self.norm_output else hidden

    def logits(self, recurrent: Tensor) -> Tensor:
        normed = recurrent if self.norm_output else self.norm(recurrent)
        if "lm_head" not in self._modules:
            return super().logits(normed)
        own = self.lm_head(normed)
        wide = torch.full((len(own), self.config.vocab_size), -torch.inf)
        wide[:, torch.arange(len(self.d2t)) + self.d2t] = own
        return wide


class DFlashLayer(nn.Module):
    """A DFlash layer: queries of the block, and keys and values of the features and the block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn: Any = LlamaAttention(config, 0)
        self.self_attn.q_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
        self.self_attn.k_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, context: Tensor, turns: Any) -> Tensor:
        own, normed = self.self_attn, self.input_layernorm(hidden)
        both = torch.cat([context, normed])
        q, k, v = (own.q_proj(normed), own.k_proj(both), own.v_proj(both))
        q, k, v = (each.unflatten(1, (-1, own.head_dim)).transpose(0, 1) for each in (q, k, v))
        q, k = own.q_norm(q), own.k_norm(k)
        cos, sin = (each[0] for each in turns)
        q, k = apply_rotary_pos_emb(torch.cat([q.new_zeros(len(q), len(context), q.shape[2]), q], 1), k, cos, sin, 0)
        mixed = nn.functional.scaled_dot_product_attention(q[:, len(context) :], k, v, enable_gqa=True)
        hidden = hidden + own.o_proj(mixed.transpose(0, 1).flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DenseDFlash(DenseDraft):
    """Drafts a block of mask tokens after a root, by one forward over all features before it."""

    def __init__(self, target: Oracle, block: int, mask: int, **changes: Any) -> None:
        super().__init__(target, head_dim=12, **changes)
        config, size = self.config, self.config.hidden_size
        self.block, self.mask = block, mask
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.hidden_norm, self.norm = (LlamaRMSNorm(size, config.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))

    @torch.no_grad()
    def propose(self, following: Sequence[int], features: Tensor, path: Sequence[int]) -> Tensor:
        """Return log-probabilities [block - 1, vocab] for any path; the last of `following` is the
        root."""
        ids = torch.tensor([following[-1], *[self.mask] * (self.block - 1)])
        hidden, context = self.target.model.embed_tokens(ids), self.hidden_norm(self.fc(features))
        turns = self.rotary(torch.zeros(1), torch.arange(len(features) + self.block)[None])
        for layer in self.layers:
            hidden = layer(hidden, context, turns)
        return torch.log_softmax(self.logits(self.norm(hidden[1:])), -1)


class DenseNextToken(DenseDraft):
    """DeepSeek's MTP around a transformers layer and norm; `shell` is a model with one layer. MiMo
    concatenates in the other order, and sets the first token to zero."""

    def __init__(self, target: Oracle, shell: Oracle, is_mimo: bool) -> None:
        super().__init__(target)
        self.is_mimo = is_mimo
        size, norm = target.config.hidden_size, type(shell.model.norm)
        self.enorm, self.hnorm = (norm(size, target.config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.shell = shell

    def forward(self, token: Tensor, features: Tensor) -> Tensor:
        if self.is_mimo:
            token = token.index_fill(1, torch.tensor([0]), 0)
        sides = [self.enorm(token), self.hnorm(features)]
        joined = self.eh_proj(torch.cat(sides[::-1] if self.is_mimo else sides, -1))
        return self.shell.model(inputs_embeds=joined, use_cache=False).last_hidden_state


class DenseHeads(DenseDraft):
    """Several MTP layers with one draft token each: each runs one forward over all KV entries, on
    the output of the layer before and on tokens one position later."""

    def __init__(self, heads: Sequence[DenseNextToken]) -> None:
        super().__init__(heads[0].target)
        self.heads = nn.ModuleList(heads)

    @torch.no_grad()
    def propose(self, following: Sequence[int], features: Tensor, path: Sequence[int]) -> Tensor:
        """See `DenseDraft.propose`."""
        ids, found, rows = torch.tensor([*following, *path]), [], features[None]
        for depth, head in enumerate(self.heads[: len(path) + 1]):
            token = self.target.model.embed_tokens(ids[depth : depth + len(features)])
            rows = head(token[None], rows)
            found.append(torch.log_softmax(self.logits(rows[0, -1:]), -1)[0])
        return torch.stack(found)


def randomized(model: Any, seed: int = 3) -> Any:
    """Set random weights, large enough that a wrong one shows, and norms that are not 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wide = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * wide if "norm" in name else 0.1 * wide)
    return model.eval()


def with_config(folder: Path, **changes: Any) -> Path:
    """Change keys of a folder's configuration; None removes one."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return folder


def publish(draft: DenseDraft, folder: Path, **words: Any) -> Path:
    """Save a draft in its own folder, as EAGLE drafts are published."""
    folder.mkdir(exist_ok=True)
    draft.config.save_pretrained(folder)
    save_file({name: value.contiguous() for name, value in draft.state_dict().items()}, folder / "model.safetensors")
    return with_config(folder, architectures=["LlamaForCausalLM"], **words)


def eagle(target: Oracle, folder: Path, **changes: Any) -> DenseDraft:
    """Make an EAGLE draft in `folder`."""
    made = randomized(DenseEagle(target, **changes))
    publish(made, folder)
    return made


def eagle3(target: Oracle, folder: Path, rows: int = 40, norm_output: bool = False, **changes: Any) -> DenseDraft:
    """Make an EAGLE-3 draft in `folder`; with `rows` 0 it uses the target's output layer."""
    torch.manual_seed(1)
    made = randomized(DenseEagle3(target, rows, norm_output, **changes))
    ids = {"eagle_aux_hidden_state_layer_ids": list(AUX_IDS), "use_aux_hidden_state": True}
    own = {"draft_vocab_size": rows or None, "norm_output": norm_output}
    own |= {name: changes[name] for name in ("norm_before_fc", "norm_before_residual") if name in changes}
    publish(made, folder, eagle_config=ids, **own)
    return made


def dflash(target: Oracle, folder: Path, block: int = 5, layers: int = 2, **own: Any) -> DenseDraft:
    """Make a DFlash draft in `folder`."""
    made = randomized(DenseDFlash(target, block, mask := target.config.vocab_size - 1, num_hidden_layers=layers))
    words = {"mask_token_id": mask, "target_layer_ids": list(AUX_IDS), **own}
    publish(made, folder, block_size=block, dflash_config=words)
    return made


def by_speculators(folder: Path) -> None:
    """Rewrite an EAGLE-3 draft to the format of the speculators library: the layer's settings are
    nested, and layer ids are one higher."""
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    eagle, names = (
        raw.pop("eagle_config"),
        ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "norm_output"),
    )
    own = {name: raw.pop(name) for name in names if name in raw}
    kind = {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"], "target_hidden_size": None}
    ids = [each + 1 for each in eagle["eagle_aux_hidden_state_layer_ids"]]
    layer = {"transformer_layer_config": raw, "eagle_aux_hidden_state_layer_ids": ids}
    file.write_text(json.dumps({**own, **kind, **layer}))
    renamed(folder, "midlayer.", "layers.0.")


def renamed(folder: Path, old: str, new: str) -> None:
    """Rename tensors of a checkpoint."""
    file = folder / "model.safetensors"
    save_file({name.replace(old, new): value for name, value in load_file(file).items()}, file)


NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "deepseek": MappingProxyType(
            {
                "shell.model.layers.0.": "model.layers.{}.",
                "shell.model.norm.": "model.layers.{}.shared_head.norm.",
                "enorm.": "model.layers.{}.enorm.",
                "hnorm.": "model.layers.{}.hnorm.",
                "eh_proj.": "model.layers.{}.eh_proj.",
            }
        ),
        "qwen": MappingProxyType(
            {
                "shell.model.layers.0.": "mtp.layers.0.",
                "shell.model.norm.": "mtp.norm.",
                "enorm.": "mtp.pre_fc_norm_embedding.",
                "hnorm.": "mtp.pre_fc_norm_hidden.",
                "eh_proj.": "mtp.fc.",
            }
        ),
        "mimo": MappingProxyType(
            {
                "shell.model.layers.0.": "model.mtp_layers.{}.",
                "shell.model.norm.": "model.mtp_layers.{}.final_layernorm.",
                "enorm.": "model.mtp_layers.{}.token_layernorm.",
                "hnorm.": "model.mtp_layers.{}.hidden_layernorm.",
                "eh_proj.": "model.mtp_layers.{}.input_proj.",
            }
        ),
    }
)
"""Names of the parts of `DenseNextToken` in files."""


def next_tokens(
    target: Oracle, folder: Path, make: Callable[..., Oracle], count: int, names: str = "deepseek", **one: Any
) -> DenseHeads:
    """Save the target with `count` MTP layers after its last one; `make(**one)` makes a model with
    one such layer."""
    save(target, folder)
    shells = [make(num_hidden_layers=1, **one) for _ in range(count)]
    heads = [
        randomized(DenseNextToken(target, shell, names == "mimo"), 3 + index) for index, shell in enumerate(shells)
    ]
    stored = load_file(folder / "model.safetensors")
    for index, head in enumerate(heads):
        stored |= _published(head, names, index, target)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    kind = {"architectures": ["MiMoForCausalLM"]} if names == "mimo" else {}
    with_config(folder, num_nextn_predict_layers=count, **kind)
    return DenseHeads(heads)


def _published(head: DenseNextToken, names: str, index: int, target: Oracle) -> dict[str, Tensor]:
    """Return the tensors of the MTP layer with this index, by their names in files."""
    place, stored = index if names == "mimo" else target.config.num_hidden_layers + index, {}
    for name, value in head.state_dict().items():
        for ours, theirs in NAMES[names].items():
            if name.startswith(ours):
                stored[theirs.format(place) + name.removeprefix(ours)] = value.contiguous()
    if names == "deepseek":
        copies = {"embed_tokens": target.model.embed_tokens.weight, "shared_head.head": target.lm_head.weight}
        stored |= {f"model.layers.{place}.{name}.weight": value.detach().clone() for name, value in copies.items()}
    return stored


def next_token(
    target: Oracle, folder: Path, make: Callable[..., Oracle], names: str = "deepseek", **one: Any
) -> DenseNextToken:
    """Save the target with one MTP layer, which drafts all tokens."""
    return cast(DenseNextToken, next_tokens(target, folder, make, 1, names, **one).heads[0])
