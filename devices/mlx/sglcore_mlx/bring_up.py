"""The bring-up steps on MLX, in order: the stream thread, weights, memory, attention, worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from sglcore.checkpoint.dtype import choose_dtype
from sglcore.checkpoint.model_config import check_context
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.bring_up import BringUp
from sglcore.device.facts import Facts
from sglcore.device.package import DevicePackage, resolve
from sglcore.models.implementation import choose_implementation
from sglcore.step.hisparse_config import parse_hisparse_config
from sglcore.step.sizing import Geometry, MemoryBudget, MemorySizes, size_pools, size_text
from sglcore.step.slice_decisions import INTERLEAVE, lane_row, slice_budget, slice_row, whole_row
from sglcore.worker.topology import Place
from sglcore_mlx.attention.blocks import block_page_bytes, fitting_page_size, has_blocks, make_block_arrays
from sglcore_mlx.attention.contract import DecodeAttention
from sglcore_mlx.attention.select import select_attention
from sglcore_mlx.hardware import Hardware, open_hardware
from sglcore_mlx.kernels import KernelNames
from sglcore_mlx.layers.build import Build
from sglcore_mlx.load import LoadedModel, load_model
from sglcore_mlx.memory import device_memory
from sglcore_mlx.models.contract import Model
from sglcore_mlx.parallel.build import ShardedBuild
from sglcore_mlx.parallel.ranks import Ranks, join
from sglcore_mlx.parallel.settings import check_alone
from sglcore_mlx.pool import DeviceState, cell_bytes, make_cells
from sglcore_mlx.residency import Residency
from sglcore_mlx.speculative.choice import Speculation, check_model, choose_speculation
from sglcore_mlx.speculative.drafts import Draft, load_draft
from sglcore_mlx.speculative.trial import trial
from sglcore_mlx.states import StatePool, state_bytes
from sglcore_mlx.stepper import StepperOptions
from sglcore_mlx.thread import StreamThread
from sglcore_mlx.worker_bring_up import worker

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Computing:
    """How steps run. `compiles`: decode steps are compiled by MLX, otherwise each operation is
    queued separately; `compiles_draw`: sampling is compiled too."""

    compiles: bool
    compiles_draw: bool


def stream_thread() -> StreamThread:
    """Start the thread on which all arrays are made and return it; `StreamThread.call` runs
    functions there."""
    return StreamThread()


def hardware(
    stream_thread: StreamThread, config: EngineConfig, ledger: DecisionLedger, place: Place | None = None
) -> Hardware:
    """Return which device MLX uses, and on the CPU how many streams share the work; record both in
    the ledger. Ranks of one machine divide its cores."""
    found = stream_thread.call(open_hardware, config.threads, 1 if place is None else place.neighbours)
    ledger.record(*found.rows)
    return found


def ranks(
    stream_thread: StreamThread, config: EngineConfig, ledger: DecisionLedger, place: Place | None = None
) -> Ranks | None:
    """Connect the ranks of this start and return them; None: this process runs the model alone.
    Waits. Raises ConfigError for settings that ranks do not support here, and as `join` does."""
    if place is None:
        return None
    check_alone(config, ledger)
    return stream_thread.call(join, place)


def residency(hardware: Hardware, ledger: DecisionLedger) -> Residency:
    """Set the limit of memory that an Apple GPU keeps resident between steps, and return the object
    that undoes it with `close`. On other hardware it does nothing. Records what was changed in the
    ledger."""
    kept = Residency(mx.device_info() if hardware.has_metal else {})
    if kept.row is not None:
        ledger.record(kept.row)
    return kept


def kernels(config: EngineConfig, package: DevicePackage, ledger: DecisionLedger) -> KernelNames:
    """Return the names of the functions that run each operation, for the ledger; each operation has
    one implementation. Raises ConfigError for settings that this device does not support:
    `quantize` or `kv_cache_dtype` other than "auto", and hisparse. Records the choice in the
    ledger."""
    name = package.kernels_for(config.kernels)
    table: KernelNames = resolve(package.kernels[name], package.name)()
    for name, value in (("quantize", config.quantize), ("kv_cache_dtype", config.kv_cache_dtype)):
        if value != "auto":
            raise ConfigError(
                f"{name} is {value!r}, but this device keeps weights and KV entries as the checkpoint has them",
                remedy=f"leave --{name.replace('_', '-')} out, or use a checkpoint that is quantised",
            )
    asked, shared = parse_hisparse_config(config.hisparse), "host and accelerator share one memory"
    if asked is not None and asked.is_auto:
        ledger.record(Row("hisparse choice", "auto", "off", f"{shared}: nothing can be offloaded", "--hisparse off"))
    elif asked is not None:
        raise ConfigError(
            f"hisparse is requested, but {shared}: nothing can be offloaded",
            remedy="leave --hisparse out",
        )
    what = ", ".join(sorted({origin.partition(":")[0].partition(".")[0] for origin in table.origin.values()}))
    ledger.record(Row("kernels", config.kernels, what, "this device has one implementation of each operation"))
    return table


def computing(config: EngineConfig, hardware: Hardware, ledger: DecisionLedger) -> Computing:
    """Decide whether decode steps are compiled (one graph for each size); there is no graph
    capture. Raises ConfigError for another `--graph` than auto, compiled and off. `shadow` and
    two-batch overlap are turned off, with a ledger row."""
    known = ("auto", "compiled", "off")
    if config.graph not in known:
        raise ConfigError(
            f"there are no {config.graph!r} graphs on this device",
            wanted=f"one of {', '.join(known)}",
            remedy="its steps are lazy graphs already; leave --graph out",
        )
    compiles = hardware.compiles if config.graph == "auto" else config.graph == "compiled"
    reason = hardware.compile_reason if config.graph == "auto" else "requested"
    ledger.record(Row("graph", config.graph, "compiled" if compiles else "off", reason, "--graph compiled or off"))
    if config.shadow:
        why = "nothing is captured, so there is no replay to compare"
        ledger.record(Row("shadow", str(config.shadow), "off", why, "leave shadow out", downgrade=True))
    asked = config.two_batch_overlap
    if asked != "off":
        why = "a single rank waits for no other"
        ledger.record(Row("two-batch overlap", asked, "off", why, "--two-batch-overlap off", downgrade=asked == "on"))
    # On the CPU, compiling the sampler takes the C++ compiler seconds at the first request of each
    # kind of sampling.
    return Computing(compiles, compiles and hardware.kind != "cpu")


def speculation(
    config: EngineConfig, model_path: Path, ranks: Ranks | None, ledger: DecisionLedger
) -> Speculation | None:
    """Return the drafter and the numbers of draft tokens, as the configuration asks; None: no
    speculation, which ranks do not have. Reads no weights. Raises ConfigError for an invalid
    setting."""
    return choose_speculation(config, model_path, ledger) if ranks is None else None


def model(
    stream_thread: StreamThread,
    hardware: Hardware,
    kernels: KernelNames,
    config: EngineConfig,
    facts: Facts,
    model_path: Path,
    speculation: Speculation | None,
    ranks: Ranks | None,
    ledger: DecisionLedger,
    progress: Callable[[str, int, int], None],
) -> LoadedModel:
    """Load the model on the stream thread and return it; waits. `progress("loading weights", done,
    total)` is called on the stream thread. If the wait is interrupted, loading stops at its next
    progress. Raises ConfigError for a context beyond the checkpoint's, a dtype that the device does
    not compute in, an unsupported model, and if draft tokens can not be verified on the model;
    CheckpointError for files that are missing or damaged. Records the model's implementation, dtype
    and quantisation in the ledger.
    """
    model_config, _ = choose_implementation(config.model_impl, model_path, ledger, has_torch=False, task=config.task)
    check_context(config.max_model_len, model_config)
    dtype = choose_dtype(config.dtype, model_config.dtype, facts)
    ledger.record(dtype)

    def load(told: Callable[[int, int], None]) -> LoadedModel:
        return load_model(
            model_path,
            model_config,
            dtype=getattr(mx, dtype.effective),
            max_positions=config.max_model_len or model_config.context_length,
            parts=hardware.parts,
            progress=told,
            check=partial(check_model, speculation),
            make=Build if ranks is None else partial(ShardedBuild, ranks=ranks),
        )

    model = _loaded(stream_thread, load, partial(progress, "loading weights"))
    if model.quantization != "none":
        ledger.record(Row("weights", "auto", model.quantization, "the checkpoint's own", "another checkpoint"))
    return model


def _loaded(stream_thread: StreamThread, load: Callable[..., T], progress: Callable[[int, int], None]) -> T:
    """Return `load(progress)`, run on the stream thread. If this thread is interrupted, loading
    ends at the next weight."""
    stopped = threading.Event()

    def told(done: int, total: int) -> None:
        if stopped.is_set():
            raise InterruptedError("the start was cancelled")
        progress(done, total)

    try:
        return stream_thread.call(load, told)
    except BaseException:
        stopped.set()
        raise


def draft(
    stream_thread: StreamThread,
    hardware: Hardware,
    config: EngineConfig,
    model: LoadedModel,
    speculation: Speculation | None,
    ledger: DecisionLedger,
    progress: Callable[[str, int, int], None],
) -> Draft | None:
    """Load the draft model; None: there is none. Waits. Raises ConfigError if it does not fit the
    model."""
    if speculation is None or speculation.folder is None:
        return None
    own = {"parts": hardware.parts, "ledger": ledger, "tree": speculation.tree}
    folder, kind = speculation.folder, speculation.kind

    def load(told: Callable[[int, int], None]) -> Draft:
        return load_draft(config, folder, kind, model, progress=told, **own)

    return _loaded(stream_thread, load, partial(progress, "loading the draft"))


def sizes(
    config: EngineConfig,
    facts: Facts,
    model: Model,
    draft: Draft | None,
    speculation: Speculation | None,
    device_memory: MemoryBudget,
    ledger: DecisionLedger,
) -> MemorySizes:
    """Return the number of pages and of request slots, and the context length, from the memory that
    the weights leave. Raises ConfigError if it is too little."""
    cell = 0 if model.config.is_encoder else cell_bytes(model.layers, model.dtype)
    cell += 0 if draft is None else cell_bytes(draft.model.layers, draft.model.dtype)
    page_size = fitting_page_size(model.layers, config.page_size, facts.page_size)
    page, state = page_size * cell + block_page_bytes(model.layers, page_size, model.dtype), state_bytes(model.states)
    # The states of incomplete blocks are not part of snapshots: a page ends with a complete block.
    each = {"ring": state} if has_blocks(model.layers) else {"state": state}
    return size_pools(
        config,
        context_len=model.config.context_length,
        geometry=Geometry(page, **each),
        page_size=page_size,
        budget=_less_draft_probs(config, model, speculation, device_memory, ledger),
        ledger=ledger,
    )


def _less_draft_probs(
    config: EngineConfig, model: Model, speculation: Speculation | None, budget: MemoryBudget, ledger: DecisionLedger
) -> MemoryBudget:
    """Return the budget less the distributions of draft tokens, with a ledger row; the budget
    itself if none are kept. Raises ConfigError if they do not fit."""
    taken = 0 if speculation is None else speculation.draft_probs_bytes(config.max_requests, model.config.vocab_size)
    if not taken:
        return budget
    remedy = "lower max_requests or draft_tokens"
    if taken > budget.available:
        raise ConfigError(
            f"the distributions of draft tokens take {size_text(taken)}, {size_text(budget.available)} are available",
            remedy=f"{remedy}, or --speculative-verify coupled",
        )
    why = f"the distributions of draft tokens of {config.max_requests} requests, in addition to the pools"
    ledger.record(Row("draft probabilities", config.speculative_verify, size_text(taken), why, remedy))
    return replace(budget, available=budget.available - taken)


def pools(
    stream_thread: StreamThread, config: EngineConfig, model: Model, draft: Draft | None, sizes: MemorySizes
) -> DeviceState:
    """Allocate the KV cache of every layer (none for an encoder), of the draft too, and the
    recurrent states and last tokens of every request slot; return them. With `poison` KV cache and
    states hold NaN, so that reads of unwritten memory show. Waits."""
    fill = float("nan") if config.poison else 0.0

    def make() -> DeviceState:
        num_cells = (sizes.num_pages + 1) * sizes.page_size
        cells = [] if model.config.is_encoder else make_cells(model.layers, model.dtype, num_cells, fill)
        cells += make_block_arrays(model.layers, sizes.page_size, model.dtype, sizes.num_pages + 1, fill)
        states = StatePool(model.states, sizes.max_requests, sizes.num_snapshots, config.poison)
        state = DeviceState(cells, states, mx.zeros((sizes.max_requests + 1,), mx.int32))
        if draft is not None:
            state.draft_cells = make_cells(draft.model.layers, draft.model.dtype, num_cells, fill)
        mx.eval(state.arrays())
        return state

    return stream_thread.call(make)


def attention(
    config: EngineConfig,
    package: DevicePackage,
    hardware: Hardware,
    model: Model,
    sizes: MemorySizes,
    ledger: DecisionLedger,
) -> DecodeAttention:
    """Return the attention backend for decode requests, of one token or a few to verify; prompts
    always use `attention/dense.py`. Raises ConfigError as `select_attention` does."""
    return _selected(config, package, hardware, model, sizes, ledger)


def draft_attention(
    config: EngineConfig,
    package: DevicePackage,
    hardware: Hardware,
    draft: Draft | None,
    sizes: MemorySizes,
    ledger: DecisionLedger,
) -> DecodeAttention | None:
    """Return the attention backend for the draft model's verified tokens; its draft tokens use
    `attention/tail.py`. None: there is no draft. Raises ConfigError as `select_attention` does."""
    if draft is None:
        return None
    return _selected(config, package, hardware, draft.model, sizes, ledger.about("draft"))


def _selected(
    config: EngineConfig,
    package: DevicePackage,
    hardware: Hardware,
    model: Model,
    sizes: MemorySizes,
    ledger: DecisionLedger,
) -> DecodeAttention:
    page_size = sizes.page_size
    kind = select_attention(
        package.attention,
        config.attention_backend,
        dtype=str(model.dtype).removeprefix("mlx.core."),
        head_dims=tuple(dict.fromkeys(layer.head_dim for layer in model.layers)),
        page_size=page_size,
        compute=hardware.kind,
        has_latent=any(layer.value_dim is not None for layer in model.layers),
        has_blocks=has_blocks(model.layers),
        ledger=ledger,
    )
    return kind(model.layers, page_size, hardware.streams)


def slices(config: EngineConfig, model: Model, speculation: Speculation | None, ledger: DecisionLedger) -> int | None:
    """Return the most tokens times layers of one slice in layered prefill; 0: chosen by measured
    time; None: prompts are not sliced. Raises ConfigError for an invalid setting. Records the
    decision in the ledger if slices were requested."""
    asked = config.prompt_slices
    budget = slice_budget(asked)
    if budget is None:
        return None
    if speculation is not None:
        why = "a worker with speculation prefills whole prompts"
        ledger.record(whole_row(asked, budget, why, "--speculative off"))
        return None
    if model.config.is_encoder or not model.sliced_layers:
        why = f"the forward of {model.config.architecture} is not divided into layers"
        ledger.record(whole_row(asked, budget, why, "--prompt-slices off"))
        return None
    ledger.record(slice_row(asked, budget, model.sliced_layers))
    ledger.record(lane_row(config.prompt_lane, INTERLEAVE, "this device runs one stream"))
    return budget


def options(config: EngineConfig, computing: Computing) -> StepperOptions:
    """Return how steps are compiled, and for which numbers of requests."""
    buckets = config.graph_buckets if "graph_buckets" in config.sources else ()
    return {"compiles": computing.compiles, "compiles_draw": computing.compiles_draw, "row_buckets": buckets}


BRING_UP = BringUp(
    (
        stream_thread,
        hardware,
        ranks,
        residency,
        kernels,
        computing,
        speculation,
        model,
        draft,
        device_memory,
        sizes,
        pools,
        attention,
        draft_attention,
        slices,
        options,
        worker,
        trial,
    )
)
