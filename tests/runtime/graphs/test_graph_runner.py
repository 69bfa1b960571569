"""Graphs by bucket: a replay equals the eager forward whatever the padding holds, and a stale graph
never runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.runtime.attention.contract import Bucket
from sglcore.runtime.attention.reference import ReferenceAttention, ReferencePlan
from sglcore.runtime.buffer_registry import BufferRegistry, FillContext
from sglcore.runtime.forward_batch import ForwardBatch, StalePlanError
from sglcore.runtime.forward_context import ForwardContext, forward_context, get_forward_context
from sglcore.runtime.graph_runner import GraphRunner
from sglcore.step.batch_field import keep
from sglcore.step.forward_inputs import NgramEmbeddingInfo
from tests.runtime.test_model_runner import on_the_device
from tests.runtime.tiny import (
    HIDDEN,
    SHARED,
    STAGED,
    Desk,
    RecordedGraphs,
    Site,
    TinyModel,
    assert_close,
    make_site,
    random_tokens,
)

BUCKETS = (1, 2, 4, 6)
LARGE_SMALL_LARGE = (6, 1, 5, 2, 4, 3, 6, 1, 6)
Prepare = Callable[[BufferRegistry], None]


def steps(site: Site, sizes: Sequence[int]) -> list[tuple[Tensor, str]]:
    """Decode steps of the first `size` of six requests, each step with new last tokens."""
    desk = Desk(2)
    for slot in range(1, 7):
        prompt = random_tokens(slot, slot)
        site.runner.run_eager(site.runner.init_batch(desk.extend({slot: prompt})))
    results = []
    for step, size in enumerate(sizes):
        site.tokens.last[1:7] = torch.tensor(random_tokens(100 + step, 6), dtype=torch.int32)
        hidden, path = site.runner.forward(site.runner.init_batch(desk.decode(*range(1, size + 1))))
        results.append((hidden.clone(), path))  # a graph overwrites its output
    return results


def differs(sizes: Sequence[int], poison: bool, facts: Any = SHARED, prepare: Prepare | None = None) -> bool:
    """Whether replays differ from eager forwards of the same steps."""
    model = TinyModel(couples=True)
    eager = steps(make_site(model), sizes)
    site = make_site(model, buckets=BUCKETS, poison=poison, facts=facts)
    if prepare is not None:
        prepare(site.runner.decode_registry)
    try:
        replayed = steps(site, sizes)
    except IndexError:
        return True
    assert all(path.startswith("recorded:") for _, path in replayed)
    assert all(hidden.shape == (size, HIDDEN) for (hidden, _), size in zip(replayed, sizes, strict=True))
    return not all(torch.allclose(one, other, atol=2e-5) for (one, _), (other, _) in zip(eager, replayed, strict=True))


@pytest.mark.parametrize("facts", [SHARED, STAGED], ids=["shared", "staged"])
@pytest.mark.parametrize("poison", [False, True], ids=["clean", "poisoned"])
@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (4,), (5,), (6,), LARGE_SMALL_LARGE], ids=str)
def test_a_replay_equals_the_eager_forward(sizes: tuple[int, ...], poison: bool, facts: Any) -> None:
    assert not differs(sizes, poison, facts)


def pad_nothing(registry: BufferRegistry) -> None:
    """Mutant: no buffer pads its tail."""
    for name in registry.names:
        buffer = registry.input_buffer(name)
        buffer.spec = replace(buffer.spec, padding=keep())


def count_padding(registry: BufferRegistry) -> None:
    """Mutant: padding tokens count as real."""

    def count(view: torch.Tensor, batch: ForwardBatch, ctx: FillContext) -> None:
        view.fill_(ctx.padded_num_tokens)

    registry.input_buffer("num_token_non_padded").post_fill = count


def compute_before(registry: BufferRegistry) -> None:
    """Mutant: KV cell locations stay those of the step before."""
    registry.input_buffer("out_cache_loc").post_fill = lambda view, batch, ctx: None


@pytest.mark.parametrize("mutant", [pad_nothing, count_padding, compute_before])
def test_a_broken_registry_is_caught(mutant: Prepare) -> None:
    assert differs(LARGE_SMALL_LARGE, poison=True, prepare=mutant)


def test_without_poison_a_registry_that_does_not_pad_may_go_unseen() -> None:
    # The reason for poison in the test above: leftovers of an older batch are usually harmless.
    assert not differs((6, 6), poison=False, prepare=pad_nothing)


def test_the_path_names_the_mechanism_and_the_smallest_bucket_that_holds_the_batch() -> None:
    paths = [path for _, path in steps(make_site(buckets=BUCKETS), (1, 2, 3, 4, 5, 6))]
    assert paths == ["recorded:1", "recorded:2", "recorded:4", "recorded:4", "recorded:6", "recorded:6"]


def test_a_batch_larger_than_every_bucket_runs_eagerly() -> None:
    model = TinyModel()
    small, eager = steps(make_site(model, buckets=(2,)), (3, 2)), steps(make_site(model), (3, 2))
    assert [path for _, path in small] == ["eager", "recorded:2"]
    for (one, _), (other, _) in zip(small, eager, strict=True):
        assert_close(one, other)


def graphs_of(site: Site) -> GraphRunner:
    """The site's graph runner."""
    assert site.runner.graphs is not None
    return site.runner.graphs


def test_buckets_are_sorted_distinct_and_fit_the_registry() -> None:
    graphs = graphs_of(make_site(buckets=(4, 1, 4, 16, 8, 2), max_bs=8))
    assert graphs.buckets == (1, 2, 4, 8)
    assert [graphs.decode.bucket_for(size) for size in (0, 1, 3, 8, 9)] == [None, 1, 4, 8, None]


def capture(
    site: Site, graphs: RecordedGraphs, progress: Callable[[int, int], None] | None = None, buckets: Any = BUCKETS
) -> GraphRunner:
    """A graph runner of a site, made by hand."""
    context = ForwardContext(site.attention, None, site.model.attention_layers)
    return GraphRunner(graphs, site.runner.decode_registry, context, site.model, buckets, progress)


def test_the_largest_bucket_is_captured_first_and_progress_is_told() -> None:
    site = make_site()
    told: list[tuple[int, int]] = []
    capture(site, RecordedGraphs(), lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [batch.batch_size for batch in site.model.seen] == [6, 4, 2, 1]
    assert [batch.num_tokens for batch in site.model.seen] == [6, 4, 2, 1]


def test_captured_batches_are_views_of_the_static_buffers() -> None:
    site = make_site(buckets=BUCKETS)
    registry = site.runner.decode_registry
    for batch in site.model.seen:
        for name in ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "num_token_non_padded"):
            buffer, view = registry.input_buffer(name).tensor, getattr(batch, name)
            assert view.data_ptr() == buffer.data_ptr()


def writes_inputs(prepare: Callable[[Site], Callable[[ForwardBatch], Tensor]]) -> bool:
    """Whether replaying a captured step writes to any input buffer, as staging inside a capture
    would."""
    site = make_site(facts=STAGED)
    graphs, registry = RecordedGraphs(), site.runner.decode_registry
    context = ForwardContext(site.attention, None, site.model.attention_layers)
    GraphRunner(graphs, registry, context, prepare(site), (2,))
    buffers = [registry.input_buffer(name).tensor for name in registry.names]
    before = [buffer._version for buffer in buffers]
    with forward_context(replace(context, batch=site.model.seen[-1])):
        graphs.steps[0].replay(None)
    return before != [buffer._version for buffer in buffers]


def staging_forward(site: Site) -> Callable[[ForwardBatch], Tensor]:
    """Mutant: the inputs are sent in the middle of the captured forward."""

    def forward(batch: ForwardBatch) -> Tensor:
        site.runner.decode_registry.commit()
        site.runner.decode_registry.fill_from(batch, FillContext(0, 2, 0, 2))
        return site.model(batch)

    return forward


def test_a_captured_step_holds_no_staging() -> None:
    assert not writes_inputs(lambda site: site.model)
    assert writes_inputs(staging_forward)


def test_addresses_are_fixed_from_the_first_capture_on() -> None:
    site = make_site(buckets=BUCKETS)
    with pytest.raises(ValueError, match="that captured graphs hold addresses of"):
        site.runner.decode_registry.ensure(9, 9)


def test_a_graph_of_a_pool_that_moved_is_refused_before_it_replays() -> None:
    site = make_site(buckets=BUCKETS)
    desk = Desk()
    batch = site.runner.init_batch(desk.extend({1: [3, 4]}))
    site.runner.run_eager(batch)
    staged = site.runner.init_batch(desk.decode(1))
    site.cells.replace_storage()
    runs = len(site.model.seen)
    with pytest.raises(
        StalePlanError, match="bucket 1 was captured over generation 0 of the KV pool, it is now 1; capture"
    ):
        site.runner.forward(staged)
    assert len(site.model.seen) == runs


@pytest.mark.parametrize("equivalent", [True, False])
def test_a_plan_of_another_backend_is_not_silently_replaced_by_the_graphs_own(equivalent: bool) -> None:
    site, desk, draft = make_site(buckets=BUCKETS), Desk(), make_site()
    site.runner.run_eager(site.runner.init_batch(desk.extend({1: [3, 4]})))
    batch = site.runner.init_batch(desk.decode(1))
    batch.mark_forward_metadata_ready(draft.attention.plan(batch), replan_equivalent=equivalent)
    if equivalent:
        assert site.runner.forward(batch)[1] == "recorded:1"
        return
    with pytest.raises(StalePlanError, match="planned by"):
        site.runner.forward(batch)


class TellingAttention(ReferenceAttention):
    """Records its calls, and passes the lengths to each graph, as a device with host values in its
    graphs needs."""

    calls: tuple[str, ...] = ()
    plans: tuple[ReferencePlan, ...] = ()

    def plan(self, batch: ForwardBatch) -> ReferencePlan:
        """Record the call."""
        self.calls += ("plan",)
        return super().plan(batch)

    def capture_plan(self, bucket: Bucket) -> ReferencePlan:
        """Record the call."""
        self.calls += (f"capture {bucket.batch_size}",)
        return super().capture_plan(bucket)

    def refresh(self, plan: ReferencePlan, batch: ForwardBatch) -> Any:
        """Record the call; return the host values for the graph."""
        self.calls += ("refresh",)
        self.plans += (plan,)
        super().refresh(plan, batch)
        return None if batch.seq_lens_cpu is None else tuple(batch.seq_lens_cpu.tolist())


def test_a_captured_plan_is_refreshed_and_never_made_again() -> None:
    site = make_site(buckets=(1, 2), attention=TellingAttention)
    backend = site.attention
    assert isinstance(backend, TellingAttention)
    assert backend.calls == ("capture 2", "refresh", "capture 1", "refresh")
    backend.calls = ()
    steps(site, (2, 1, 2))
    assert backend.calls == ("plan",) * 6 + ("refresh",) * 3
    two, one = backend.plans[:2]
    assert backend.plans[2:] == (two, one, two)


def test_what_refresh_returns_reaches_the_graph_that_replays() -> None:
    site = make_site(buckets=(2, 4), attention=TellingAttention)
    steps(site, (2, 3, 1))
    assert site.graphs is not None
    four, two = site.graphs.steps
    assert four.updates == [(3, 4, 4)]
    assert two.updates == [(2, 3), (4,)]


def test_a_replay_runs_under_the_runners_own_context_with_the_captured_batch() -> None:
    seen: list[ForwardContext] = []

    class Watching(TinyModel):
        def __call__(self, batch: ForwardBatch) -> Tensor:
            seen.append(get_forward_context())
            return super().__call__(batch)

    site = make_site(Watching(), buckets=(2,))
    steps(site, (2,))
    assert seen[-1].attn_backend is site.attention
    assert seen[-1].batch is seen[0].batch
    assert seen[-1].layers == site.model.attention_layers


OTHERS = {
    "mrope_positions": lambda: torch.zeros(3, 1, dtype=torch.int32),
    "input_embeds": lambda: torch.zeros(1, HIDDEN),
    "ngram_embedding_info": NgramEmbeddingInfo,
    "spec_info": NgramEmbeddingInfo,
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_batch_with_an_input_that_the_graphs_do_not_read_runs_eagerly(name: str) -> None:
    site, desk = make_site(buckets=(1,)), Desk()
    site.runner.run_eager(site.runner.init_batch(desk.extend({1: [3, 4]})))
    batch = site.runner.init_batch(desk.decode(1))
    assert graphs_of(site).can_run(batch)
    setattr(batch, name, OTHERS[name]())
    assert not graphs_of(site).can_run(batch)
    assert site.runner.forward(batch)[1] == f"eager:{name}"


def test_a_decode_with_three_axes_of_positions_is_not_replayed_without_them() -> None:
    site, desk = make_site(buckets=(1,)), Desk()
    site.runner.run_eager(site.runner.init_batch(desk.extend({1: [3, 4]})))
    batch = site.runner.init_batch(desk.decode(1, mrope_positions=np.full((3, 1), 2, dtype=np.int32)))
    assert site.runner.forward(batch)[1] == "eager:mrope_positions"


def test_a_batch_that_lies_elsewhere_is_copied_into_the_buffers_and_replayed() -> None:
    model = TinyModel()
    site, desk = make_site(model, buckets=(4,)), Desk()
    prompts = {slot: random_tokens(slot, slot + 1) for slot in (1, 2, 3)}
    site.runner.run_eager(site.runner.init_batch(desk.extend(prompts)))
    site.tokens.last[1:4] = torch.tensor([5, 6, 7])
    mine = on_the_device(site.runner.init_batch(desk.decode(1, 2, 3)))
    site.runner.decode_registry.poison()
    hidden, path = site.runner.forward(mine)
    assert path == "recorded:4"
    wanted = [model.dense([*prompts[slot], token])[-1] for slot, token in ((1, 5), (2, 6), (3, 7))]
    assert_close(hidden, torch.stack(wanted))


def test_the_graph_runner_keeps_alive_all_that_its_graphs_use() -> None:
    site = make_site(buckets=(1, 2))
    graphs = graphs_of(site)
    things = [site.model, site.attention, site.cells, site.table, site.runner.decode_registry]
    buffer = site.runner.decode_registry.input_buffer("input_ids").tensor
    alive = [weakref.ref(thing) for thing in [*things, buffer]]
    del site, things, buffer
    gc.collect()
    assert all(ref() is not None for ref in alive)
    graphs.close()
    del graphs
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_after_close_the_mechanism_is_closed_and_every_batch_is_eager() -> None:
    site, desk = make_site(buckets=(1, 2)), Desk()
    site.runner.run_eager(site.runner.init_batch(desk.extend({1: [3, 4]})))
    site.worker.close()
    site.worker.close()
    assert site.graphs is not None and site.graphs.closed == 1
    assert site.runner.forward(site.runner.init_batch(desk.decode(1)))[1] == "eager"


def test_no_buckets_is_a_runner_that_runs_nothing() -> None:
    site = make_site()
    graphs = capture(site, RecordedGraphs(), buckets=())
    assert graphs.buckets == ()
    assert graphs.decode.bucket_for(1) is None


def test_two_graph_runners_of_one_process_replay_their_own_graphs() -> None:
    sites = [make_site(TinyModel(seed), buckets=(2, 4)) for seed in (1, 2)]
    plain = [make_site(site.model) for site in sites]
    for site, eager in zip(sites, plain, strict=True):
        for (one, _), (other, _) in zip(steps(site, (3, 1)), steps(eager, (3, 1)), strict=True):
            assert_close(one, other)
