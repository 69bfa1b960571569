"""Loads a checkpoint folder as a model on the device: chooses the implementation and the dtype,
then loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglcore.checkpoint.dtype import choose_dtype
from sglcore.checkpoint.model_config import against_longer, check_context
from sglcore.checkpoint.parallel.parallel_sizes import check_topology
from sglcore.checkpoint.parallel.tensor_parallel import check_divisible
from sglcore.config.engine_config import EngineConfig
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.facts import Facts
from sglcore.models.implementation import choose_implementation
from sglcore.models.layer_kinds import Architecture
from sglcore.models.weights.model_loader import load_model
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.speculative.speculation_choice import most_drafts

if TYPE_CHECKING:
    from sglcore.runtime.parallel.rank_groups import Groups


def load_checkpoint(
    config: EngineConfig,
    folder: Path,
    *,
    facts: Facts,
    kernels: KernelTable,
    ledger: DecisionLedger,
    progress: Callable[[str, int, int], None],
    groups: Groups | None = None,
) -> Architecture:
    """Load a checkpoint folder onto the device of `facts`, as `config` requests; with `groups`,
    this rank's part of the model. Records the implementation, the dtype and the format of quantised
    weights in the ledger. Raises ConfigError and the errors of `load_model`. Waits."""
    model_config, architectures = choose_implementation(
        config.model_impl, folder, ledger, task=config.task, trusts_code=config.trust_remote_code
    )
    check_context(config.max_model_len, model_config)
    if config.max_model_len is None and (why := against_longer(model_config)):
        told, longest = str(model_config.max_position_embeddings), str(model_config.context_length)
        ledger.record(Row("context", told, longest, why, f"--max-model-len {longest}", downgrade=True))
    if groups is not None:
        check_divisible(model_config, groups.tp.size, is_ours=not architectures)
        check_topology(model_config, groups.place.topology)
    dtype = choose_dtype(config.dtype, model_config.dtype, facts)
    ledger.record(dtype)
    return load_model(
        folder,
        model_config,
        kernels=kernels,
        device=facts.tensor_device,
        dtype=getattr(torch, dtype.effective),
        max_positions=config.max_model_len,
        architectures=architectures,
        progress=lambda done, total: progress("loading weights", done, total),
        quantize=config.quantize,
        index_dtype=getattr(torch, facts.index_dtype),
        page_size=config.page_size,
        kv_cache_dtype=config.kv_cache_dtype,
        drafts=most_drafts(config),
        hisparse=config.hisparse,
        ledger=ledger,
        groups=groups,
    )
