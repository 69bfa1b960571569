"""The standard bring-up of a torch device.

A step's name is what it provides, its parameters what it needs. The steps of an optional feature
are a nested order, which its own `..._bring_up.py` declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglcore.checkpoint.rope_config import mrope_axes
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import one_line
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.bring_up import BringUp
from sglcore.device.facts import Facts
from sglcore.device.package import DevicePackage, Ref, resolve
from sglcore.runtime.attention.backend_selection import choose_attention, shape_of
from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.trial import failure_of
from sglcore.runtime.attention.windowed import WindowedAttention
from sglcore.runtime.graphs.graph_backend import GraphBackend, PromptBackend
from sglcore.runtime.graphs.graph_choice import capture, check_captured, make_backend
from sglcore.runtime.hisparse.hisparse_bring_up import HISPARSE, asks_for_hisparse
from sglcore.runtime.hisparse.hisparse_coordinator import HiSparseCoordinator
from sglcore.runtime.kernels.hisparse_entries import REACHING
from sglcore.runtime.kernels.kernel_choice import Refusals, choose, fitted_to
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.loaded_model import LoadedModel, Progress, row_sizes
from sglcore.runtime.memory.kv_rows import ROWS, RowPool, swapped_rows
from sglcore.runtime.memory.make_pools import Pools
from sglcore.runtime.memory.memory_bring_up import pools, sizes
from sglcore.runtime.memory.pools import (
    KVPool,
    ReqToTokenPool,
)
from sglcore.runtime.model_runner import Extensions, ModelRunner, RunnerOptions
from sglcore.runtime.overlap.micro_batch_bring_up import TWO_BATCH_OVERLAP
from sglcore.runtime.overlap.micro_batches import Halves
from sglcore.runtime.overlap.slices import Slices, SliceSteps
from sglcore.runtime.overlap.slices_bring_up import PREFILL_SLICES, Lane
from sglcore.runtime.parallel.rank_bring_up import RANKS
from sglcore.runtime.pooling import EmbeddingSteps, Pooler
from sglcore.runtime.registry_builders import (
    Compute,
    build_decode_registry,
    build_prefill_registry,
    feature_buffer,
    previous_buffer,
    run_buffers,
    visible_buffer,
)
from sglcore.runtime.slot_tables import Entered
from sglcore.runtime.speculative.draft_steps import StepShape
from sglcore.runtime.speculative.make_worker import make_speculative_worker
from sglcore.runtime.speculative.speculation_bring_up import SPECULATION
from sglcore.runtime.speculative.speculation_choice import TREE_MASK, Speculation
from sglcore.runtime.speculative.target_features import with_features
from sglcore.runtime.streams import Streams, make_streams
from sglcore.runtime.tp_worker import StepKind, TpModelWorker
from sglcore.step.sizing import MemorySizes
from sglcore.step.slice_decisions import slice_budget
from sglcore.worker.model_worker import Limits

if TYPE_CHECKING:
    from sglcore.runtime.graph_runner import GraphRunner
    from sglcore.runtime.parallel.rank_groups import Groups

MODEL_LOADER: Ref = "sglcore.models.checkpoint:load_checkpoint"
"""The function that loads a checkpoint; a reference, because models import the runtime."""

REFERENCE = "sglcore.runtime.kernels.reference_kernels"
"""The module with the kernels that define correct results."""


def device(facts: Facts) -> torch.device:
    """Return the device of the facts; if it has an index, make it current for this thread.

    Tensors that torch, a compiler or a vendor's library creates without naming a device are then on
    it too.
    """
    found = torch.device(facts.tensor_device)
    if found.index is not None:
        torch.accelerator.set_device_index(found.index)
    return found


def streams(facts: Facts, device: torch.device, lane: Lane | None = None) -> Streams:
    """Return the current stream and the stream for steps; no streams on a device without them.

    Also the stream for prefill slices if `lane` runs them concurrently with decode steps
    (`Lane.is_beside`).
    """
    return make_streams(facts) if lane is None else make_streams(facts, has_lane=lane.is_beside, parts=lane.parts)


def kernels(
    config: EngineConfig,
    package: DevicePackage,
    ledger: DecisionLedger,
    device: torch.device,
    facts: Facts | None = None,
) -> KernelTable:
    """Return the kernel table that `config.kernels` names ("auto": the package's preferred one),
    and record it in the ledger.

    "reference" is the reference; if HiSparse is configured and kernels reach pinned memory, it has
    the device's own functions for the entries in `REACHING`.
    """
    name = package.kernels_for(config.kernels, "reference")
    if name == "reference":
        table, but = KernelTable(), ""
        if facts is not None and facts.reaches_pinned_memory and asks_for_hisparse(config.hisparse):
            own: KernelTable = resolve(package.kernels[next(iter(package.kernels))], package.name)()
            table = table.replace(**{entry: getattr(own, entry) for entry in REACHING if entry in own.replaced})
            but = f", except {' and '.join(REACHING)}, which reach host memory"
        ledger.record(
            Row("kernels", config.kernels, REFERENCE, f"requested, to compare numbers{but}", "--kernels auto")
        )
        return table
    table = resolve(package.kernels[name], package.name)()
    origins = {entry: origin.rpartition(":")[0] for entry, origin in table.replaced.items()}
    reason = "; ".join((_whose(origins), *table.refused))
    others = " or ".join(other for other in (*package.kernels, "reference") if other != name)
    ledger.record(Row("kernels", config.kernels, name if origins else "reference", reason, f"--kernels {others}"))
    return table


def _whose(origins: Mapping[str, str]) -> str:
    """Describe where the entries that are not the reference's come from; `origins` has the module
    of each, by entry.

    If the names of the entries exceed 80 characters, gives their number instead, and packages
    instead of modules.
    """
    if not origins:
        return "every entry is the reference"
    modules, entries = sorted(set(origins.values())), ", ".join(origins)
    if len(entries) > 80:
        modules, entries = sorted({module.rpartition(".")[0] for module in modules}), f"{len(origins)} entries"
    return f"{', '.join(modules)}, for {entries}; the reference elsewhere"


def model(
    config: EngineConfig,
    facts: Facts,
    ledger: DecisionLedger,
    progress: Progress,
    model_path: Path,
    kernels: KernelTable,
    groups: Groups | None,
) -> LoadedModel:
    """Return the model, or this rank's part of it, with its weights on the device.

    It calls the functions of the package's kernel table.
    """
    load = resolve(MODEL_LOADER)
    return load(config, model_path, facts=facts, kernels=kernels, ledger=ledger, progress=progress, groups=groups)


def attention(
    config: EngineConfig,
    package: DevicePackage,
    facts: Facts,
    model: LoadedModel,
    pools: Pools,
    kernels: KernelTable,
    hisparse: HiSparseCoordinator | None,
    ledger: DecisionLedger,
    speculation: Speculation | None = None,
) -> AttentionBackend:
    """Return the attention backend of this model, built over the pools.

    If sliding-window layers have pools of their own, it is a `WindowedAttention` with a backend for
    each kind of layer, except over pools of KV rows (`ROWS`), which one backend serves. Candidates
    of kernel entries that refuse this model's calls are recorded in the ledger.
    """
    layers, windows = model.attention_layers, pools.windows
    hisparse = hisparse if any(swapped_rows(layer.rows) for layer in layers) else None
    logits, refusals = torch.empty(1, model.config.vocab_size, device="meta"), Refusals()
    kernels = fitted_to(kernels, ((KernelTable.draw, (logits, None, None)), (KernelTable.greedy, (logits,))), refusals)
    ledger.record(*refusals.rows())

    def make(found: Sequence[Attention], table: ReqToTokenPool, cells: KVPool, whom: str) -> AttentionBackend:
        shape = replace(shape_of(found, model.config.is_encoder), has_bounds=speculation is not None)
        if speculation is not None and speculation.tree is not None:
            shape = replace(shape, features=shape.features | {TREE_MASK})

        def built(kind: type[AttentionBackend], refusals: Refusals | None = None) -> AttentionBackend:
            calls = (call for layer in layers for call in kind.calls(layer, pools.req_to_token))
            return kind(shape, table, cells, fitted_to(kernels, calls, refusals), hisparse)

        def tried(backend: type[AttentionBackend], captured: bool) -> str:
            return failure_of(partial(built, backend), found, model.dtype, getattr(torch, facts.index_dtype), captured)

        given, refused = (config, package, facts, str(model.dtype), shape, cells, whom, ledger, tried), Refusals()
        backend = built(choose_attention(*given), refused)
        ledger.record(*refused.rows())
        return backend

    if windows is None or pools.token_to_kv.layout == ROWS:
        return make(layers, pools.req_to_token, pools.token_to_kv, "the model")
    windowed = [layer for layer in layers if layer.layer_id in windows.layer_ids]
    window = make(windowed, windows.table, windows.token_to_kv, "layers that keep windows")
    rest = [layer for layer in layers if layer.layer_id not in windows.layer_ids]
    full = make(rest, pools.req_to_token, pools.token_to_kv, "layers that keep all tokens") if rest else None
    shape = shape_of(layers, is_encoder=False)
    return WindowedAttention(shape, pools.req_to_token, pools.token_to_kv, window, full, windows.layer_ids)


def runner(
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
    """Return the runner with its registries; if `make_backend` returns a graph mechanism, capture
    the graphs and wait for them. With `config.graph` "auto", a library that lacks what the capture
    calls is a row of the ledger, and steps run eagerly.
    """
    backend = make_backend(config, package, facts, streams, attention, ledger, groups)
    cells = kernels.cache_locations if model.config.is_encoder else _cache_locations(kernels, pools, facts, ledger)
    pool = None if model.config.is_encoder else pools.req_to_token
    table = None if pools.windows is None else pools.windows.table
    shape = StepShape() if speculation is None else speculation.shape_of(model)
    max_bs, max_num_tokens = _prompt_sizes(config, sizes, captured=isinstance(backend, PromptBackend))
    # Each registry needs its own buffers.
    own = [[feature_buffer(shape.feature_size, model.dtype)] if shape.feature_size else [] for _ in range(2)]
    own[0] += [visible_buffer()] if speculation is not None and speculation.tree is not None else []
    own[0] += run_buffers() if speculation is not None and pools.states is not None else []
    if model.previous_ids:
        own = [[*each, previous_buffer(pools.token_table, model.previous_ids)] for each in own]
    given = {"cells": cells, "window_table": table}
    extensions = _extensions(pools, attention, hisparse if attention.hisparse else None, groups, halves)
    decode = build_decode_registry(facts, pool, max_bs=sizes.max_requests * shape.most, extra_buffers=own[0], **given)
    prefill = build_prefill_registry(
        facts, pool, max_bs=max_bs, max_num_tokens=max_num_tokens, extra_buffers=own[1], **given
    )
    made = ModelRunner(
        with_features(model, shape.aux_layers),
        attention,
        decode,
        prefill,
        pools.token_table,
        RunnerOptions(
            poison=config.poison,
            eager_input_no_copy=config.eager_input_no_copy,
            is_narrow=facts.index_dtype == "int32",
            needs_host_lengths=facts.needs_host_lengths or attention.facts.needs_host_lengths,
            needs_exact_lengths=facts.needs_host_lengths or attention.facts.needs_exact_lengths,
        ),
        extensions,
        streams,
    )
    made.graphs = None if backend is None else _captured(config, facts, backend, made, ledger, progress, shape)
    check_captured(made)
    return made


def _captured(
    config: EngineConfig,
    facts: Facts,
    backend: GraphBackend,
    made: ModelRunner,
    ledger: DecisionLedger,
    progress: Progress,
    shape: StepShape,
) -> GraphRunner | None:
    """Return the captured graphs; None, with a row, if a library lacks what a capture calls,
    `config.graph` is "auto" and there is one rank. Everything else that a capture raises ends the
    start: a driver's error leaves its stream undefined, and other ranks would wait."""
    try:
        told = partial(progress, "capturing graphs")
        return capture(config, facts, backend, made, ledger, told, shape.widths, shape.takes_prompts)
    except (AttributeError, ImportError, NotImplementedError) as error:
        if config.graph != "auto" or made.extensions.ranks is not None:
            raise
        backend.close()
        why = f"a step could not be captured: {one_line(error)}; every step runs eagerly"
        ledger.record(Row("graph", config.graph, "off", why, "--graph off, or another library", downgrade=True))
        return None


def _extensions(
    pools: Pools,
    attention: AttentionBackend,
    hisparse: HiSparseCoordinator | None,
    groups: Groups | None,
    halves: Halves | None,
) -> Extensions:
    """Return what the optional features of this start add to a runner."""
    rows = pools.token_to_kv
    entered: list[Entered] = [] if hisparse is None else [hisparse]
    entered += [rows] if isinstance(rows, RowPool) and rows.poisons_slots else []
    return Extensions(
        state_pool=pools.states,
        window_table=None if pools.windows is None else pools.windows.table,
        entered=tuple(entered),
        tables=() if hisparse is None else (hisparse.held_prompt,),
        # The runner of a draft has another attention.
        halves=halves if halves is not None and halves.backends[0] is attention else None,
        ranks=groups,
    )


def _cache_locations(kernels: KernelTable, pools: Pools, facts: Facts, ledger: DecisionLedger) -> Compute:
    """Return the function of the table's entry `cache_locations` for this page table; record the
    candidates that refuse it.
    """
    table, index_dtype = pools.req_to_token, getattr(torch, facts.index_dtype)
    tokens, out = (torch.empty(1, dtype=dtype, device="meta") for dtype in (torch.int32, index_dtype))
    call = table.page_table, tokens, tokens, table.page_size, out
    refusals = Refusals()
    chosen = choose(kernels, KernelTable.cache_locations, call, refusals=refusals)
    ledger.record(*refusals.rows())
    return chosen


def _prompt_sizes(config: EngineConfig, sizes: MemorySizes, captured: bool) -> tuple[int, int]:
    """Return the number of requests and of tokens for which the prefill registry is made.

    `captured`: prefill graphs are captured. They hold addresses, so the sizes are those of the
    largest step; otherwise at most 16 requests and the tokens of one prompt, because the registry
    can grow.
    """
    if captured:
        return sizes.max_requests, config.max_batch_tokens
    return min(sizes.max_requests, 16), min(config.max_batch_tokens, sizes.max_model_len)


def limits(
    config: EngineConfig,
    facts: Facts,
    model: LoadedModel,
    pools: Pools,
    sizes: MemorySizes,
    slices: Slices | None = None,
) -> Limits:
    """Return the limits of a worker without speculation."""
    return Limits(
        max_model_len=sizes.max_model_len,
        max_requests=sizes.max_requests,
        page_size=sizes.page_size,
        num_pages=sizes.num_pages,
        max_batch_tokens=max(config.max_batch_tokens, 1),
        vocab_size=model.config.vocab_size,
        allows_mixed_batches=facts.allows_mixed_batches,
        runs_ahead=facts.has_streams,
        generates=not model.config.is_encoder,
        takes_masks=True,
        takes_changes=True,
        keeps_state=pools.states is not None,
        num_snapshots=sizes.num_snapshots,
        window=sizes.window,
        num_window_pages=sizes.num_window_pages,
        window_unit=sizes.window_unit,
        **sizes.num_bytes,
        **row_sizes(model),
        takes_mrope=mrope_axes(model.config) is not None,
        reads_history=model.reads_history,
        sliced_layers=0 if slices is None else model.sliced_layers,
        slice_budget=slice_budget(config.prompt_slices) or 0,
    )


def worker(
    package: DevicePackage,
    facts: Facts,
    model: LoadedModel,
    pools: Pools,
    limits: Limits,
    runner: ModelRunner,
    speculation: Speculation | None,
    draft_runner: ModelRunner | None,
    slices: Slices | None = None,
    draft_heads: tuple[ModelRunner, ...] = (),
) -> TpModelWorker:
    """Return the worker to which the scheduler submits: that of `make_speculative_worker` with
    speculation, otherwise the package's own worker class, with step kinds for pooling models and
    for prefill slices.
    """
    if speculation is not None:
        given = draft_runner, pools.token_table, limits, facts, draft_heads
        return make_speculative_worker(speculation, runner, *given)
    pooling, kinds = model.config.pooling, list[StepKind]()
    if pooling is not None:
        kinds.append(EmbeddingSteps(Pooler(pooling, model.classify, model.dtype)))
    if slices is not None:
        kinds.append(SliceSteps(slices))
    return resolve(package.worker, package.name)(runner, pools.token_table, limits, kinds)


STANDARD = BringUp(
    (
        device,
        streams,
        kernels,
        model,
        sizes,
        pools,
        attention,
        runner,
        limits,
        worker,
    ),
    nested=(RANKS, SPECULATION, HISPARSE, TWO_BATCH_OVERLAP, PREFILL_SLICES),
)
"""The order of every torch device, with the nested orders of the optional features; a package must
insert `device_memory` before `sizes`."""
