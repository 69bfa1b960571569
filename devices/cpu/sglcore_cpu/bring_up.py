"""The processor's bring-up: the standard order, with threads bound before the weights and memory read from the system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sglcore.device.config import EngineConfig
from sglcore.device.facts import Facts
from sglcore.device.ledger import DecisionLedger, Row
from sglcore.device.package import DevicePackage
from sglcore.runtime.bring_up import STANDARD, kernels
from sglcore.runtime.kernels.reference import reference_kernels
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.sizing import MemoryBudget
from sglcore_cpu.memory import available_memory, total_memory
from sglcore_cpu.rows import kernel_rows
from sglcore_cpu.topology import bind_threads, read_topology

SMALL_WEIGHTS = 64 << 20
"""Below this many bytes the weights stay in cache, and a second thread waits at barriers longer than it works."""


def threads(config: EngineConfig, model_path: Path, ledger: DecisionLedger) -> int:
    """Set torch's threads and keep them on one memory node's cores, before any memory is touched."""
    weight_bytes = sum(file.stat().st_size for file in model_path.glob("*.safetensors"))
    asked, reason = config.threads, ""
    if asked is None and weight_bytes < SMALL_WEIGHTS:
        asked, reason = 1, f"{weight_bytes / 2**20:.0f} MiB of weights stay in cache"
    chosen = bind_threads(read_topology(), asked)
    if torch.get_num_threads() != chosen.threads:
        torch.set_num_threads(chosen.threads)
    wanted = str(config.threads) if config.threads else "auto"
    what = f"{chosen.threads} on cores {chosen.cores_text}"
    ledger.record(Row("threads", wanted, what, reason or chosen.reason, "--threads"))
    return chosen.threads


def processor_kernels(
    config: EngineConfig, package: DevicePackage, facts: Facts, ledger: DecisionLedger
) -> KernelTable:
    """The package's table; a compiler reads plain weights only, so nothing is packed when graphs were asked for."""
    table = kernels(package, ledger, config)
    return (
        table if facts.graph_kind(config.graph) == "off" else table.replace(pack_linear=reference_kernels().pack_linear)
    )


def kernel_choices(config: EngineConfig, facts: Facts, load_weights: Any, ledger: DecisionLedger) -> tuple[Row, ...]:
    """Say in the ledger which implementation serves this model where that depends on it."""
    rows = tuple(kernel_rows(load_weights, facts.graph_kind(config.graph)))
    ledger.record(*rows)
    return rows


def device_memory(load_weights: object) -> MemoryBudget:
    """What the system leaves for KV once the weights are in."""
    available, evidence = available_memory()
    return MemoryBudget(total_memory()[0], available, evidence, default_share=0.5)


BRING_UP = (
    STANDARD.replace(kernels, processor_kernels)
    .insert(threads, before="load_weights")
    .insert(kernel_choices, after="load_weights")
    .insert(device_memory, before="size_memory")
)
