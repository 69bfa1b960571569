"""With drafts, each forward attends by its own plan: made by its backend, for its size and lengths,
in this step. There is a named law for each place where a wrong plan was ever used, with a planted
defect that it catches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from sglcore.runtime import graph_runner
from sglcore.runtime.forward_batch import ForwardBatch, PlanRecord, StalePlanError
from sglcore.runtime.graphs import decode_graphs
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative import make_worker, mtp_drafts
from sglcore.runtime.speculative.chain_drafts import FeatureDrafter
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.runtime.speculative.frozen_drafts import FrozenDrafter
from sglcore.runtime.speculative.mtp_drafts import MultiHeadDrafter
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker
from tests.laws.engine import TokenEngine
from tests.laws.marks import Marks, watched_marks
from tests.laws.proposers import PROPOSERS, TOKENS, InFlight, Proposers, plain_fixture, proposers_fixture
from tests.laws.speculation import test_speculative_laws as laws
from tests.laws.speculation.texts import Ran, check_same
from tests.planted import planted

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.needs("graphs.native")
"""Independent of the device."""

proposers, plain = proposers_fixture(), plain_fixture()


@pytest.fixture
def marks(proposers: Proposers, plain: Ran, monkeypatch: Patch) -> Iterator[Marks]:
    """The marks of all runners from now on."""
    yield watched_marks(type(proposers.plain().worker.runner.attn_backend), monkeypatch)
    proposers.close()


def serve(proposers: Proposers, marks: Marks, plain: Ran, name: str, overlap: bool, graph: str = "off") -> TokenEngine:
    """Run all prompts in steps that overlap or wait; the texts equal those without draft tokens.
    Graphs exist for at most two requests."""
    engine = proposers.engine(name, overlap=overlap, graph=graph, graph_buckets=(1, 2))
    marks.watched = InFlight.of(engine)
    check_same(laws.run(engine), plain)
    assert marks.watched.most == 1 + overlap
    return engine


def drafter_of(engine: TokenEngine) -> Any:
    """Return the drafter of an engine."""
    worker: Any = engine.worker
    return worker.drafter


def check_eagle(proposers: Proposers, marks: Marks, plain: Ran, overlap: bool) -> None:
    """Each forward of the draft, and each of the target, has its own plan."""
    engine = serve(proposers, marks, plain, "eagle", overlap)
    draft, target = marks.plans_of(drafter_of(engine).runner), marks.plans_of(engine.worker.runner)
    assert not {*draft} & {*target} and [*range(1, marks.forwards + 1)] == sorted([*draft, *target])
    assert len(draft) > 2 * len(target)


def test_eagle_v1_in_steps_that_wait_marks_each_of_its_plans(proposers: Proposers, marks: Marks, plain: Ran) -> None:
    check_eagle(proposers, marks, plain, overlap=False)


def test_eagle_v2_in_steps_that_overlap_marks_each_of_its_plans(proposers: Proposers, marks: Marks, plain: Ran) -> None:
    check_eagle(proposers, marks, plain, overlap=True)


def test_each_layer_of_a_multi_layer_draft_marks_each_of_its_plans(
    proposers: Proposers, marks: Marks, plain: Ran
) -> None:
    engine = serve(proposers, marks, plain, "mtp of several layers", overlap=True)
    of_target = marks.plans_of(engine.worker.runner)
    # The layers share a backend and run one after the other: after each forward of the target, each
    # layer runs once.
    of_layers = marks.plans_of(drafter_of(engine).runners[0])
    assert [*range(1, marks.forwards + 1)] == sorted([*of_target, *of_layers])
    assert len(of_layers) >= TOKENS * len(of_target)


@pytest.mark.parametrize("graph", ["off", "native"])
def test_one_plan_of_frozen_kv_mtp_is_marked_for_as_many_forwards_as_it_serves(
    proposers: Proposers, marks: Marks, plain: Ran, graph: str
) -> None:
    """Also with graphs that are too small for all requests."""
    backend = drafter_of(serve(proposers, marks, plain, "frozen-mtp", True, graph)).runner.attn_backend
    turns: dict[int, set[int]] = {}
    plans: dict[int, set[int]] = {}
    for who, made, turn, _ in marks.attended:
        if who is backend and made.lengths:
            turns.setdefault(turn.epoch, set()).add(turn.step)
            plans.setdefault(turn.epoch, set()).add(id(made.plan))
    assert len(turns) > 5 and all(steps == {*range(TOKENS)} for steps in turns.values())
    assert all(len(each) == 1 for each in plans.values()) and len(set().union(*plans.values())) == len(plans)


def test_the_plan_stream_plans_a_step_while_the_one_before_runs(proposers: Proposers, marks: Marks, plain: Ran) -> None:
    engine = serve(proposers, marks, plain, "eagle", overlap=True)
    backend = engine.worker.runner.attn_backend
    decodes = [now for who, made, _, now in marks.attended if who is backend and made.size[0] == made.size[1]]
    assert decodes.count(2) > len(decodes) / 2


@pytest.mark.parametrize("proposer", [name for name in PROPOSERS if name not in ("ngram", "suffix")])
def test_capture_marks_the_batches_that_graphs_are_captured_with(
    proposers: Proposers, marks: Marks, plain: Ran, proposer: str
) -> None:
    engine = proposers.engine(proposer, graph="native", graph_buckets=(1, 2))
    captured = [made for _, made, *_ in marks.attended]
    assert captured and not any(made.lengths for made in captured)
    runners = [engine.worker.runner, *(vars(drafter_of(engine)).get("runners") or [drafter_of(engine).runner])]
    for runner in runners:
        assert runner.graphs is not None
        sizes = {made.size[0] for who, made, *_ in marks.attended if who is runner.attn_backend}
        assert sizes >= {*runner.graphs.buckets}
    check_same(laws.run(engine), plain)


@pytest.mark.parametrize("proposer", ["standalone", "eagle3", "mtp", "eagle, trees", "dflash"])
@pytest.mark.parametrize("overlap", [False, True])
def test_whatever_else_proposes_marks_its_plans(
    proposers: Proposers, marks: Marks, plain: Ran, proposer: str, overlap: bool
) -> None:
    engine = serve(proposers, marks, plain, proposer, overlap)
    assert len(marks.plans_of(drafter_of(engine).runner)) > 5


class KeepsTheTargetsPlan(FeatureDrafter):
    """Mutant: the first draft forward uses the target's plan."""

    def take_in(self, rows: DraftRows) -> Tensor:
        assert rows.features is not None
        given = {"input_ids": rows.ids, "features": self._project(rows.features)}
        return self.run(replace(rows.batch, **given)).index_select(0, rows.select)  # type: ignore[arg-type]


def record_of(runner: ModelRunner, batch: ForwardBatch) -> PlanRecord | None:
    """Return the plan record that a runner would set on the batch now."""
    view = replace(runner.prepared(batch))
    view.mark_forward_metadata_ready(runner.attn_backend.plan(view))
    return view.plan_record


class KeepsPlans(FeatureDrafter):
    """Mutant: a forward uses the plan of an earlier one with the same size; with `of_any_size`, of
    any earlier one."""

    of_any_size = False
    record: PlanRecord | None = None

    def run(self, batch: ForwardBatch) -> Tensor:
        known = self.record
        if known is not None and (
            self.of_any_size or (known.batch_size, known.num_tokens) == (batch.batch_size, batch.num_tokens)
        ):
            return super().run(replace(batch, plan_record=known))
        self.record = record_of(self.runner, batch)
        return super().run(batch)


class KeepsPlansOfAnySize(KeepsPlans):
    of_any_size = True


EAGLE_DEFECTS = [
    (KeepsTheTargetsPlan, StalePlanError, "planned by"),
    (KeepsPlansOfAnySize, StalePlanError, "planned for .* requests and .* tokens, the batch now has"),
    (KeepsPlans, AssertionError, "a plan for other lengths|a plan of a step before"),
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("defect", "error", "told"), EAGLE_DEFECTS, ids=lambda each: str(getattr(each, "__name__", ""))
)
def test_a_wrong_plan_of_eagle_is_caught(
    proposers: Proposers,
    marks: Marks,
    plain: Ran,
    overlap: bool,
    defect: Any,
    error: Any,
    told: str,
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr("sglcore.runtime.speculative.kinds.eagle_steps.FeatureDrafter", defect)
    with pytest.raises(error, match=told):
        check_eagle(proposers, marks, plain, overlap)


class FirstLayersPlans(MultiHeadDrafter):
    """Mutant: all layers but the first use the plan that the first layer had in the first step."""

    record: PlanRecord | None = None

    def _run(self, runner: ModelRunner, window: Any, depth: int, features: Tensor) -> Tensor:
        given = {"input_ids": self.ahead(window, depth), "features": features, "plan_record": None}
        batch = replace(window.batch, **given)
        if self.record is None:
            self.record = record_of(runner, batch)
        elif depth:
            batch.plan_record = self.record
        return runner.forward(batch)[0]


HEADS_DEFECTS: list[tuple[Callable[[], Any], Any, str]] = [
    (
        lambda: (
            planted(mtp_drafts, '"features": hidden, "plan_record": None, ', '"features": hidden, ').MultiHeadDrafter
        ),
        StalePlanError,
        "planned by",
    ),
    (
        lambda: FirstLayersPlans,
        (AssertionError, StalePlanError),
        "a plan for other lengths|a plan of a step|planned for",
    ),
]


@pytest.mark.parametrize(("defect", "error", "told"), HEADS_DEFECTS, ids=["another backend", "a step before"])
def test_a_wrong_plan_of_a_multi_layer_draft_is_caught(
    proposers: Proposers, marks: Marks, plain: Ran, defect: Any, error: Any, told: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("sglcore.runtime.speculative.kinds.mtp_steps.MultiHeadDrafter", defect())
    with pytest.raises(error, match=told):
        test_each_layer_of_a_multi_layer_draft_marks_each_of_its_plans(proposers, marks, plain)


class PlansElsewhere(FrozenDrafter):
    """Mutant: another backend makes the plan."""

    def planned(self, batch: ForwardBatch, steps: int) -> ForwardBatch:
        other = copy(self.runner.attn_backend)
        batch.mark_forward_metadata_ready(other.plan(self.runner.prepared(batch)), steps=steps)
        return batch


class PlansForOneMore(FrozenDrafter):
    """Mutant: the plan is for one row more."""

    def planned(self, batch: ForwardBatch, steps: int) -> ForwardBatch:
        found = super().planned(batch, steps)
        assert found.plan_record is not None
        return replace(found, plan_record=replace(found.plan_record, batch_size=found.batch_size + 1))


class PlansOfTheStepBefore(FrozenDrafter):
    kept: PlanRecord | None = None

    def planned(self, batch: ForwardBatch, steps: int) -> ForwardBatch:
        if self.kept is None:
            self.kept = super().planned(batch, steps).plan_record
        return replace(batch, plan_record=self.kept)


class PlansEachForward(FrozenDrafter):
    def following(self, batch: ForwardBatch, ids: Tensor, hidden: Tensor) -> ForwardBatch:
        return self.planned(super().following(batch, ids, hidden), self.tokens)


FROZEN_DEFECTS = [
    (PlansElsewhere, StalePlanError, "planned by"),
    (PlansForOneMore, StalePlanError, "planned for .* requests and .* tokens, the batch now has"),
    (PlansOfTheStepBefore, StalePlanError, "planned for the lengths of epoch 1, the batch has the lengths of 2"),
    (PlansEachForward, AssertionError, None),
]


@pytest.mark.parametrize(
    ("defect", "error", "told"), FROZEN_DEFECTS, ids=lambda each: str(getattr(each, "__name__", ""))
)
def test_a_wrong_plan_of_frozen_kv_mtp_is_caught(
    proposers: Proposers, marks: Marks, plain: Ran, defect: Any, error: Any, told: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("sglcore.runtime.speculative.kinds.frozen_mtp_steps.FrozenDrafter", defect)
    with pytest.raises(error, match=told):
        test_one_plan_of_frozen_kv_mtp_is_marked_for_as_many_forwards_as_it_serves(proposers, marks, plain, "off")


class PlansBeforeItsLengths(SpeculativeWorker):
    """Mutant: plans the next step at submission, by the lengths at that time."""

    def _place(self, staged: ForwardBatch, *given: Any) -> None:
        staged.mark_forward_metadata_ready(self.runner.attn_backend.plan(staged))
        super()._place(staged, *given)


class KeepsItsPlan(SpeculativeWorker):
    """Mutant: a step uses the plan of an earlier step with the same number of rows."""

    kept: PlanRecord | None = None

    def _place(self, staged: ForwardBatch, *given: Any) -> None:
        super()._place(staged, *given)
        if self.kept is not None and self.kept.batch_size == staged.batch_size:
            staged.plan_record = self.kept
        else:
            self.kept = record_of(self.runner, staged)


class PlansForTheDraft(SpeculativeWorker):
    def _place(self, staged: ForwardBatch, *given: Any) -> None:
        super()._place(staged, *given)
        drafter: Any = self.drafter
        staged.mark_forward_metadata_ready(drafter.runner.attn_backend.plan(staged))


class PlansForRequests(SpeculativeWorker):
    """Mutant: plans for one row per request instead of all verified rows."""

    def _place(self, staged: ForwardBatch, *given: Any) -> None:
        super()._place(staged, *given)
        requests = replace(staged, batch_size=staged.batch_size // (TOKENS + 1))
        requests.mark_forward_metadata_ready(self.runner.attn_backend.plan(staged))
        staged.plan_record = requests.plan_record


STREAM_DEFECTS = [
    (PlansBeforeItsLengths, AssertionError, "a plan for other lengths|a plan of a step before"),
    (KeepsItsPlan, AssertionError, "a plan for other lengths|a plan of a step before"),
    (PlansForTheDraft, StalePlanError, "planned by"),
    (PlansForRequests, StalePlanError, "planned for .* requests and .* tokens, the batch now has"),
]


@pytest.mark.parametrize(
    ("defect", "error", "told"), STREAM_DEFECTS, ids=lambda each: str(getattr(each, "__name__", ""))
)
def test_a_wrong_plan_of_the_next_step_is_caught(
    proposers: Proposers, marks: Marks, plain: Ran, defect: Any, error: Any, told: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(make_worker, "SpeculativeWorker", defect)
    with pytest.raises(error, match=told):
        test_the_plan_stream_plans_a_step_while_the_one_before_runs(proposers, marks, plain)


OWN = "attention.capture_plan(Bucket(size, size))"
CAPTURE_DEFECTS = [
    ("        batch.mark_forward_metadata_ready(plan)\n", "", StalePlanError, "found a batch without a plan"),
    (OWN, OWN.replace("(size, size)", "(1, 1)"), AssertionError, "a plan of another size"),
    (OWN, f"__import__('copy').copy({OWN[:9]}){OWN[9:]}", StalePlanError, "planned by"),
]


@pytest.mark.parametrize(
    ("sound", "defect", "error", "told"), CAPTURE_DEFECTS, ids=["unmarked", "another size", "another backend"]
)
@pytest.mark.parametrize("proposer", ["eagle", "mtp of several layers"])
def test_a_capture_by_a_wrong_plan_is_caught(
    proposers: Proposers,
    marks: Marks,
    plain: Ran,
    proposer: str,
    sound: str,
    defect: str,
    error: Any,
    told: str,
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(graph_runner, "DecodeGraphs", planted(decode_graphs, sound, defect).DecodeGraphs)
    with pytest.raises(error, match=told):
        test_capture_marks_the_batches_that_graphs_are_captured_with(proposers, marks, plain, proposer)
