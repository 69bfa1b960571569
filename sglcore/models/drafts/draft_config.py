"""The kind and the configuration of a draft model, from its checkpoint folder: reads JSON and the
headers of weight files, no weights. Knows no tensor library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglcore.checkpoint.checkpoint_files import DRAFT_FOLDER, checkpoint_files, read_json
from sglcore.checkpoint.frozen_draft_config import BACKBONE, flat_words
from sglcore.checkpoint.gguf_header import is_gguf
from sglcore.checkpoint.model_config import ModelConfig, config_of, read_config
from sglcore.checkpoint.safetensors_header import read_entries
from sglcore.config.draft_kinds import DRAFT_KINDS, DRAFT_TOKENS, MTP
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.device.package import Ref, resolve
from sglcore.models.drafts import deepseek_v4_nextn
from sglcore.models.drafts.draft_checkpoint import (
    EMBEDDING,
    LIBRARY_KIND,
    OTHER,
    SHARED,
    DraftCheckpoint,
    Shapes,
    same,
    unfit,
)
from sglcore.models.drafts.mtp import layout_of, next_token_config
from sglcore.models.layer_kinds import Architecture

STANDALONE = "standalone"
"""The kind of any model with the target's vocabulary."""
BY_TENSORS = tuple(kind.name for kind in DRAFT_KINDS.values() if kind.checkpoint)
"""The kinds that are recognised by the names of a draft's tensors."""
LAYERS = "next_token_layers"
"""Key in `words`: the number of MTP layers in the checkpoint, used or not."""
LIBRARY_LAYER, LIBRARY_SERVED = "transformer_layer_config", "eagle3"
"""The key of the layer in configurations by the library speculators, and its kind that is
supported."""


def offered_head(folder: Path) -> str | None:
    """Return the kind of draft in a target's checkpoint; None without one that is supported.

    The draft is in the folder `draft` of `folder`, or is the MTP layers after the last layer. Reads
    no weights. Raises the errors of reading its configuration.
    """
    beside = folder / DRAFT_FOLDER / "config.json"
    if beside.is_file():
        return None if _unserved(read_json(beside)) else kind_of(folder / DRAFT_FOLDER)
    found = None if is_gguf(folder) else kind_of(folder)
    return found if found == MTP else None


def checkpoint_of(kind: str) -> DraftCheckpoint:
    """Return the `DraftCheckpoint` of a kind in `BY_TENSORS`: its model class, and how to recognise
    and configure it from tensor names and shapes.
    """
    ref = DRAFT_KINDS[kind].checkpoint
    assert ref is not None
    return resolve(ref)


def draft_classes() -> dict[str, Ref]:
    """Return the classes of drafts as `module:class`, by kind or architecture. No registry has
    them: most files name the architecture of the target."""
    return {
        **{kind: checkpoint_of(kind).model for kind in BY_TENSORS},
        MTP: "sglcore.models.drafts.mtp:NextToken",
        deepseek_v4_nextn.ARCHITECTURE: "sglcore.models.drafts.deepseek_v4_nextn:DeepseekV4NextN",
    }


def kind_of(folder: Path) -> str:
    """Return the kind of draft in a folder, from the names of its tensors: one of `BY_TENSORS`, MTP
    if there are MTP layers, else STANDALONE.

    The name of the architecture does not decide: in many drafts it is the target's.
    """
    names, raw = tensor_shapes(folder), _read(folder)
    for kind in BY_TENSORS:
        if checkpoint_of(kind).is_in(names):
            return kind
    layers = raw.get("text_config", raw).get("num_hidden_layers", 0)
    is_next_token = deepseek_v4_nextn.PART in names or layout_of(names.keys(), layers) is not None
    return MTP if is_next_token else STANDALONE


def draft_folder(config: EngineConfig, folder: Path, kind: str) -> Path:
    """Return the folder of the draft model of a kind, for the target in `folder`: the configured
    one; else the subfolder of `folder` with the name of the kind; else `folder` or its subfolder
    `draft`, if the checkpoint has such a draft.

    Raises ConfigError if there is none.
    """
    if config.draft_model is not None:
        return given_folder(config.draft_model, folder)
    if (folder / kind / "config.json").is_file():
        return folder / kind
    brought = kind_of(folder) if kind == MTP and folder.is_dir() else offered_head(folder)
    if brought != kind:
        raise ConfigError(
            f"speculative is {kind!r}, and this checkpoint has no such draft", remedy="--draft-model FOLDER"
        )
    return folder if kind == MTP else folder / DRAFT_FOLDER


def given_folder(text: str, folder: Path) -> Path:
    """Return the folder `text`, or else the subfolder `text` of the model's `folder`.

    Raises ConfigError if neither exists.
    """
    found = (Path(text).expanduser(), folder / text)
    for each in found:
        if each.is_dir():
            return each
    raise ConfigError(
        f"there is no folder {text!r}, and none of this name in the model's folder",
        wanted="the folder of a draft model",
        remedy="correct --draft-model",
    )


def shared_parts(kind: str, shapes: Shapes) -> Mapping[str, str]:
    """Return the target's parts that a draft uses, EMBEDDING or HEAD, by the draft's names for
    them; `shapes` are those of its tensors."""
    return checkpoint_of(kind).shared(shapes) if kind in BY_TENSORS else SHARED


def check_vocabulary(folder: Path, target: ModelConfig) -> ModelConfig:
    """Return the configuration of a standalone draft. Raises ConfigError unless it has the target's
    vocabulary size and, if both have a `tokenizer.json`, the same token ids."""
    found = read_config(folder)
    same(folder, "vocab_size", found.vocab_size, target.vocab_size)
    ours, theirs = (_tokens(each) for each in (folder, target.path))
    if ours is not None and theirs is not None and ours != theirs:
        raise ConfigError(
            f"{folder / 'tokenizer.json'} has other token ids than the model", wanted="the same ids", remedy=OTHER
        )
    return found


def _read(folder: Path) -> dict[str, Any]:
    """Return the words of a draft's `config.json`. The words of `text_config` (only of Gemma 4's
    assistant) and of the nested layer (of the library speculators) are at the top level.

    Raises ConfigError for a kind or a layer of the library speculators that is not supported.
    """
    raw = read_json(folder / "config.json")
    if BACKBONE in raw:
        return flat_words(raw)
    if LIBRARY_KIND not in raw:
        return raw
    if other := _unserved(raw):
        unfit(folder, *other)
    layer = raw.get(LIBRARY_LAYER) or {}
    return {"norm_before_residual": True, **layer, **{name: value for name, value in raw.items() if value is not None}}


def _unserved(raw: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return what is not supported in a configuration by the library speculators, or None.

    The result has the name of the word, the value found and the value wanted.
    """
    kind, layer = raw.get(LIBRARY_KIND, LIBRARY_SERVED), (raw.get(LIBRARY_LAYER) or {}).get("model_type", "llama")
    if kind != LIBRARY_SERVED:
        return LIBRARY_KIND, repr(kind), repr(LIBRARY_SERVED)
    return None if layer == "llama" else (f"{LIBRARY_LAYER}.model_type", repr(layer), "'llama'")


def draft_config(folder: Path, kind: str, target: Architecture, asked: EngineConfig) -> ModelConfig:
    """Return the configuration from which the class of this kind is built.

    `asked` decides how many MTP layers are used. Raises ConfigError for a draft of another kind and
    for one that does not fit the target.
    """
    found = kind_of(folder)
    if found != kind:
        raise ConfigError(
            f"{folder} has a draft of kind {found!r}", wanted=f"{kind!r}", remedy=f"--speculative {found}"
        )
    config, shapes = config_of(folder, _read(folder)), tensor_shapes(folder)
    same(folder, "vocab_size", config.vocab_size, target.config.vocab_size)
    if kind == MTP:
        same(folder, "hidden_size", config.hidden_size, target.config.hidden_size)
        if deepseek_v4_nextn.PART in shapes:
            return deepseek_v4_nextn.next_token_config(config)
        layout = layout_of(shapes.keys(), config.num_hidden_layers)
        assert layout is not None
        names, prefixes = layout
        used = prefixes[: _heads(folder, len(prefixes), asked)]
        made = next_token_config(config, names, used)
        return replace(made, architecture=kind, words={**made.words, LAYERS: len(prefixes)})
    checkpoint = checkpoint_of(kind)
    words = {"num_nextn_predict_layers": 0} | checkpoint.words(config, shapes, target)
    if EMBEDDING in checkpoint.shared(shapes).values() and not checkpoint.has_own_width:
        same(folder, "hidden_size", config.hidden_size, target.config.hidden_size)
    has_bias = any(name.endswith("q_proj.bias") for name in shapes)
    return replace(
        config,
        architecture=kind,
        attention_bias=has_bias,
        words={**config.words, **words},
    )


def next_token_heads(folder: Path, asked: EngineConfig) -> int:
    """Return the number of MTP layers in a folder that propose one token each; 1: one layer
    proposes all tokens.

    Reads no weights. Raises ConfigError if there are several layers but fewer than the requested
    draft tokens.
    """
    raw = _read(folder)
    layout = layout_of(tensor_shapes(folder).keys(), raw.get("text_config", raw).get("num_hidden_layers", 0))
    return 1 if layout is None else _heads(folder, len(layout[1]), asked)


def _heads(folder: Path, found: int, config: EngineConfig) -> int:
    """Return the number of MTP layers to use, of the `found` layers in the checkpoint: one for each
    requested draft token (DRAFT_TOKENS if the number is not requested), at most `found`; 1 for
    trees.

    With 1, that layer drafts all tokens. Raises ConfigError if there are several layers but fewer
    than the requested draft tokens.
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


def tensor_shapes(folder: Path) -> Shapes:
    """Return the shapes of all tensors in a folder's safetensors files, by name, from the headers
    of the files.
    """
    return {entry.name: entry.shape for path in checkpoint_files(folder) for entry in read_entries(path)}


def _tokens(folder: Path) -> tuple[Any, Any] | None:
    """Return the vocabulary of a folder's `tokenizer.json` as its JSON value (None if it has none),
    and its added tokens as sorted pairs of id and text; None without the file."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    raw = read_json(file)
    added = sorted((each["id"], each["content"]) for each in raw.get("added_tokens", ()))
    return raw.get("model", {}).get("vocab"), added
