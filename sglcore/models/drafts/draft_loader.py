"""Load a draft model from a checkpoint folder: find its kind, check that it fits, read its weights.

A draft without its own embedding or output layer uses the target's; there is no second copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglcore.checkpoint.checkpoint_files import DRAFT_FOLDER, checkpoint_files, read_json
from sglcore.checkpoint.frozen_draft_config import BACKBONE, flat_words
from sglcore.checkpoint.gguf_header import is_gguf
from sglcore.checkpoint.model_config import ModelConfig, config_of, read_config
from sglcore.checkpoint.parallel_sizes import check_topology
from sglcore.config.draft_kinds import DRAFT_KINDS
from sglcore.config.engine_config import EngineConfig
from sglcore.device.errors import ConfigError
from sglcore.device.facts import Facts
from sglcore.device.ledger import DecisionLedger, Row
from sglcore.device.package import Ref, resolve
from sglcore.models.checkpoint import load_checkpoint
from sglcore.models.drafts import deepseek_v4_nextn
from sglcore.models.drafts.draft_checkpoint import (
    EMBEDDING,
    HEAD,
    LIBRARY_KIND,
    OTHER,
    SHARED,
    DraftCheckpoint,
    Shapes,
    same,
    unfit,
)
from sglcore.models.drafts.mtp import PREFIXES, layout_of, next_token_config
from sglcore.models.layer_kinds import Architecture
from sglcore.models.weights.model_loader import load_model
from sglcore.models.weights.safetensors_file import SafetensorsFile
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.speculative.speculation_choice import DRAFT_TOKENS, MTP

if TYPE_CHECKING:
    from sglcore.runtime.parallel.rank_groups import Groups

STANDALONE = "standalone"
"""The kind of any model with the target's vocabulary."""
BY_TENSORS = tuple(kind.name for kind in DRAFT_KINDS.values() if kind.checkpoint)
"""The kinds that are recognised by the names of a draft's tensors."""
LAYERS = "next_token_layers"
"""Key in `words`: the number of MTP layers in the checkpoint, used or not."""
LIBRARY_LAYER, LIBRARY_SERVED = "transformer_layer_config", "eagle3"
"""The key of the layer in configurations by the library speculators, and its kind that is
supported."""


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
    names, raw = _shapes(folder), _read(folder)
    for kind in BY_TENSORS:
        if checkpoint_of(kind).is_in(names):
            return kind
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

    `folder` may be the target's own; a draft other than MTP layers is then in its folder `draft`.
    `kind` is in `BY_TENSORS`, or MTP or STANDALONE. With `groups`, loads this rank's part. Records
    the draft in the ledger. Raises ConfigError before it reads weights if the draft has another
    kind (not checked for STANDALONE) or does not fit the target; also raises the errors of
    `load_checkpoint`. Waits.
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
    of_target, names = {EMBEDDING: target.embed_ids, HEAD: target.logits}, dict(SHARED)
    if kind in BY_TENSORS:
        names = checkpoint_of(kind).shared(shapes)
    given = {name: of_target[part] for name, part in names.items()}
    model: Any = load_model(
        folder,
        draft,
        kernels=kernels,
        device=facts.tensor_device,
        dtype=target.dtype,
        max_positions=config.max_model_len or target.config.context_length,
        architectures=draft_classes(),
        progress=lambda done, total: progress("loading the draft", done, total),
        quantize=config.quantize,
        index_dtype=getattr(torch, facts.index_dtype),
        page_size=config.page_size,
        kv_cache_dtype=config.kv_cache_dtype,
        given=given,
        groups=groups,
    )
    shared = " and ".join(names.values()) or "nothing"
    count = sum(each.numel() for each in model.weights.parameters)
    told = f"{count / 1e6:.1f} million weights of {folder}; shared with the model: {shared}"
    if heads == 1 < layers:
        told += f"; the first of its {layers} layers drafts all tokens"
    ledger.record(Row("draft model", kind, kind, told, "--draft-model"))
    return Draft(kind, model, model.aux_layers, max(heads, 1))


def _standalone(
    config: EngineConfig, folder: Path, target: Architecture, *, ledger: DecisionLedger, **given: Any
) -> Draft:
    """Load any model that generates text as the draft model. Raises ConfigError unless it has the
    target's vocabulary size and, if both have a `tokenizer.json`, the same token ids. `given` goes
    to `load_checkpoint`, and its errors are raised too."""
    found = read_config(folder)
    same(folder, "vocab_size", found.vocab_size, target.config.vocab_size)
    ours, theirs = (_tokens(each) for each in (folder, target.config.path))
    if ours is not None and theirs is not None and ours != theirs:
        raise ConfigError(
            f"{folder / 'tokenizer.json'} has other token ids than the model", wanted="the same ids", remedy=OTHER
        )
    # Its own ledger keeps its decisions out of the target's. The target bounds its positions.
    own = replace(config, dtype=str(target.dtype).removeprefix("torch."), max_model_len=None, task="generate")
    model = load_checkpoint(own, folder, ledger=DecisionLedger(), **given)
    ledger.record(Row("draft model", STANDALONE, STANDALONE, f"{found.architecture} of {folder}", "--draft-model"))
    return Draft(STANDALONE, model, None)


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


def _draft_config(folder: Path, kind: str, target: Architecture, asked: EngineConfig) -> ModelConfig:
    """Return the configuration from which the class of this kind is built.

    `asked` decides how many MTP layers are used. Raises ConfigError for a draft of another kind and
    for one that does not fit the target.
    """
    found = kind_of(folder)
    if found != kind:
        raise ConfigError(
            f"{folder} has a draft of kind {found!r}", wanted=f"{kind!r}", remedy=f"--speculative {found}"
        )
    config, shapes = config_of(folder, _read(folder)), _shapes(folder)
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


def _shapes(folder: Path) -> Shapes:
    """Return the shapes of all tensors in a folder's safetensors files, by name, from the headers
    of the files.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path in checkpoint_files(folder):
        with closing(SafetensorsFile(path)) as file:
            found |= {entry.name: entry.shape for entry in file.entries}
    return found


def _tokens(folder: Path) -> tuple[Any, Any] | None:
    """Return the vocabulary of a folder's `tokenizer.json` as its JSON value (None if it has none),
    and its added tokens as sorted pairs of id and text; None without the file."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    raw = read_json(file)
    added = sorted((each["id"], each["content"]) for each in raw.get("added_tokens", ()))
    return raw.get("model", {}).get("vocab"), added
