"""The processor's bring-up: the standard steps, plus steps that bind threads before the weights are
loaded and that ask the system for the available memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.facts import Facts
from sglcore.device.package import DevicePackage
from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.bring_up import STANDARD, LoadedModel, Pools, Progress, attention, kernels, runner
from sglcore.runtime.graphs.graph_choice import reason_of_ranks
from sglcore.runtime.hisparse.hisparse_coordinator import HiSparseCoordinator
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.pools import MHATokenToKVPool, PoolKind, cell_bytes
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.overlap.micro_batches import Halves
from sglcore.runtime.speculative.speculation_choice import Speculation
from sglcore.runtime.streams import Streams
from sglcore.step.sizing import MemoryBudget, MemorySizes
from sglcore.worker.topology import Place
from sglcore_cpu.arena import huge_zeros
from sglcore_cpu.choice import NAMES, NATIVE, TORCH, choose_kernels, engine_of_one
from sglcore_cpu.kernels.extension import extension_row, find_extension
from sglcore_cpu.kernels.kv_pool import INT8_POOL
from sglcore_cpu.kernels.operands import SERVED
from sglcore_cpu.kernels.table import is_native
from sglcore_cpu.kernels.torch_kernels import torch_kernels
from sglcore_cpu.ledger_rows import kernel_rows, pages_row
from sglcore_cpu.memory import available_memory, total_memory, weight_bytes
from sglcore_cpu.native import Engine, NativeUnavailable
from sglcore_cpu.placement import Placement, bind_process, interleave, plan_placement
from sglcore_cpu.recording import NotCapturable
from sglcore_cpu.topology import read_topology, share_of

if TYPE_CHECKING:
    from sglcore.runtime.parallel.process_group import Group
    from sglcore.runtime.parallel.rank_groups import Groups

PAGED = "paged"
SMALL_WEIGHTS = 64 << 20
"""Weights with fewer bytes stay in cache, and a second thread would spend more time at barriers
than in work."""


def processor_world(
    config: EngineConfig,
    package: DevicePackage,
    device: torch.device,
    ledger: DecisionLedger,
    place: Place | None = None,
) -> Group | None:
    """Join the process group of the ranks and wait for all of them; ranks on one machine sum
    tensors through shared memory. Return this rank's group; None without a `place`, or if the
    package declares no communication. The choice is recorded in the ledger."""
    if place is None or package.communication is None:
        return None
    from sglcore.runtime.parallel.process_group import Group, join

    make, what, reason = sums_of_ranks(place, package.communication.backend)
    ledger.record(Row("sums of ranks", "auto", what, reason, "--tp 1"))
    return join(place, package.communication, checks=config.poison, make=make or Group)


def sums_of_ranks(
    place: Place, backend: str, make_engine: Callable[[], Engine] = engine_of_one
) -> tuple[Callable[..., Group] | None, str, str]:
    """Return (constructor, name, reason): the constructor of a rank's group that sums through
    shared memory, the ledger's text for the choice, and its reason. The constructor is None, and
    the standard `Group` serves, if ranks are on several machines or the native kernels are not
    there. `backend`: the name of torch's backend for what does not go through shared memory."""
    from sglcore_cpu.shared_sums import MOST, sums_for

    make = sums_for(place, make_engine)
    if make is None:
        return None, backend, "ranks on several machines share no memory"
    try:
        make_engine()
    except NativeUnavailable as error:
        return None, backend, str(error)
    return (
        make,
        f"shared memory; all else above {MOST >> 20} MiB by {backend}",
        "all ranks are on this machine",
    )


def threads(config: EngineConfig, model_path: Path, ledger: DecisionLedger, place: Place | None = None) -> Placement:
    """Plan where threads run, record the plan in the ledger and return it, before any memory is
    touched. Binds this process to the planned cores where `bind_process` does, and sets torch's
    number of threads. Each rank of a machine gets cores of its own. Without `--threads`, weights
    below 64 MiB get one thread."""
    size = weight_bytes(model_path, config)
    asked, reason = config.threads, ""
    if asked is None and size < SMALL_WEIGHTS:
        asked, reason = 1, f"{size / 2**20:.0f} MiB of weights stay in cache"
    topology = read_topology()
    if place is not None:
        topology = share_of(topology, place.local, place.neighbours)
    chosen = plan_placement(topology, asked, size)
    bind_process(chosen, alone=place is None)
    if torch.get_num_threads() != chosen.threads:
        torch.set_num_threads(chosen.threads)
    wanted = str(config.threads) if config.threads else "auto"
    what = f"{chosen.threads} on cores {chosen.cores_text}"
    ledger.record(Row("threads", wanted, what, reason or chosen.reason, "--threads"))
    return chosen


def room(config: EngineConfig, model_path: Path) -> int:
    """Estimate and return the bytes of the loaded weights; raises ConfigError if that is more than
    the memory available to this process."""
    needed = weight_bytes(model_path, config)
    available, evidence = available_memory()
    if needed > available:
        raise ConfigError(
            f"the weights need about {needed / 2**30:.1f} GiB, but this process has {evidence}",
            remedy="--quantize int4, a smaller model, or a larger limit",
        )
    return needed


def processor_kernels(
    config: EngineConfig,
    package: DevicePackage,
    facts: Facts,
    threads: Placement,
    ledger: DecisionLedger,
    device: torch.device,
) -> KernelTable:
    """Return the kernel table: the native one, or another of the package as `--kernels` names it.
    For `--graph compiled` it is torch's with unpacked weights, unless the reference was requested,
    because a compiler can trace no other. Records the choice in the ledger; raises ConfigError for
    kernels that can not serve."""
    asked = package.kernels_for(config.kernels, "reference", *NAMES)
    is_traced = facts.graph_kind(config.graph) == "compiled"
    extension = find_extension(torch.__version__)
    if extension is not None:
        ledger.record(extension_row(extension, asked == "ipex", is_traced))
    if asked != "reference" and is_traced:
        is_other = config.kernels not in ("auto", TORCH)
        remedy = "--graph native" if asked in (NATIVE, *NAMES) else "--graph off"
        ledger.record(Row("kernels", config.kernels, TORCH, "a compiler traces only torch's kernels", remedy, is_other))
        return torch_kernels().replace(pack_linear=KernelTable().pack_linear)
    if asked not in (NATIVE, *NAMES):
        return kernels(config, package, ledger, device)
    table, row = choose_kernels(config.kernels, threads.threads, threads.of_threads)
    ledger.record(row)
    if is_native(table):
        ledger.record(pages_row())
    return table


def kernel_choices(config: EngineConfig, facts: Facts, model: LoadedModel, ledger: DecisionLedger) -> tuple[Row, ...]:
    """Return ledger rows for the kernel choices that depend on the model's dtype and shapes, and
    record them. Decides nothing."""
    rows = tuple(kernel_rows(model, facts.graph_kind(config.graph)))
    ledger.record(*rows)
    return rows


def pool_kind(config: EngineConfig, model: LoadedModel, kernels: KernelTable, ledger: DecisionLedger) -> PoolKind:
    """Return the kind of KV pool: KV slots of the model's dtype for `auto`, or 8-bit codes for
    `int8`, which only the native kernels read. A model with latent rows (MLA) gets the first kind
    for every `kv_cache_dtype`. On Linux the pool takes memory only where it is written
    (`huge_zeros`). Raises ConfigError for a `kv_cache_dtype` that can not serve here. Records the
    kind in the ledger for `int8` only."""
    if config.kv_cache_dtype == "auto" or any(layer.rows for layer in model.attention_layers):
        return PoolKind(partial(MHATokenToKVPool, zeros=huge_zeros), cell_bytes, windows=MHATokenToKVPool.windows)
    if config.kv_cache_dtype != INT8_POOL.kv_cache_dtype:
        raise ConfigError(f"kv_cache_dtype is {config.kv_cache_dtype!r}", wanted=f"auto or {INT8_POOL.kv_cache_dtype}")
    if not is_native(kernels) or model.dtype not in SERVED or model.config.is_encoder:
        raise ConfigError(
            "keys and values of 8 bits need the native kernels, in bfloat16 or float32, on a model that has a cache; "
            f"found {model.dtype} and the kernels {kernels.origin['linear']}",
            remedy="leave --kv-cache-dtype out; sglcore explain without it says why other kernels serve",
        )
    told = "a scale for each KV slot and head; half the memory and half the bytes that a step reads"
    ledger.record(Row("kv cells", config.kv_cache_dtype, config.kv_cache_dtype, told, "--kv-cache-dtype auto"))
    return INT8_POOL


def library_threads(model: LoadedModel, kernels: KernelTable, threads: Placement, ledger: DecisionLedger) -> int:
    """Return the number of threads for torch's operations. It is set to 1, and recorded in the
    ledger, if the model runs torch operations between native kernels, because the native threads
    spin while they wait for the next kernel, and the two thread pools would compete for the cores;
    else it stays that of the placement, and nothing is set."""
    if not model.calls_library or not is_native(kernels) or threads.threads == 1:
        return threads.threads
    torch.set_num_threads(1)
    reason = "this model runs torch operations between native kernels, and idle native threads spin"
    ledger.record(Row("torch threads", "auto", "1", reason, "--model-impl native, if the architecture has a file"))
    return 1


def spread_cells(pools: Pools, threads: Placement) -> int:
    """Interleave the memory pages of the KV pools, sliding-window pools included, over the memory
    nodes (NUMA) of the placement. Return the number of tensors that were spread: 0 with one
    node."""
    kinds = [pools.token_to_kv] if pools.windows is None else [pools.token_to_kv, pools.windows.token_to_kv]
    cells = [part for pool in kinds for layer in range(pool.num_layers) for part in pool.kv(layer)]
    return sum(interleave(part.data_ptr(), part.nbytes, threads.nodes) for part in cells)


def processor_attention(
    config: EngineConfig,
    package: DevicePackage,
    facts: Facts,
    model: LoadedModel,
    pools: Pools,
    kernels: KernelTable,
    hisparse: HiSparseCoordinator | None,
    ledger: DecisionLedger,
) -> AttentionBackend:
    """Return the attention backend, chosen as the standard bring-up step does. `paged` needs the
    native kernels: with another kernel table it is no candidate, and raises ConfigError if it is
    requested."""
    if not is_native(kernels):
        if config.attention_backend == PAGED:
            raise ConfigError(
                "attention backend 'paged' needs the native kernels, which do not serve here",
                remedy="see the row `kernels` of sglcore explain, or --attention-backend reference",
            )
        others = {name: ref for name, ref in package.attention.items() if name != PAGED}
        package = replace(package, attention=others)
    return attention(config, package, facts, model, pools, kernels, hisparse, ledger)


def processor_runner(
    config: EngineConfig,
    package: DevicePackage,
    facts: Facts,
    model: LoadedModel,
    pools: Pools,
    sizes: MemorySizes,
    attention: AttentionBackend,
    kernels: KernelTable,
    ledger: DecisionLedger,
    progress: Progress,
    streams: Streams,
    speculation: Speculation | None = None,
    hisparse: HiSparseCoordinator | None = None,
    groups: Groups | None = None,
    halves: Halves | None = None,
) -> ModelRunner:
    """Make the standard runner. Graphs of kind `native` (recorded lists of kernel calls) are used
    only where this kernel table, attention and group of ranks can replay them: otherwise `--graph
    auto` turns graphs off with a row in the ledger, and a graph requested by name raises
    ConfigError."""
    if facts.graph_kind(config.graph) == "native":
        reason = reason_against_recording(kernels, attention) or reason_of_ranks(groups, "native")
        if reason and config.graph != "auto":
            raise ConfigError(f"graph 'native' cannot serve: {reason}", remedy="--graph auto or off")
        if reason:
            ledger.record(Row("native graph", "auto", "off", reason, "--graph compiled"))
            facts = replace(facts, default_graph="off")
    parts = model, pools, sizes, attention, kernels, ledger, progress, streams, speculation, hisparse, groups, halves
    try:
        return runner(config, package, facts, *parts)
    except NotCapturable as error:
        if config.graph != "auto":
            raise ConfigError(f"graph {config.graph!r} cannot serve: {error}", remedy="--graph off") from None
        ledger.record(Row("native graph", "auto", "off", str(error), "--graph compiled"))
        return runner(config, package, replace(facts, default_graph="off"), *parts)


def reason_against_recording(kernels: KernelTable, attention: AttentionBackend) -> str:
    """Return why a decode step with this kernel table and attention can not be replayed as a list
    of kernel calls, as a phrase for the ledger; empty if it can."""
    if attention.shape.is_encoder:
        return "an encoder does not decode"
    if not is_native(kernels):
        return "the native kernels do not serve"
    for part in attention.parts:
        if part.hisparse is not None:
            return "hisparse loads its entries with torch operations, which are not recorded"
        if "capture" not in part.facts.features:
            return f"{type(part).__name__} reads lengths that a recorded call would not see"
    return ""


def device_memory(model: object) -> MemoryBudget:
    """Return the memory budget for the KV cache, read from the system after the weights are loaded.
    `model` is not read: the parameter makes the step run after loading. By default half of the
    available memory is used."""
    available, evidence = available_memory()
    return MemoryBudget(total_memory()[0], available, evidence, default_share=0.5)


BRING_UP = (
    STANDARD.replace("world", processor_world)
    .replace(kernels, processor_kernels)
    .insert(threads, before="kernels")
    .insert(room, before="model")
    .insert(kernel_choices, after="model")
    .insert(library_threads, after="kernel_choices")
    .insert(device_memory, before="sizes")
    .insert(pool_kind, before="sizes")
    .insert(spread_cells, after="pools")
    .replace(attention, processor_attention)
    .replace(runner, processor_runner)
)
