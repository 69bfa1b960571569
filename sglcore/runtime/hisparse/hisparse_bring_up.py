"""The nested order of the bring-up for HiSparse: KV rows in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.bring_up_steps import NestedOrder
from sglcore.device.facts import Facts
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.hisparse.hisparse_coordinator import HiSparseCoordinator
from sglcore.runtime.hisparse.hisparse_shape import SwapShape, swap_shape
from sglcore.runtime.kernels.hisparse_entries import REACHING
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.loaded_model import LoadedModel
from sglcore.runtime.memory.kv_rows import RowPool, swapped_rows
from sglcore.runtime.memory.make_pools import Pools
from sglcore.runtime.speculative.speculation_choice import Speculation, verified_rows
from sglcore.step.hisparse_config import HiSparseConfig, parse_hisparse_config
from sglcore.step.sizing import Geometry, MemoryBudget, MemorySizes, size_text


def asks_for_hisparse(asked: str | None) -> bool:
    """Return whether the value of `--hisparse` enables HiSparse.

    Raises ConfigError for an invalid value.
    """
    return parse_hisparse_config(asked) is not None


def check_swapped(asked: str | None, architecture: str, layers: Sequence[Attention]) -> None:
    """Raise ConfigError if HiSparse is requested and no layer chooses the rows that it reads, or if
    a token reads more rows than the device keeps.

    `asked` is the value of `--hisparse`; `architecture` is named in the error.
    """
    hisparse = parse_hisparse_config(asked)
    if hisparse is None or hisparse.is_auto:
        return
    swapped = [layer for layer in layers if swapped_rows(layer.rows) is not None]
    for layer in swapped:
        hisparse.buffer_rows(layer.top_k)
    if not swapped:
        raise ConfigError(
            f"hisparse is requested, and no layer of {architecture} chooses the rows that it reads",
            wanted="a model with sparse attention, such as DeepSeek-V3.2 or V4",
            remedy="leave --hisparse out",
        )


def hisparse_config(config: EngineConfig, facts: Facts, kernels: KernelTable) -> HiSparseConfig | None:
    """Return the parsed setting before anything is loaded; None without HiSparse.

    Raises ConfigError if the device cannot serve it, unless auto is requested.
    """
    asked = parse_hisparse_config(config.hisparse)
    if asked is None or asked.is_auto:
        return asked
    remedy = "leave --hisparse out"
    if facts.shares_host_memory:
        return asked
    if not facts.reaches_pinned_memory:
        raise ConfigError(
            f"hisparse is requested, and kernels on {facts.tensor_device} do not reach host memory",
            wanted="a device whose facts say reaches_pinned_memory",
            remedy=remedy,
        )
    missing = [name for name in REACHING if name not in kernels.replaced]
    if missing:
        raise ConfigError(
            f"hisparse is requested, and {', '.join(missing)} of the kernel table are the reference's, which do "
            "not reach host"
            " memory",
            remedy=remedy,
        )
    return asked


def reason_against_auto(facts: Facts, kernels: KernelTable) -> str:
    """Return why auto keeps all KV entries on this device, whatever is predicted; empty if it may
    not.
    """
    if facts.shares_host_memory:
        return "host and device share memory, so there would be no more pages"
    missing = [name for name in REACHING if name not in kernels.replaced]
    if not facts.reaches_pinned_memory or missing:
        return f"kernels on {facts.tensor_device} do not reach host memory"
    return ""


def beside_buffers(
    hisparse: HiSparseConfig | None, shape: SwapShape | None, facts: Facts, kept: Geometry, budget: MemoryBudget
) -> tuple[Geometry, MemoryBudget]:
    """Return the geometry with the device buffers of HiSparse added to the bytes per request, and
    the budget without the staging rooms. Both are unchanged without HiSparse.

    If host and device share memory, the budget is for the rows of both.
    """
    if hisparse is None or shape is None:
        return kept, budget
    ratio = 1.0 if facts.shares_host_memory else hisparse.host_to_device_ratio
    kept = replace(kept, ring=kept.ring + shape.slot_bytes, host_ratio=ratio)
    return kept, replace(budget, available=max(0, budget.available - shape.room_bytes))


def hisparse(
    config: EngineConfig,
    facts: Facts,
    model: LoadedModel,
    pools: Pools,
    sizes: MemorySizes,
    kernels: KernelTable,
    ledger: DecisionLedger,
    speculation: Speculation | None = None,
) -> HiSparseCoordinator | None:
    """Return the coordinator of KV rows in host memory; None if all rows are on the device."""
    table, rows, most = pools.req_to_token, pools.token_to_kv, verified_rows(model, speculation)
    given = sizes.max_model_len, sizes.page_size, facts.has_streams, max(1, most)
    setting = sizes.hisparse
    shape = swap_shape(setting, model.attention_layers, *given)
    if setting is None or shape is None:
        return None
    assert isinstance(rows, RowPool)
    host = size_text(sizes.num_pages * sizes.geometry.host_page)
    what = f"{shape.buffer_rows} rows of each request and layer on the device, {host} in host memory"
    why = f"{len(shape.names)} layers read {shape.top_k} rows for each token"
    if setting.unused:
        why += f"; {', '.join(setting.unused)} have no effect here"
    if facts.shares_host_memory:
        why += "; host and device share memory, so there are no more pages than without"
    ledger.record(Row("hisparse", config.hisparse or "on", what, why, "--hisparse off"))
    return HiSparseCoordinator(shape, table, rows, kernels)


HISPARSE = NestedOrder(
    "hisparse", {"kernels": (hisparse_config,), "pools": (hisparse,)}, exports=("hisparse_config", "hisparse")
)
"""How KV rows are kept in host memory: the setting before the weights are loaded, the coordinator
over the pools."""
