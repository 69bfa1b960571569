"""Load a draft model from a checkpoint folder: check its kind and that it fits, read its weights.

A draft without its own embedding or output layer uses the target's; there is no second copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglcore.checkpoint.checkpoint_files import DRAFT_FOLDER
from sglcore.checkpoint.parallel.parallel_sizes import check_topology
from sglcore.config.draft_kinds import MTP
from sglcore.config.engine_config import EngineConfig
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.facts import Facts
from sglcore.models.checkpoint import load_checkpoint
from sglcore.models.drafts.draft_checkpoint import EMBEDDING, HEAD
from sglcore.models.drafts.draft_config import (
    LAYERS,
    STANDALONE,
    check_vocabulary,
    draft_classes,
    draft_config,
    shared_parts,
    tensor_shapes,
)
from sglcore.models.drafts.mtp import PREFIXES
from sglcore.models.layer_kinds import Architecture
from sglcore.models.weights.model_loader import load_model
from sglcore.runtime.kernels.table import KernelTable

if TYPE_CHECKING:
    from sglcore.runtime.parallel.rank_groups import Groups


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
    draft = draft_config(folder, kind, target, config)
    heads, layers = len(draft.words.get(PREFIXES, ())), draft.words.get(LAYERS, 1)
    if groups is not None:
        topology = groups.place.topology
        check_topology(draft, replace(topology, ep=1) if draft.moe is None else topology)
    of_target, names = {EMBEDDING: target.embed_ids, HEAD: target.logits}, shared_parts(kind, tensor_shapes(folder))
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
    """Load any model that generates text as the draft model. Raises what `check_vocabulary`
    raises. `given` goes to `load_checkpoint`, and its errors are raised too."""
    found = check_vocabulary(folder, target.config)
    # Its own ledger keeps its decisions out of the target's. The target bounds its positions.
    own = replace(config, dtype=str(target.dtype).removeprefix("torch."), max_model_len=None, task="generate")
    model = load_checkpoint(own, folder, ledger=DecisionLedger(), **given)
    ledger.record(Row("draft model", STANDALONE, STANDALONE, f"{found.architecture} of {folder}", "--draft-model"))
    return Draft(STANDALONE, model, None)
