"""The processor's bring-up: the standard order, with threads bound before the weights and memory read from the system."""

from __future__ import annotations

import torch

from sglcore.device.config import EngineConfig
from sglcore.device.ledger import DecisionLedger, Row
from sglcore.runtime.bring_up import STANDARD
from sglcore.runtime.memory.sizing import MemoryBudget
from sglcore_cpu.memory import available_memory, total_memory
from sglcore_cpu.topology import bind_threads, read_topology


def threads(config: EngineConfig, ledger: DecisionLedger) -> int:
    """Set torch's threads and keep them on one memory node's cores, before any memory is touched."""
    chosen = bind_threads(read_topology(), config.threads)
    if torch.get_num_threads() != chosen.threads:
        torch.set_num_threads(chosen.threads)
    asked = str(config.threads) if config.threads else "auto"
    ledger.record(Row("threads", asked, f"{chosen.threads} on cores {chosen.cores_text}", chosen.reason, "--threads"))
    return chosen.threads


def device_memory(load_weights: object) -> MemoryBudget:
    """What the system leaves for KV once the weights are in."""
    available, evidence = available_memory()
    return MemoryBudget(total_memory()[0], available, evidence, default_share=0.5)


BRING_UP = STANDARD.insert(threads, before="load_weights").insert(device_memory, before="size_memory")
