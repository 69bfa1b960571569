"""A batch run as two micro-batches gives the same result as the whole batch, for every cut and
stagger; planted defects are caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionPlan
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.forward_batch import ForwardBatch, StalePlanError
from sglcore.runtime.forward_context import forward_context, get_forward_context
from sglcore.runtime.overlap import micro_batches as module
from sglcore.runtime.overlap.interleave import pause
from sglcore.runtime.overlap.micro_batches import Halves
from sglcore.runtime.parallel.rank_groups import Groups
from sglcore.step.micro_batch_cut import CutTerms
from sglcore.worker.step_plan import StepPlan
from sglcore.worker.topology import Topology
from tests.checkpoints import llama, mistral, qwen3_moe, save
from tests.laws.halves import (
    BOUND,
    InFlight,
    StandIn,
    all_steps,
    difference,
    halves_of,
    in_halves,
    like,
    loaded,
    poisoned,
    stand_in_groups,
)
from tests.parallel.topologies import on_topology

PARTS = (0.0, 0.2, 0.5, 0.8, 1.0)
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: dict[str, Callable[[], Any]] = {
        "llama": lambda: llama(max_position_embeddings=128),
        "mistral": lambda: mistral(max_position_embeddings=128, sliding_window=6),
        "qwen3_moe": lambda: qwen3_moe(num_experts=8, max_position_embeddings=128),
    }
    return save(make[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with blocks that end in an asynchronous all-reduce."""
    return loaded(save(llama(max_position_embeddings=128), tmp_path_factory.mktemp("one")), stand_in_groups())


@pytest.mark.parametrize("stagger", [0, 1, 2])
def test_halves_give_what_the_whole_gives(folder: Path, stagger: int) -> None:
    groups = stand_in_groups()
    model = loaded(folder, groups)
    wanted = all_steps(poisoned(model))
    assert isinstance(groups.tp, StandIn)
    sums, groups.tp.sums = groups.tp.sums, 0
    for part in PARTS:
        assert difference(all_steps(in_halves(model, stagger, part)), wanted) <= BOUND
    assert groups.tp.sums == 2 * len(PARTS) * sums, "an empty half makes the same collectives"


def differences_on_ranks(groups: Groups, given: dict[str, Any]) -> list[float]:
    """Return the differences between micro-batches and the whole batch for every stagger and
    cut."""
    model = loaded(given["folder"], groups)
    wanted = all_steps(poisoned(model))
    return [difference(all_steps(in_halves(model, stagger, part)), wanted) for stagger in (0, 1, 2) for part in PARTS]


@pytest.mark.parametrize("topology", [Topology(2), Topology(2, 1, 2)], ids=["parts of experts", "whole experts"])
def test_halves_on_two_ranks_give_what_the_whole_gives(topology: Topology, tmp_path: Path) -> None:
    folder = save(qwen3_moe(num_experts=8, max_position_embeddings=128), tmp_path)
    for found in on_topology(topology, tmp_path, differences_on_ranks, folder=folder):
        assert not isinstance(found, str), found
        assert max(found) <= BOUND


# -- contexts, plans and markers
# ---------------------------------------------------------------------------------------


class Looks:
    """A model that records the forward context of each micro-batch, before and after it yields to
    the other."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any, ForwardBatch]] = []

    def __call__(self, batch: ForwardBatch) -> Tensor:
        for _ in range(3):
            context = get_forward_context()
            self.seen.append((context.attn_backend, context.batch, batch))
            pause()
        return torch.zeros(batch.num_tokens, 1)


def looked_at(one: Any, stagger: int) -> tuple[Looks, Halves]:
    steps, model = in_halves(one, stagger, 0.5), Looks()
    halves = halves_of(steps)
    batch = steps.runner.prepared(steps.staged({1: [3, 9, 4], 2: [8]}))
    halves.run(model, steps.runner.context(batch), batch, 2)
    return model, halves


@pytest.mark.parametrize("stagger", [0, 1, 2])
def test_get_forward_context_in_a_half_gives_that_halfs_own(one: Any, stagger: int) -> None:
    model, halves = looked_at(one, stagger)
    assert len(model.seen) == 6
    assert len({id(batch) for _, _, batch in model.seen}) == 2
    for backend, batch, given in model.seen:
        assert batch is given
        assert batch.plan_record is not None and batch.plan_record.planner is backend
    assert {id(backend) for backend, _, _ in model.seen} == {id(each) for each in halves.backends}


def test_a_marker_of_the_parent_is_none_of_its_halves(one: Any) -> None:
    steps = in_halves(one, 0, 0.5)
    halves, runner = halves_of(steps), steps.runner
    batch = runner.prepared(steps.staged({1: [3, 9, 4], 2: [8]}))
    batch.mark_forward_metadata_ready(runner.attn_backend.plan(batch))
    before = batch.plan_record
    for part, backend in zip(halves.parts(batch, 2), halves.backends, strict=True):
        assert part.plan_record is None and part.needs_forward_metadata_init(backend)
    with torch.inference_mode():
        runner.run_eager(batch)
    assert batch.plan_record is before


def test_one_backend_for_both_halves_is_refused(one: Any) -> None:
    backend = poisoned(one).runner.attn_backend
    with pytest.raises(ValueError, match="wanted one for each, with its own workspace"):
        Halves((backend, backend), halves_of(in_halves(one, 0, 0.5)).terms)


# -- planted defects
# --------------------------------------------------------------------------------------------------


class KeepsPlan(ReferenceAttention):
    """Has one workspace, as libraries have: attention reads the last plan."""

    kept: Any = None

    def plan(self, batch: ForwardBatch) -> Any:
        self.kept = super().plan(batch)
        return replace(self.kept)

    def attend(self, q: Tensor, layer: Any, batch: ForwardBatch, plan: AttentionPlan) -> Tensor:
        return super().attend(q, layer, batch, self.kept)


def with_workspaces(one: Any, stagger: int, is_shared: bool) -> list[Tensor]:
    steps = in_halves(one, stagger, 0.5)
    runner, halves = steps.runner, halves_of(steps)
    old = runner.attn_backend
    runner.attn_backend = KeepsPlan(old.shape, old.req_to_token_pool, old.token_to_kv_pool, old.kernels)
    halves.backends = (runner.attn_backend, runner.attn_backend if is_shared else like(runner.attn_backend))
    return all_steps(steps)


def test_a_workspace_that_both_halves_share_is_caught(one: Any) -> None:
    wanted = all_steps(poisoned(one))
    assert difference(with_workspaces(one, 1, is_shared=False), wanted) <= BOUND
    try:
        found = difference(with_workspaces(one, 1, is_shared=True), wanted)
    except (RuntimeError, IndexError):
        return  # shapes that do not fit
    assert found > BOUND


def prefix_not_advanced(patch: Patch) -> None:
    own = module.filter_batch

    def wrong(batch: ForwardBatch, first: int, last: int) -> ForwardBatch:
        child = own(batch, first, last)
        if first and batch.extend_prefix_lens_cpu is not None and child.extend_seq_lens is not None:
            rows = len(batch.extend_prefix_lens_cpu) - child.batch_size
            child.extend_prefix_lens = batch.extend_prefix_lens[rows:]  # pyright: ignore[reportOptionalSubscript]
            child.seq_lens = child.extend_prefix_lens + child.extend_seq_lens
            child.extend_prefix_lens_cpu = batch.extend_prefix_lens_cpu[rows:]
            child.seq_lens_cpu = child.seq_lens.numpy()
        return child

    patch.setattr(module, "filter_batch", wrong)


def second_before_first(patch: Patch) -> None:
    own = module.take_turns

    def wrong(first: Callable[[], Tensor], second: Callable[[], Tensor], stagger: int) -> tuple[Tensor, Tensor]:
        behind, ahead = own(second, first, stagger)
        return ahead, behind

    patch.setattr(module, "take_turns", wrong)


def merged_in_another_order(patch: Patch) -> None:
    own = module.take_turns
    patch.setattr(module, "take_turns", lambda *given: own(*given)[::-1])


def not_waited_for(patch: Patch) -> None:
    """Mutant: does not wait for collectives, so a micro-batch reads or frees a buffer that is still
    being written."""
    patch.setattr(InFlight, "wait", lambda self: None)


@pytest.mark.parametrize("plant", [prefix_not_advanced, second_before_first, merged_in_another_order, not_waited_for])
def test_a_defect_is_caught(plant: Callable[[Patch], None], one: Any, monkeypatch: Patch) -> None:
    wanted = all_steps(poisoned(one))
    plant(monkeypatch)
    assert difference(all_steps(in_halves(one, 0, 0.5)), wanted) > BOUND


def test_a_marker_that_leaks_into_a_half_is_caught(one: Any, monkeypatch: Patch) -> None:
    def run(self: Halves, model: Any, context: Any, batch: ForwardBatch, cut: int) -> Tensor:
        batch.mark_forward_metadata_ready(self.backends[0].plan(batch))
        parts = self.parts(batch, cut)
        for part in parts:
            part.plan_record = batch.plan_record
        return self.forward(model, context, parts)

    monkeypatch.setattr(Halves, "run", run)
    with pytest.raises(StalePlanError):
        all_steps(in_halves(one, 0, 0.5))


@pytest.fixture
def same_buffer(monkeypatch: Patch) -> Iterator[None]:
    """Mutant: both micro-batches use one buffer for the all-reduce."""
    buffers: dict[int, Tensor] = {}
    own = StandIn.all_reduce

    def wrong(self: StandIn, x: Tensor) -> Tensor:
        kept = buffers.setdefault(x.shape[1], x.new_empty(64, x.shape[1]))[: len(x)]
        kept.copy_(x)
        return own(self, kept).clone()

    monkeypatch.setattr(StandIn, "all_reduce", wrong)
    yield


def test_a_buffer_that_is_used_again_while_a_sum_is_under_way_is_caught(one: Any, same_buffer: None) -> None:
    wanted = all_steps(poisoned(one))
    try:
        found = difference(all_steps(in_halves(one, 0, 0.5)), wanted)
    except RuntimeError as error:
        assert "written while a sum was under way" in str(error)
        return
    assert found > BOUND


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_half_ends_the_other_and_leaves_no_context(one: Any, failing: int) -> None:
    ended: list[int] = []

    def model(batch: ForwardBatch) -> Tensor:
        number = int(batch.input_ids[0] == 8)
        try:
            pause()
            if number == failing:
                raise ValueError(f"half {number}")
            pause()
            return torch.zeros(batch.num_tokens, 1)
        finally:
            ended.append(number)

    steps = in_halves(one, 0, 0.5)
    halves = halves_of(steps)
    batch = steps.runner.prepared(steps.staged({1: [3, 9], 2: [8, 2]}))
    outer = steps.runner.context(batch)
    with forward_context(outer):
        with pytest.raises(ValueError, match=f"half {failing}"):
            halves.run(model, outer, batch, 2)
        assert get_forward_context() is outer
    assert sorted(ended) == [0, 1]


def decided(halves: Halves, plan: StepPlan) -> list[int | None]:
    """Return the cut that each DP shard takes from a plan."""
    shards = range(len(plan.global_num_tokens))
    return [halves.cut_of(ForwardBatch(step_plan=plan.of_shard(shard))) for shard in shards]  # pyright: ignore[reportCallIssue]


def test_all_shards_make_the_same_of_a_plan(one: Any) -> None:
    """Either every shard with rows cuts where the plan says, with two empty micro-batches on idle
    shards, or no shard cuts. By its own rows alone, a shard might decide differently."""
    backend = poisoned(one).runner.attn_backend
    halves = Halves((backend, like(backend)), CutTerms(least=8, least_decode=4))
    rng, outcomes = np.random.default_rng(3), set()
    for _ in range(2000):
        rows = tuple(int(each) for each in rng.integers(0, 20, 3))
        cuts = tuple(count // 2 for count in rows) if rng.random() < 0.8 else None
        plan = StepPlan(rows, cuts=cuts, is_decode=bool(rng.random() < 0.5))
        found = decided(halves, plan)
        least = 4 if plan.is_decode else 8
        should = cuts is not None and all(count == 0 or count >= least for count in rows)
        assert found == (list(cuts) if should and cuts is not None else [None] * 3)
        outcomes.add(should)
    assert outcomes == {True, False}
