"""Full graphs over a stream capture: a replay equals the dense oracle, and values that must not be
baked into a graph are caught."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.core.garbage_collection import no_collection
from sglcore.runtime.attention.contract import AttentionPlan, Bucket
from sglcore.runtime.attention.gathered import GatheredAttention
from sglcore.runtime.attention.reference import ReferenceAttention, ReferencePlan
from sglcore.runtime.forward_batch import ForwardBatch, StalePlanError
from sglcore.runtime.forward_context import ForwardContext, forward_context, has_forward_context
from sglcore.runtime.graphs.capture import CaptureError
from sglcore.runtime.graphs.decode_graphs import DecodeGraphs
from sglcore.runtime.graphs.full import FullGraphs
from sglcore.runtime.streams import Streams
from tests.runtime.graphs.test_graph_runner import compute_before, count_padding, pad_nothing
from tests.runtime.recording import GraphSite, RecordingCapture, make_graph_site
from tests.runtime.tiny import SHARED, STAGED, Desk, TinyModel, assert_close, make_site, random_tokens

LARGE_SMALL_LARGE = (6, 1, 5, 2, 4, 3, 6, 1, 6)


def decode(made: GraphSite, sizes: Sequence[int]) -> list[tuple[Tensor, str]]:
    """Decode steps of the first `size` of six requests, after their prompts."""
    desk, runner = Desk(2), made.site.runner
    with torch.inference_mode():
        for slot in range(1, 7):
            runner.run_eager(runner.init_batch(desk.extend({slot: random_tokens(slot, slot)})))
    results = []
    for step, size in enumerate(sizes):
        made.site.tokens.last[1:7] = torch.tensor(random_tokens(100 + step, 6), dtype=torch.int32)
        results.append(made.run(desk.decode(*range(1, size + 1))))
    return results


def expected(model: TinyModel, sizes: Sequence[int]) -> list[Tensor]:
    """The dense oracle's results for the same steps."""
    tokens = {slot: random_tokens(slot, slot) for slot in range(1, 7)}
    results = []
    for step, size in enumerate(sizes):
        for slot, token in list(zip(range(1, 7), random_tokens(100 + step, 6), strict=True))[:size]:
            tokens[slot].append(token)
        results.append(torch.stack([model.dense(tokens[slot])[-1] for slot in range(1, size + 1)]))
    return results


def differs(made: GraphSite, sizes: Sequence[int] = LARGE_SMALL_LARGE) -> bool:
    """Whether any replay differs from the oracle, or reads beyond its memory."""
    try:
        found = decode(made, sizes)
    except IndexError:
        return True
    assert all(path.startswith("full:") for _, path in found)
    wanted = expected(made.site.model, sizes)
    return not all(torch.allclose(one, other, atol=2e-5) for (one, _), other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("facts", [SHARED, STAGED], ids=["shared", "staged"])
@pytest.mark.parametrize("poison", [False, True], ids=["clean", "poisoned"])
@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (4,), (5,), (6,), LARGE_SMALL_LARGE], ids=str)
def test_a_replay_gives_what_each_request_gives_alone(sizes: tuple[int, ...], poison: bool, facts: Any) -> None:
    assert not differs(make_graph_site(poison=poison, facts=facts), sizes)


def test_the_path_names_the_smallest_bucket_that_holds_the_batch() -> None:
    paths = [path for _, path in decode(make_graph_site(), (1, 3, 6))]
    assert paths == ["full:1", "full:4", "full:6"]


# -- what must not be baked in
# -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class CopiedPlan(ReferencePlan):
    """A plan with a copy of the lengths, as in attention libraries with a planner."""

    lengths: Tensor = field(default_factory=torch.Tensor)


class PlannedLengths(GatheredAttention):
    """Reads the lengths in its plan, which `refresh` updates."""

    def capture_plan(self, bucket: Bucket) -> CopiedPlan:
        """Make a plan with a buffer for the lengths."""
        plan = super().capture_plan(bucket)
        lengths = torch.ones(bucket.batch_size, dtype=torch.int32)
        return CopiedPlan(self, plan.generation, captured=plan.captured, lengths=lengths)

    def refresh(self, plan: ReferencePlan, batch: ForwardBatch) -> None:
        """Copy the lengths into the plan's buffer."""
        assert isinstance(plan, CopiedPlan)
        plan.lengths.copy_(batch.seq_lens)

    def attend(self, q: Tensor, layer: Any, batch: ForwardBatch, plan: ReferencePlan) -> Tensor:
        """Attend with the lengths of the plan."""
        planned = replace(batch, seq_lens=plan.lengths) if isinstance(plan, CopiedPlan) else batch
        return super().attend(q, layer, planned, plan)


class StalePlan(PlannedLengths):
    """Mutant: the plan of the capture is never updated."""

    def refresh(self, plan: ReferencePlan, batch: ForwardBatch) -> None:
        """Do nothing."""


class MovedPlan(PlannedLengths):
    """Mutant: `refresh` puts the lengths into new memory, which no graph reads."""

    def refresh(self, plan: ReferencePlan, batch: ForwardBatch) -> None:
        """Rebind the lengths."""
        assert isinstance(plan, CopiedPlan)
        plan.lengths = batch.seq_lens.clone()


@pytest.mark.parametrize(
    ("attention", "is_right"),
    [(PlannedLengths, True), (StalePlan, False), (MovedPlan, False), (ReferenceAttention, False)],
)
def test_a_plan_that_is_stale_or_moved_or_made_of_host_lengths_is_caught(attention: Any, is_right: bool) -> None:
    assert differs(make_graph_site(attention=attention)) is not is_right


def rebind(made: GraphSite) -> None:
    """Mutant: the input buffers are reallocated after capture."""
    made.site.runner.decode_registry.make_buffers()


def smaller_bucket(made: GraphSite) -> None:
    """Mutant: a batch replays in the bucket below its own."""
    policy = made.graphs.decode
    captured = dict(policy._captured)
    policy._captured[2] = captured[1]


def leftover(made: GraphSite) -> None:
    """Mutant: KV cell locations are not updated before a replay."""
    made.site.runner.decode_registry.input_buffer("out_cache_loc").post_fill = lambda view, batch, ctx: None


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("plant", [rebind, smaller_bucket, leftover])
def test_a_broken_runner_is_caught(plant: Callable[[GraphSite], None]) -> None:
    made = make_graph_site()
    plant(made)
    assert differs(made)


@pytest.mark.parametrize("mutant", [pad_nothing, count_padding, compute_before])
def test_a_broken_registry_is_caught(mutant: Any) -> None:
    """Every token also sees the mean of the real tokens, so that a wrong count changes the
    results."""
    sizes = (6, 1, 5, 3, 6)
    model = TinyModel(couples=True)
    plain, made = make_graph_site(model=model, poison=True), make_graph_site(model=model, poison=True)
    eager = make_site(model)
    wanted = decode(GraphSite(eager, made.graphs, made.capture, Streams()), sizes)
    mutant(made.site.runner.decode_registry)
    for (one, _), (other, _) in zip(decode(plain, sizes), wanted, strict=True):
        assert_close(one, other)
    try:
        found = decode(made, sizes)
    except IndexError:
        return
    assert not all(torch.allclose(a, b, atol=2e-5) for (a, _), (b, _) in zip(found, wanted, strict=True))


# -- capture
# --------------------------------------------------------------------------------------------------


def test_graphs_are_captured_large_to_small_in_one_pool_after_a_warm_up() -> None:
    told: list[tuple[int, int]] = []
    made = make_graph_site(progress=lambda done, total: told.append((done, total)))
    assert [batch.batch_size for batch in made.site.model.seen] == [6, 6, 4, 4, 2, 2, 1, 1]
    assert len(made.capture.segments) == 4 and made.capture.pools == 1
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_no_garbage_is_collected_inside_a_capture_and_the_collector_is_as_it_was() -> None:
    assert gc.isenabled()
    assert not make_graph_site().capture.collects
    assert gc.isenabled()


class Garbage:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.own = self


def test_garbage_is_collected_before_a_capture() -> None:
    with no_collection():
        held = weakref.ref(Garbage())
        made = make_graph_site()
        assert held() is None and not made.capture.collects


class Waiting(GatheredAttention):
    """Mutant: reads a length on the host inside the forward, which waits for the device."""

    def attend(self, q: Tensor, layer: Any, batch: ForwardBatch, plan: Any) -> Tensor:
        """Wait for a length."""
        batch.seq_lens[0].item()
        return super().attend(q, layer, batch, plan)


def test_a_host_read_inside_a_forward_fails_at_capture() -> None:
    with pytest.raises(RuntimeError, match="waits for the device inside a capture"):
        make_graph_site(attention=Waiting)
    assert gc.isenabled()


def test_an_empty_capture_is_an_error() -> None:
    capture = RecordingCapture()
    made = make_graph_site(capture=capture)
    kept = torch.zeros(1, 8)
    with pytest.raises(CaptureError, match="recorded nothing"), made.streams.running():
        made.graphs.backend.capture(lambda: kept)


def test_a_device_without_streams_is_refused() -> None:
    with pytest.raises(CaptureError, match="has_streams=False"):
        FullGraphs(RecordingCapture(), Streams())


def test_two_buckets_do_not_share_their_outputs() -> None:
    made = make_graph_site()
    outputs = [captured.step.output.data_ptr() for captured in made.graphs.decode._captured.values()]  # pyright: ignore[reportAttributeAccessIssue]
    assert len(set(outputs)) == 4


# -- the pool moves
# --------------------------------------------------------------------------------------------------


def test_a_moved_pool_is_refused_until_everything_is_captured_again() -> None:
    made = make_graph_site()
    made.site.cells.replace_storage()
    with pytest.raises(StalePlanError, match=r"generation 0 of the KV pool, it is now 1.*recapture\(\)"):
        decode(made, (2,))
    first = list(made.capture.segments)
    made.graphs.recapture()
    assert all(segment.is_reset for segment in first)
    assert made.capture.pools == 2
    assert not differs(made)


def test_close_frees_every_graph_and_steps_are_eager_from_then_on() -> None:
    made = make_graph_site()
    made.site.runner.close()
    assert all(segment.is_reset for segment in made.capture.segments) and not made.graphs.decode._captured
    assert [path for _, path in decode(made, (2,))] == ["eager"]


def test_a_graph_keeps_alive_all_that_it_baked_in() -> None:
    made = make_graph_site()
    graphs = made.graphs
    kept = [made.site.model, made.site.attention, made.site.cells, made.site.table, made.site.runner.decode_registry]
    alive = [weakref.ref(thing) for thing in kept]
    plan = graphs.decode._captured[2].plan
    assert isinstance(plan, AttentionPlan)
    captured = weakref.ref(plan.planner)
    del made, kept
    gc.collect()
    assert all(ref() is not None for ref in [*alive, captured])


# -- host updates of a replay
# ---------------------------------------------------------------------------------------------


class Telling(GatheredAttention):
    """Its graphs hold host values: `refresh` returns the lengths."""

    def refresh(self, plan: ReferencePlan, batch: ForwardBatch) -> Any:
        """The values that the segment must patch in."""
        return None if batch.seq_lens_cpu is None else tuple(batch.seq_lens_cpu.tolist())


def test_what_refresh_returns_reaches_the_segment_that_replays() -> None:
    made = make_graph_site(attention=Telling, buckets=(2, 4))
    decode(made, (2, 3, 1))
    four, two = made.capture.segments
    assert four.updates == [(3, 4, 4)]
    assert two.updates == [(2, 3), (4,)]


@pytest.mark.parametrize("needs", [True, False])
def test_a_batch_without_host_lengths_is_not_replayed_where_replays_need_them(needs: bool) -> None:
    made = make_graph_site(needs_host_lengths=needs)
    desk, runner = Desk(), made.site.runner
    with torch.inference_mode():
        runner.run_eager(runner.init_batch(desk.extend({1: [3, 4]})))
        batch = runner.init_batch(desk.decode(1))
        batch.seq_lens_cpu = None
        assert made.graphs.can_run(batch) is not needs
        batch.seq_lens_cpu = np.array([3], np.int32)
        assert made.graphs.can_run(batch)


# -- two runners
# --------------------------------------------------------------------------------------------------


def test_two_runners_nested_in_each_others_scopes_replay_their_own_graphs() -> None:
    target, draft = make_graph_site(model=TinyModel(1)), make_graph_site(model=TinyModel(2))
    with forward_context(ForwardContext(target.site.attention, None, target.site.model.attention_layers)):
        inner = decode(draft, (3, 1))
    with forward_context(ForwardContext(draft.site.attention, None, draft.site.model.attention_layers)):
        outer = decode(target, (3, 1))
    for made, found in ((draft, inner), (target, outer)):
        for (one, _), other in zip(found, expected(made.site.model, (3, 1)), strict=True):
            assert_close(one, other)
    assert not has_forward_context()


def test_a_capture_inside_another_runners_scope_bakes_in_its_own_pools() -> None:
    other = make_graph_site(model=TinyModel(1))
    with forward_context(ForwardContext(other.site.attention, None, other.site.model.attention_layers)):
        made = make_graph_site(model=TinyModel(2))
    other.site.cells.replace_storage()
    assert not differs(made)


def leaking(made: GraphSite, other: GraphSite) -> None:
    """Mutant: a captured forward uses the scope of another runner."""
    policy = made.graphs.decode
    policy._context = other.graphs._context
    made.graphs.recapture()


def test_a_context_that_leaks_between_runners_is_caught() -> None:
    made, other = make_graph_site(model=TinyModel(2)), make_graph_site(model=TinyModel(2))
    leaking(made, other)
    assert differs(made)


def test_the_policy_is_plain_without_buckets() -> None:
    made = make_graph_site(buckets=())
    assert isinstance(made.graphs.decode, DecodeGraphs)
    assert made.graphs.buckets == () and not made.capture.segments
