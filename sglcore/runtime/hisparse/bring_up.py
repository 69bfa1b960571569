"""The steps of a bring-up that are there for rows in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sglcore.device.config import EngineConfig
from sglcore.device.errors import ConfigError
from sglcore.device.facts import Facts
from sglcore.device.ledger import DecisionLedger, Row
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.hisparse.coordinator import HiSparseCoordinator
from sglcore.runtime.kernels.choice import Refusals
from sglcore.runtime.kernels.hisparse import REACHING
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.loaded_model import LoadedModel
from sglcore.runtime.memory.make import Pools
from sglcore.runtime.memory.rows import INDEX_KEYS, RowPool, swapped_rows
from sglcore.step.hisparse import HiSparseConfig, parse_hisparse_config
from sglcore.step.sizing import Geometry, MemoryBudget, MemorySizes, size_text


def asks_for_hisparse(config: EngineConfig) -> bool:
    """Rows of which few are chosen are to lie in host memory. Raises ConfigError for what can not be read."""
    return parse_hisparse_config(config.hisparse) is not None


def hisparse_config(config: EngineConfig, facts: Facts, kernels: KernelTable) -> HiSparseConfig | None:
    """What was asked for, before anything is loaded; raises ConfigError where it can not be had."""
    asked = parse_hisparse_config(config.hisparse)
    if asked is None:
        return None
    remedy = "leave --hisparse out"
    if config.speculative not in (None, "off", "auto") or config.draft_model is not None:
        raise ConfigError(
            "hisparse and speculative decoding are both asked for, and a step that verifies proposals reads the rows of several"
            " tokens of a request",
            wanted="one of them",
            remedy=f"--speculative off, or {remedy}",
        )
    if facts.shares_host_memory:
        return asked
    if not facts.reaches_pinned_memory:
        raise ConfigError(
            f"hisparse is asked for, and kernels on {facts.tensor_device} do not reach host memory",
            wanted="a device whose facts say reaches_pinned_memory",
            remedy=remedy,
        )
    missing = [name for name in REACHING if name not in kernels.replaced]
    if missing:
        raise ConfigError(
            f"hisparse is asked for, and {', '.join(missing)} of the kernel table are the reference's, which do not reach host"
            " memory",
            remedy=remedy,
        )
    return asked


def beside_buffers(
    hisparse: HiSparseConfig | None,
    layers: Sequence[Attention],
    kept: Geometry,
    longest: int,
    page_size: int,
    budget: MemoryBudget,
    has_streams: bool,
) -> tuple[Geometry, MemoryBudget]:
    """The geometry with what each request has on the device of rows in host memory, and the budget without the staging rooms of a
    context of `longest` tokens."""
    swapped = [(layer, name) for layer in layers if (name := swapped_rows(layer.rows)) is not None]
    if hisparse is None or not swapped:
        return kept, budget
    layer, name = swapped[0]
    rows, count = layer.rows[name], hisparse.buffer_rows(max(layer.top_k for layer, _ in swapped))
    pages = -(-longest // page_size) + 1
    entries = pages * rows.count(page_size)
    groups = sum(INDEX_KEYS in layer.rows for layer, _ in swapped)
    each = len(swapped) * count * rows.row.nbytes + groups * 4 * (2 * count + entries + 1)
    staging = (1 + has_streams) * (pages + 1) * rows.num_bytes(page_size)
    kept = replace(kept, ring=kept.ring + each, host_ratio=hisparse.host_to_device_ratio)
    return kept, replace(budget, available=max(0, budget.available - staging))


def hisparse(
    config: EngineConfig,
    hisparse_config: HiSparseConfig | None,
    facts: Facts,
    model: LoadedModel,
    pools: Pools,
    sizes: MemorySizes,
    kernels: KernelTable,
    ledger: DecisionLedger,
) -> HiSparseCoordinator | None:
    """What brings rows in host memory to attention; None: all rows are on the device."""
    if hisparse_config is None:
        return None
    layers = [layer for layer in model.attention_layers if swapped_rows(layer.rows) is not None]
    rows, refusals = hisparse_config.buffer_rows(max(layer.top_k for layer in layers)), Refusals()
    assert isinstance(pools.token_to_kv, RowPool)
    host = size_text(sizes.num_pages * sizes.geometry.host_page)
    what = f"{rows} rows of each request and layer on the device, {host} in host memory"
    why = f"{len(layers)} layers read {max(layer.top_k for layer in layers)} rows of a token each"
    if hisparse_config.unused:
        why += f"; {', '.join(hisparse_config.unused)} decide nothing here"
    ledger.record(*refusals.rows(), Row("hisparse", config.hisparse or "on", what, why, "--hisparse off"))
    made = pools.req_to_token, pools.token_to_kv, kernels, rows, sizes.max_requests
    return HiSparseCoordinator(layers, *made, has_streams=facts.has_streams)
