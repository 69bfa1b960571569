"""Load a draft model from a checkpoint folder: find its kind, check that it fits, read its weights.

A draft without its own embedding or output layer uses the target's; there is no second copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from sglcore.checkpoint.checkpoint_files import DRAFT_FOLDER, checkpoint_files, read_json
from sglcore.checkpoint.frozen_draft_config import BACKBONE, FrozenCells, flat_words
from sglcore.checkpoint.gguf_header import is_gguf
from sglcore.checkpoint.model_config import ModelConfig, config_of, read_config
from sglcore.checkpoint.parallel_sizes import check_topology
from sglcore.config.engine_config import EngineConfig
from sglcore.device.errors import ConfigError
from sglcore.device.facts import Facts
from sglcore.device.ledger import DecisionLedger, Row
from sglcore.models.checkpoint import load_checkpoint
from sglcore.models.drafts import deepseek_v4_nextn
from sglcore.models.drafts.mtp import PREFIXES, layout_of, next_token_config
from sglcore.models.layer_kinds import Architecture
from sglcore.models.weights.model_loader import load_model
from sglcore.models.weights.safetensors_file import SafetensorsFile
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.speculative.speculation_choice import DFLASH, DRAFT_TOKENS, EAGLE, EAGLE3, FROZEN, MTP, STANDALONE

if TYPE_CHECKING:
    from sglcore.runtime.parallel.rank_groups import Groups

DRAFTS: Mapping[str, str] = MappingProxyType(
    {
        EAGLE: "sglcore.models.drafts.eagle:EagleForCausalLM",
        EAGLE3: "sglcore.models.drafts.eagle3:Eagle3ForCausalLM",
        DFLASH: "sglcore.models.drafts.dflash:DFlashDraftModel",
        FROZEN: "sglcore.models.drafts.gemma4_assistant:Gemma4AssistantForCausalLM",
        MTP: "sglcore.models.drafts.mtp:NextToken",
        deepseek_v4_nextn.ARCHITECTURE: "sglcore.models.drafts.deepseek_v4_nextn:DeepseekV4NextN",
    }
)
"""The classes of drafts. No registry has them: most files name the architecture of the target."""
LAYERS = "next_token_layers"
"""Key in `words`: the number of MTP layers in the checkpoint, used or not."""
AUX_IDS = "eagle_aux_hidden_state_layer_ids"
LIBRARY_KIND, LIBRARY_LAYER = "speculators_model_type", "transformer_layer_config"
"""Keys that only configurations by the library speculators have."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of a checkpoint's tensors, by name."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A loaded draft model.

    `aux_layers`: the draft takes the target's residual sum before each of these layers. Empty: it
    takes the hidden states after the last norm. None: it takes tokens only.
    `heads`: the number of layers that draft one token each. 1: one layer drafts all tokens.
    """

    kind: str
    model: Architecture
    aux_layers: tuple[int, ...] | None
    heads: int = 1


def offered_head(folder: Path) -> str | None:
    """Return the kind of draft in a target's checkpoint; None without one that is supported.

    The draft lies in the folder `draft`, or is the MTP layers after the last layer. Reads no
    weights. Raises the errors of reading its configuration.
    """
    beside = folder / DRAFT_FOLDER / "config.json"
    if beside.is_file():
        return None if _unserved(read_json(beside)) else kind_of(folder / DRAFT_FOLDER)
    found = None if is_gguf(folder) else kind_of(folder)
    return found if found == MTP else None


def kind_of(folder: Path) -> str:
    """Return the kind of draft in a folder, from the names of its tensors.

    The name of the architecture does not decide: in many drafts it is the target's.
    """
    names, raw = _shapes(folder), _read(folder)
    if "pre_projection.weight" in names and "post_projection.weight" in names:
        return FROZEN
    if any(name.endswith(".hidden_norm.weight") for name in names):
        return EAGLE3
    if "fc.weight" in names and "hidden_norm.weight" in names:
        return DFLASH
    if "fc.weight" in names:
        return EAGLE
    layers = raw.get("text_config", raw).get("num_hidden_layers", 0)
    is_next_token = deepseek_v4_nextn.PART in names or layout_of(names.keys(), layers) is not None
    return MTP if is_next_token else STANDALONE


def load_draft(
    config: EngineConfig,
    folder: Path,
    kind: str,
    target: Architecture,
    *,
    facts: Facts,
    kernels: KernelTable,
    ledger: DecisionLedger,
    progress: Callable[[str, int, int], None],
    groups: Groups | None = None,
) -> Draft:
    """Load the draft for a target, in the target's dtype and for its positions.

    `folder` may be the target's own. `kind` is one of EAGLE, EAGLE3, DFLASH, FROZEN, MTP and
    STANDALONE. With `groups`, loads this rank's part. Records the draft in the ledger. Raises
    ConfigError before it reads weights if the draft has another kind or does not fit the target;
    also raises the errors of `load_checkpoint`. Waits.
    """
    if folder == target.config.path and kind != MTP:
        folder = folder / DRAFT_FOLDER
    if kind == STANDALONE:
        shared = {"facts": facts, "kernels": kernels, "progress": progress, "groups": groups}
        return _standalone(config, folder, target, ledger=ledger, **shared)
    draft, shapes = _draft_config(folder, kind, target, config), _shapes(folder)
    heads, layers = len(draft.words.get(PREFIXES, ())), draft.words.get(LAYERS, 1)
    if groups is not None:
        topology = groups.place.topology
        check_topology(draft, replace(topology, ep=1) if draft.moe is None else topology)
    given = {"model.embed_tokens": target.embed_ids, "lm_head": target.logits}
    if kind == FROZEN:
        given = {"target.embed_tokens": target.embed_ids}
    if kind == EAGLE3:
        given = {name: layer for name, layer in given.items() if f"{name.removeprefix('model.')}.weight" not in shapes}
    model: Any = load_model(
        folder,
        draft,
        kernels=kernels,
        device=facts.tensor_device,
        dtype=target.dtype,
        max_positions=config.max_model_len or target.config.context_length,
        architectures=DRAFTS,
        progress=lambda done, total: progress("loading the draft", done, total),
        quantize=config.quantize,
        index_dtype=getattr(torch, facts.index_dtype),
        page_size=config.page_size,
        kv_cache_dtype=config.kv_cache_dtype,
        given=given,
        groups=groups,
    )
    shared = " and ".join(["embedding", "output layer"][name == "lm_head"] for name in given) or "nothing"
    count = sum(each.numel() for each in model.weights.parameters)
    told = f"{count / 1e6:.1f} million weights of {folder}; shared with the model: {shared}"
    if heads == 1 < layers:
        told += f"; the first of its {layers} layers drafts all tokens"
    ledger.record(Row("draft model", kind, kind, told, "--draft-model"))
    return Draft(kind, model, model.aux_layers, max(heads, 1))


def _standalone(
    config: EngineConfig, folder: Path, target: Architecture, *, ledger: DecisionLedger, **given: Any
) -> Draft:
    """Load any model that generates text and has the target's vocabulary."""
    found = read_config(folder)
    _same(folder, "vocab_size", found.vocab_size, target.config.vocab_size)
    ours, theirs = (_tokens(each) for each in (folder, target.config.path))
    if ours is not None and theirs is not None and ours != theirs:
        raise ConfigError(
            f"{folder / 'tokenizer.json'} has other token ids than the model", wanted="the same ids", remedy=_OTHER
        )
    # Its own ledger keeps its decisions out of the target's. The target bounds its positions.
    own = replace(config, dtype=str(target.dtype).removeprefix("torch."), max_model_len=None, task="generate")
    model = load_checkpoint(own, folder, ledger=DecisionLedger(), **given)
    ledger.record(Row("draft model", STANDALONE, STANDALONE, f"{found.architecture} of {folder}", "--draft-model"))
    return Draft(STANDALONE, model, None)


def _read(folder: Path) -> dict[str, Any]:
    """Return a `config.json`; for the library speculators with its layer's words at the top level.

    Raises ConfigError for a kind or a layer that is not supported.
    """
    raw = read_json(folder / "config.json")
    if BACKBONE in raw:
        return flat_words(raw)
    if LIBRARY_KIND not in raw:
        return raw
    if other := _unserved(raw):
        _unfit(folder, *other)
    layer = raw.get(LIBRARY_LAYER) or {}
    return {"norm_before_residual": True, **layer, **{name: value for name, value in raw.items() if value is not None}}


def _unserved(raw: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return what is not supported in a configuration by the library speculators, or None.

    The result has the name of the word, the value found and the value wanted.
    """
    kind, layer = raw.get(LIBRARY_KIND, EAGLE3), (raw.get(LIBRARY_LAYER) or {}).get("model_type", "llama")
    if kind != EAGLE3:
        return LIBRARY_KIND, repr(kind), repr(EAGLE3)
    return None if layer == "llama" else (f"{LIBRARY_LAYER}.model_type", repr(layer), "'llama'")


_OTHER = "use a draft that was made for this model"


def _draft_config(folder: Path, kind: str, target: Architecture, asked: EngineConfig) -> ModelConfig:
    """Return the configuration from which the class of this kind is built.

    Raises ConfigError for a draft of another kind and for one that does not fit the target.
    """
    found = kind_of(folder)
    if found != kind:
        raise ConfigError(
            f"{folder} has a draft of kind {found!r}", wanted=f"{kind!r}", remedy=f"--speculative {found}"
        )
    config, shapes = config_of(folder, _read(folder)), _shapes(folder)
    _same(folder, "vocab_size", config.vocab_size, target.config.vocab_size)
    if kind == MTP:
        _same(folder, "hidden_size", config.hidden_size, target.config.hidden_size)
        if deepseek_v4_nextn.PART in shapes:
            return deepseek_v4_nextn.next_token_config(config)
        layout = layout_of(shapes.keys(), config.num_hidden_layers)
        assert layout is not None
        names, prefixes = layout
        used = prefixes[: _heads(folder, len(prefixes), asked)]
        made = next_token_config(config, names, used)
        return replace(made, architecture=kind, words={**made.words, LAYERS: len(prefixes)})
    words = {"num_nextn_predict_layers": 0} | _words_of(kind, config, shapes, target)
    if kind != FROZEN and (kind != EAGLE3 or "embed_tokens.weight" not in shapes):
        _same(folder, "hidden_size", config.hidden_size, target.config.hidden_size)
    has_bias = any(name.endswith("q_proj.bias") for name in shapes)
    return replace(
        config,
        architecture=kind,
        attention_bias=has_bias,
        words={**config.words, **words},
    )


def _heads(folder: Path, found: int, config: EngineConfig) -> int:
    """Return the number of MTP layers to use, of the `found` layers in the checkpoint.

    With one layer, or for trees, that layer drafts all tokens. Raises ConfigError if there are
    several layers but fewer than the requested draft tokens.
    """
    tokens = config.draft_tokens
    if config.draft_width > 1:
        return 1
    if found > 1 and tokens is not None and tokens > found:
        raise ConfigError(
            f"draft_tokens is {tokens}, and {folder} has {found} layers that predict one token each",
            remedy=f"--draft-tokens {found}, or fewer",
        )
    return min(found, DRAFT_TOKENS if tokens is None else max(tokens, 1))


def _words_of(kind: str, config: ModelConfig, shapes: Shapes, target: Architecture) -> dict[str, Any]:
    """Return the words that the class of this kind needs in addition to the configuration."""
    if kind == EAGLE:
        return {"fc_bias": "fc.bias" in shapes}
    makers = {DFLASH: _dflash_words, FROZEN: _frozen_words}
    return makers.get(kind, _eagle3_words)(config, shapes, target)


def _eagle3_words(config: ModelConfig, shapes: Shapes, target: Architecture) -> dict[str, Any]:
    """Return the words that `Eagle3ForCausalLM` needs in addition to the configuration.

    Raises ConfigError for a draft that does not fit the target.
    """
    width = config.words.get("target_hidden_size", config.hidden_size)
    _same(config.path, "target_hidden_size", width, target.feature_size)
    rows = config.words.get("draft_vocab_size", config.vocab_size)
    has_head = "lm_head.weight" in shapes
    if rows > config.vocab_size:
        _unfit(config.path, "draft_vocab_size", rows, f"{config.vocab_size} at most")
    missing = [name for name in ("lm_head.weight", "d2t") if name not in shapes]
    if rows != config.vocab_size and missing:
        _lacking(config.path, "draft_vocab_size", rows, missing[0], f"{config.vocab_size}")
    has_norm = "input_norm.weight" in shapes
    if not has_norm and config.words.get("eagle_config", config.words).get("norm_before_fc", False):
        _lacking(config.path, "norm_before_fc", True, "input_norm.weight", "false")
    return {
        "aux_layers": _aux_layers(config, shapes, target.config.num_hidden_layers, width),
        "target_hidden_size": width,
        "has_input_norm": has_norm,
        "has_fc_norm": any(name.startswith(("fc_norm.", "aux_norm_")) for name in shapes),
        "draft_vocab_size": rows,
        "has_d2t": has_head and "d2t" in shapes,
    }


def _dflash_words(config: ModelConfig, shapes: Shapes, target: Architecture) -> dict[str, Any]:
    """Return the words that `DFlashDraftModel` needs in addition to the configuration.

    Raises ConfigError for sliding-window layers and for a draft that does not fit the target.
    """
    own, folder, layers = config.words.get("dflash_config", {}), config.path, target.config.num_hidden_layers
    if any(each is not None for each in config.sliding_windows):
        _unfit(folder, "layer_types", config.words.get("layer_types"), "'full_attention' alone")
    block, mask = config.words.get("block_size"), own.get("mask_token_id")
    if not isinstance(block, int) or block < 2:
        _unfit(folder, "block_size", block, "2 or more")
    if not isinstance(mask, int) or not 0 <= mask < target.config.vocab_size:
        _unfit(folder, "dflash_config.mask_token_id", mask, f"a token id below {target.config.vocab_size}")
    ids, width = own.get("target_layer_ids"), target.feature_size
    count = shapes["fc.weight"][1] // width
    found = _spread(count, layers) if ids is None else list(ids)
    if not found or found != sorted(found) or found[0] < 0 or found[-1] >= layers or len(found) != count:
        wanted = f"{count} ascending numbers of the model's {layers} layers, as fc.weight implies"
        _unfit(folder, "dflash_config.target_layer_ids", found, wanted)
    aux_layers = tuple(each + 1 for each in found)
    return {"aux_layers": aux_layers, "block_size": block, "mask_token_id": mask, "target_hidden_size": width}


def _frozen_words(config: ModelConfig, shapes: Shapes, target: Architecture) -> dict[str, Any]:
    """Return the words that `Gemma4AssistantForCausalLM` needs in addition to the configuration.

    Each sliding-window layer reads the KV slots of the target's last sliding-window layer, each
    other layer those of the target's last layer without a window. Raises ConfigError for a draft
    that does not fit the target.
    """
    folder, last = config.path, {layer.sliding_window is not None: layer for layer in target.attention_layers}
    _same(folder, BACKBONE, config.words.get(BACKBONE, 0), target.config.hidden_size)
    found = list[FrozenCells]()
    for place, window in enumerate(config.sliding_windows):
        layer, kind = last.get(window is not None), "full_attention" if window is None else "sliding_attention"
        if layer is None or layer.rows or layer.is_exact:
            _unfit(
                folder, f"layer_types[{place}]", repr(kind), "a kind of layer with keys and values by head in the model"
            )
        size = shapes.get(f"model.layers.{place}.self_attn.q_norm.weight", (0,))[0]
        if size != layer.head_dim or config.num_attention_heads % layer.num_kv_heads:
            heads = f"{config.num_attention_heads} heads of {size} in layer {place}"
            _unfit(
                folder,
                "num_attention_heads",
                heads,
                f"a multiple of the model's {layer.num_kv_heads} heads of {layer.head_dim}",
            )
        found.append(FrozenCells(layer.layer_id, layer.num_kv_heads, layer.head_dim, window))
    return {"frozen_cells": tuple(found), "token_groups": _token_groups(config, shapes)}


def _token_groups(config: ModelConfig, shapes: Shapes) -> tuple[int, int] | None:
    """Return the number of token groups and the number that a forward selects.

    None if a forward takes all tokens. Raises ConfigError for numbers that the tensors contradict.
    """
    if not config.words.get("use_ordered_embeddings", False):
        return None
    groups, most = (config.words.get(name, 0) for name in ("num_centroids", "centroid_intermediate_top_k"))
    stored = shapes.get("masked_embedding.centroids.weight", (0,))[0]
    if groups != stored or groups < 1 or config.vocab_size % groups:
        _unfit(
            config.path,
            "num_centroids",
            groups,
            f"{stored}, as masked_embedding.centroids has, and a divisor of {config.vocab_size}",
        )
    if not 0 < most <= groups:
        _unfit(config.path, "centroid_intermediate_top_k", most, f"1 to {groups}")
    return groups, most


def _spread(count: int, layers: int) -> list[int]:
    """Return the default layers: a draft that names no layers reads the output of these."""
    if count == 1:
        return [layers // 2]
    return [round(1 + each * (layers - 4) / (count - 1)) for each in range(count)]


def _aux_layers(config: ModelConfig, shapes: Shapes, layers: int, width: int) -> tuple[int, ...]:
    """Return the target's layers before which the draft takes the residual sum.

    The ids in a configuration name the layer before the sum. In configurations by the library
    speculators they name the layer after it.
    """
    eagle = config.words.get("eagle_config", {})
    if not eagle.get("use_aux_hidden_state", True):
        return ()
    ids, behind = eagle.get(AUX_IDS, config.words.get(AUX_IDS)), 0 if LIBRARY_KIND in config.words else 1
    found = [2, layers // 2, layers - 3] if ids is None else [each + behind for each in ids]
    if not found or found != sorted(found) or found[0] < 0 or found[-1] > layers:
        _unfit(config.path, AUX_IDS, ids, f"ascending numbers of the model's {layers} layers")
    inputs = shapes.get("fc.weight", (0, 0))[1]
    if inputs != len(found) * width:
        _unfit(config.path, AUX_IDS, ids, f"{inputs // width} layers, because fc.weight has {inputs} columns")
    return tuple(found)


def _same(folder: Path, name: str, found: int, wanted: int) -> None:
    if found != wanted:
        _unfit(folder, name, found, f"{wanted}, the model's")


def _lacking(folder: Path, name: str, found: object, tensor: str, otherwise: str) -> None:
    raise ConfigError(
        f"{folder / 'config.json'} has {name} = {found}, and its files have no {tensor}",
        wanted=f"{tensor}, or {otherwise}",
        remedy="download the checkpoint again",
    )


def _unfit(folder: Path, name: str, found: object, wanted: str) -> NoReturn:
    raise ConfigError(f"{folder / 'config.json'} has {name} = {found}", wanted=wanted, remedy=_OTHER)


def _shapes(folder: Path) -> Shapes:
    """Return the shapes of all tensors in a folder, from the headers of the files."""
    found: dict[str, tuple[int, ...]] = {}
    for path in checkpoint_files(folder):
        with closing(SafetensorsFile(path)) as file:
            found |= {entry.name: entry.shape for entry in file.entries}
    return found


def _tokens(folder: Path) -> tuple[Any, Any] | None:
    """Return the vocabulary and the added tokens of a tokenizer; None without `tokenizer.json`."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    raw = read_json(file)
    added = sorted((each["id"], each["content"]) for each in raw.get("added_tokens", ()))
    return raw.get("model", {}).get("vocab"), added
