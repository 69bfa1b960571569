"""An engine with one planted defect at a time, for each way in which other engines broke; the
simulated device, a law or a check names it.

Every defect runs on every kind of simulated device, in the whole engine: scheduler, overlap,
worker, graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from ci.lanes import Lane
from sglcore.core.errors import ConfigError
from sglcore.runtime import forward_context as contexts
from sglcore.runtime import token_table
from sglcore.runtime.attention.contract import AttentionFacts
from sglcore.runtime.attention.gathered import GatheredAttention
from sglcore.runtime.buffer_registry import BufferRegistry, FillContext, InputBuffer
from sglcore.runtime.forward_batch import StalePlanError
from sglcore.runtime.graphs.capture import CaptureError, Recorder
from sglcore.runtime.graphs.decode_graphs import DecodeGraphs
from sglcore.runtime.graphs.shadow_mode import ShadowMismatch
from sglcore.runtime.memory.pools import MHATokenToKVPool
from sglcore.runtime.staging import HostBlock
from sglcore.runtime.tp_worker import TpModelWorker
from tests.checkpoints import mistral, save
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.runtime.test_stream_worker import Early, NoWait, OtherStream, Unrecorded

pytestmark = pytest.mark.needs("streams", "simulator", "graphs.full")

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    oracle = mistral(max_position_embeddings=96, sliding_window=20)
    yield save(oracle, tmp_path_factory.mktemp("defects")), oracle


@pytest.fixture
def sim(lane: Lane) -> Iterator[Any]:
    """The simulated device, reset before and after a defect."""
    found = sys.modules["sglcore_sim"].current()
    found.reset()
    yield found
    found.reset()


def engine(folder: Path, **settings: Any) -> TokenEngine:
    """Make an engine with overlap and full decode graphs."""
    return TokenEngine(folder, **{"graph": "full", "overlap": True, "max_batch_tokens": 8, **settings})


def serve(made: TokenEngine, oracle: Any) -> None:
    """Run chunks, ragged arrivals and decode, and check every log-probability."""
    check_logprobs(made.run(random_prompts(21, (5, 30, 17, 9)), 12, stagger=2), oracle)


# -- the defects: each plants itself before or after the start
# -----------------------------------------------------------


def missing_wait(made: TokenEngine) -> None:
    made.worker._readbacks.__class__ = NoWait


def missing_retention(made: TokenEngine) -> None:
    made.worker._readbacks.__class__ = Unrecorded


def read_before_the_event(made: TokenEngine) -> None:
    made.worker._readbacks.__class__ = Early


def wrong_stream(made: TokenEngine) -> None:
    """Runs every other step on the schedule stream."""

    class Alternates(OtherStream):
        def running(self) -> Any:
            turns.append(None)
            return right.running() if len(turns) % 2 else super().running()

    right, turns = made.worker._streams, []
    made.worker._streams = Alternates(right.schedule, right.forward)


def pinned_buffer_reused(made: TokenEngine) -> None:
    class OneMirror(HostBlock):
        def commit(self) -> None:
            self._turn = 0
            self._mirrors[0]._copied = False
            super().commit()

    for registry in (made.worker.runner.decode_registry, made.worker.runner.prefill_registry):
        registry.block.__class__ = OneMirror


def rebound_input_buffer(made: TokenEngine) -> None:
    """The registry allocates new buffers while graphs hold the old addresses."""
    registry = made.worker.runner.decode_registry
    registry.frozen = False
    registry.make_buffers()
    torch.accelerator.synchronize()


def pool_freed_early(made: TokenEngine) -> None:
    """The KV pool's storage is replaced without notice to the graphs."""
    (part,) = made.worker.runner.attn_backend.parts
    pool = part.token_to_kv_pool
    assert isinstance(pool, MHATokenToKVPool)
    pool._kv = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in pool._kv]
    torch.accelerator.synchronize()


def pool_replaced(made: TokenEngine) -> None:
    """The KV pool's storage is replaced correctly, but graphs are not captured again."""
    pool = made.worker.runner.attn_backend.token_to_kv_pool
    assert isinstance(pool, MHATokenToKVPool)
    pool.replace_storage()
    torch.accelerator.synchronize()


def other_requests_page(made: TokenEngine) -> None:
    """The pages of a row are written to the neighbouring row."""
    (part,) = made.worker.runner.attn_backend.parts
    table = part.req_to_token_pool

    class Beside(type(table)):
        def write(self, entries: Any, pages: Any) -> None:
            super().write((entries - self.max_pages).clamp(min=self.max_pages), pages)

    table.__class__ = Beside


def stale_plan(made: TokenEngine) -> None:
    """Attention is planned before one more row joins the batch."""
    runner = made.worker.runner
    real = runner.init_batch

    def init_batch(*given: Any) -> Any:
        staged = real(*given)
        staged.mark_forward_metadata_ready(runner.attn_backend.plan(staged))
        staged.batch_size += 1
        return staged

    runner.init_batch = init_batch  # pyright: ignore[reportAttributeAccessIssue]


def sync_in_capture(patch: Patch) -> None:
    real = GatheredAttention.attend

    def attend(self: GatheredAttention, q: Any, layer: Any, batch: Any, plan: Any) -> Any:
        assert int(batch.seq_lens.max()) > 0
        return real(self, q, layer, batch, plan)

    patch.setattr(GatheredAttention, "attend", attend)


def shape_from_device_data(patch: Patch) -> None:
    real = GatheredAttention.attend

    def attend(self: GatheredAttention, q: Any, layer: Any, batch: Any, plan: Any) -> Any:
        assert batch.seq_lens[batch.seq_lens > 0].shape[0] >= 0
        return real(self, q, layer, batch, plan)

    patch.setattr(GatheredAttention, "attend", attend)


def mask_off_by_one(patch: Patch) -> None:
    from sglcore.runtime.attention import gathered

    real = gathered._visible
    patch.setattr(gathered, "_visible", lambda last, places, window: real(last - 1, places, window))


def dirty_padding(patch: Patch) -> None:
    """Padding rows keep what an older batch left."""
    patch.setattr(InputBuffer, "pad", lambda self, ctx: None)


def token_count_of_zero(patch: Patch) -> None:
    """A padded batch reports no real tokens."""
    real = BufferRegistry.fill_from

    def fill_from(self: Any, batch: Any, ctx: FillContext, skip: Any = ()) -> None:
        if ctx.raw_bs != ctx.padded_bs:
            ctx = FillContext(0, ctx.padded_bs, 0, ctx.padded_num_tokens)
        real(self, batch, ctx, skip)

    patch.setattr(BufferRegistry, "fill_from", fill_from)


def wrong_slot_dtype(patch: Patch) -> None:
    """A backend that indexes KV slots with another integer type than the device's."""
    from sglcore.device.package import resolve
    from sglcore.engine import start

    real = start.resolve

    def other(ref: str, package: str = "") -> Any:
        found = real(ref, package)
        if not ref.endswith(":facts"):
            return found
        wanted = "int64" if found(0).index_dtype == "int32" else "int32"
        patch.setattr(
            GatheredAttention,
            "facts",
            AttentionFacts(index_dtype=wanted, features=frozenset({"capture", "sliding_window", "mixed"})),
        )
        return found

    assert resolve is real
    patch.setattr(start, "resolve", other)


class Elsewhere:
    """Captures on its own stream, not on the given one."""

    def __init__(self, real: Any) -> None:
        self.real, self.make_pool = real, real.make_pool

    def capture(self, stream: Any, pool: Any) -> Any:
        return self.real.capture(torch.Stream(stream.device), pool)


def capture_on_another_stream(patch: Patch) -> None:
    real = Recorder.__init__

    def make(self: Recorder, capture: Any, streams: Any) -> None:
        real(self, Elsewhere(capture), streams)

    patch.setattr(Recorder, "__init__", make)


def worker_does_not_wait(patch: Patch) -> None:
    """The forward stream starts before the schedule stream's results are there."""

    def take_over(self: TpModelWorker) -> None:
        self.runner.token_table.last.zero_()

    patch.setattr(TpModelWorker, "_take_over", take_over)


def pageable_copy(patch: Patch) -> None:
    """A table is indexed with host memory that is not pinned."""
    real = token_table.TokenTable.resolve_decode

    def resolve_decode(self: Any, input_ids: Any, slots: Any) -> None:
        real(self, input_ids, slots + torch.from_numpy(np.zeros(len(slots), np.int32)).to(slots.device))

    patch.setattr(token_table.TokenTable, "resolve_decode", resolve_decode)


def graph_not_filled(patch: Patch) -> None:
    """A replay runs on the inputs of the step before."""
    real = DecodeGraphs.run

    def run(self: DecodeGraphs, batch: Any) -> Any:
        patch.setattr(self.registry, "fill_from", lambda *_: None)
        return real(self, batch)

    patch.setattr(DecodeGraphs, "run", run)


@dataclass(frozen=True, slots=True)
class Defect:
    """How a defect is planted, and what reports it: a kind of fault, or the error of a check
    (AssertionError: wrong numbers)."""

    fault: str = ""
    error: type[BaseException] | None = None
    says: str = ""
    before: Callable[[Patch], None] | None = None
    after: Callable[[TokenEngine], None] | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    is_watched: bool = False


SHADOW = (("shadow", 1),)
DEFECTS: MappingProxyType[str, Defect] = MappingProxyType(
    {
        "missing wait": Defect("race", after=missing_wait),
        "missing retention": Defect("use_after_free", after=missing_retention),
        "results read early": Defect("pinned_read_early", after=read_before_the_event),
        "wrong stream": Defect("race", after=wrong_stream),
        "worker does not wait for the weights": Defect("race", before=worker_does_not_wait),
        "pinned buffer reused": Defect("pinned_source_changed", after=pinned_buffer_reused),
        "sync in capture": Defect("sync_in_capture", before=sync_in_capture),
        "shape from device data": Defect("data_dependent", before=shape_from_device_data),
        "capture on another stream": Defect(error=CaptureError, says="stream", before=capture_on_another_stream),
        "pageable copy in a step": Defect("sync_forbidden", before=pageable_copy, is_watched=True),
        "rebound input buffer": Defect(error=ShadowMismatch, says="full:", after=rebound_input_buffer, settings=SHADOW),
        "inputs of the step before": Defect(error=AssertionError, says="first divergent", before=graph_not_filled),
        "stale plan": Defect(error=StalePlanError, says="planned for", after=stale_plan),
        "pool replaced under graphs": Defect(error=StalePlanError, says="generation", after=pool_replaced),
        "pool freed early": Defect("stale_graph", after=pool_freed_early),
        "wrong slot dtype": Defect(error=ConfigError, says="KV slot indices of", before=wrong_slot_dtype),
        "mask off by one": Defect(error=AssertionError, says="first divergent", before=mask_off_by_one),
        "dirty padding": Defect(error=AssertionError, says="first divergent", before=dirty_padding),
        "token count of zero": Defect(error=AssertionError, says="first divergent", before=token_count_of_zero),
        "another request's page": Defect(error=AssertionError, says="first divergent", after=other_requests_page),
    }
)


def attempt(defect: Defect, patch: Patch, folder: Path, oracle: Any, sim: Any) -> None:
    """Start an engine with the defect, and serve."""
    if defect.before is not None:
        defect.before(patch)
    made = engine(folder, **dict(defect.settings))
    if defect.after is not None:
        defect.after(made)
    if defect.is_watched:
        watch(made, patch, sim)
    serve(made, oracle)


def watch(made: TokenEngine, patch: Patch, sim: Any) -> None:
    """Make a submit that waits for the device an error."""
    real = made.worker.submit

    def submit(batch: Any) -> Any:
        with sim.no_sync():
            return real(batch)

    patch.setattr(made.worker, "submit", submit)


@pytest.mark.parametrize("is_watched", [False, True])
def test_the_engine_without_a_defect_raises_nothing(
    checkpoint: tuple[Path, Any], sim: Any, monkeypatch: Patch, is_watched: bool
) -> None:
    folder, oracle = checkpoint
    attempt(Defect(settings=SHADOW if not is_watched else (), is_watched=is_watched), monkeypatch, folder, oracle, sim)
    assert not sim.faults


@pytest.mark.sim_faults(
    "race",
    "use_after_free",
    "pinned_source_changed",
    "pinned_read_early",
    "pinned_written",
    "stale_graph",
    "sync_in_capture",
    "sync_forbidden",
    "data_dependent",
    "pageable_in_capture",
    "wrong_capture",
    "pool_mate",
    "out_of_bounds",
    "uninitialised",
)
@pytest.mark.parametrize("name", list(DEFECTS))
def test_a_planted_defect_is_caught_by_name(
    name: str, checkpoint: tuple[Path, Any], sim: Any, monkeypatch: Patch
) -> None:
    folder, oracle = checkpoint
    defect = DEFECTS[name]
    expected = (defect.error,) if defect.error is not None else (RuntimeError,)
    with pytest.raises(expected) as caught:
        attempt(defect, monkeypatch, folder, oracle, sim)
    said = "".join([str(caught.value), *map(str, sim.faults)])
    assert (f"[{defect.fault}]" if defect.fault else defect.says) in said, said


def test_a_runner_inside_the_scope_of_another_uses_its_own_backend(
    checkpoint: tuple[Path, Any], sim: Any, monkeypatch: Patch
) -> None:
    """Two engines in one process, one run inside the other's forward. With a scope that leaks, the
    numbers are wrong."""
    folder, oracle = checkpoint
    outer, inner = engine(folder, graph="off"), engine(folder, graph="off", page_size=2)
    backend = outer.worker.runner.attn_backend
    with contexts.forward_context(contexts.ForwardContext(backend)):
        serve(inner, oracle)

    class Leaks(contexts.forward_context):
        def __enter__(self) -> Any:
            if contexts.has_forward_context():
                kept = contexts.get_forward_context()
                self._context = contexts.ForwardContext(kept.attn_backend, self._context.batch, self._context.layers)
            return super().__enter__()

    from sglcore.runtime import model_runner

    monkeypatch.setattr(model_runner, "forward_context", Leaks)
    with contexts.forward_context(contexts.ForwardContext(backend)), pytest.raises((AssertionError, RuntimeError)):
        serve(inner, oracle)


@pytest.fixture
def group(sim: Any, tmp_path: Path) -> Iterator[None]:
    """A process group of this process only, with the device's collectives."""
    torch.distributed.init_process_group(
        sim.kind.collectives, init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.sim_faults("race")
@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_collective_beside_the_forward_stream_must_wait_for_it(
    checkpoint: tuple[Path, Any], sim: Any, group: None, monkeypatch: Patch, is_ordered: bool
) -> None:
    """All-reduces the last hidden states on a separate stream for collectives, with and without
    waits."""
    from sglcore.models.decoder import CausalLM

    folder, oracle = checkpoint
    real, side = CausalLM.finish, torch.Stream(sim.device())

    def finish(self: CausalLM, state: Any) -> Any:
        hidden, forward = real(self, state), torch.accelerator.current_stream()
        if is_ordered:
            side.wait_stream(forward)
        with side:
            torch.distributed.all_reduce(hidden)
        if is_ordered:
            forward.wait_stream(side)
            hidden.record_stream(side)
        return hidden

    monkeypatch.setattr(CausalLM, "finish", finish)
    made = engine(folder, graph="off")
    if is_ordered:
        serve(made, oracle)
        assert not sim.faults
        return
    with pytest.raises(RuntimeError, match=r"\[race\].*all_reduce"):
        serve(made, oracle)
