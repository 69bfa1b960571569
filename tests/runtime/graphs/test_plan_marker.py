"""The plan marker: code that plans attention ahead marks the batch, and a plan that does not fit
this forward is never used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionPlan, Bucket
from sglcore.runtime.attention.reference import ReferenceAttention, ReferencePlan
from sglcore.runtime.batch_split import filter_batch
from sglcore.runtime.forward_batch import ForwardBatch, StalePlanError, Turn
from sglcore.runtime.forward_context import ForwardContext, forward_context
from sglcore.runtime.model_runner import ModelRunner
from tests.runtime.tiny import Desk, Site, assert_close, make_site, random_tokens

PROMPT, OTHER = random_tokens(1, 4), random_tokens(2, 4)


class CountingAttention(ReferenceAttention):
    """Counts its plans."""

    plans = 0

    def plan(self, batch: ForwardBatch) -> ReferencePlan:
        """Count and plan."""
        self.plans += 1
        return super().plan(batch)


def ready(equivalent: bool = False, **options: Any) -> tuple[Site, ForwardBatch]:
    """A staged batch of two requests of four tokens each, planned ahead."""
    site = make_site(attention=CountingAttention, **options)
    batch = site.runner.init_batch(Desk().extend({1: PROMPT, 2: OTHER}))
    batch.mark_forward_metadata_ready(site.attention.plan(batch), replan_equivalent=equivalent)
    return site, batch


def test_a_fresh_batch_needs_planning() -> None:
    site = make_site()
    batch = site.runner.init_batch(Desk().extend({1: PROMPT}))
    assert batch.needs_forward_metadata_init(site.attention)


def test_a_marked_batch_needs_none_and_records_what_was_true() -> None:
    site, batch = ready()
    assert not batch.needs_forward_metadata_init(site.attention)
    record = batch.plan_record
    assert record is not None
    assert record.planner is record.plan.planner is site.attention
    assert (record.batch_size, record.num_tokens, record.generation) == (2, 8, 0)


def drift(site: Site, batch: ForwardBatch, kind: str) -> tuple[ForwardBatch, Any]:
    """The batch and its backend, after a change of `kind`."""
    if kind == "planner":
        return batch, make_site(attention=CountingAttention).attention
    if kind == "generation":
        site.cells.replace_storage()
        return batch, site.attention
    sizes = {"batch_size": {"batch_size": 4}, "tokens": {"num_tokens": 9}}[kind]
    return replace(batch, **sizes), site.attention  # pyright: ignore[reportArgumentType]


FOUND = {
    "planner": "planned by .*, about to run on",
    "generation": "planned over generation 0 of the KV pool, it is now 1",
    "batch_size": "planned for 2 requests and 8 tokens, the batch now has 4 and 8",
    "tokens": "planned for 2 requests and 8 tokens, the batch now has 2 and 9",
}


@pytest.mark.parametrize("kind", FOUND)
def test_a_plan_for_something_else_is_refused_and_the_error_names_both(kind: str) -> None:
    site, batch = ready()
    drifted, backend = drift(site, batch, kind)
    with pytest.raises(StalePlanError, match=f"{FOUND[kind]}.*; plan again before the forward"):
        drifted.needs_forward_metadata_init(backend)


def test_one_plan_serves_as_many_forwards_of_an_epoch_as_it_was_made_for() -> None:
    site, batch = ready()
    batch.turn = Turn(7, 0)
    batch.mark_forward_metadata_ready(site.attention.plan(batch), steps=3)
    turns = [replace(batch, turn=Turn(7, step)) for step in range(3)]
    assert not any(each.needs_forward_metadata_init(site.attention) for each in turns)
    with pytest.raises(StalePlanError, match="planned for 3 forwards, this is one more; plan again"):
        replace(batch, turn=Turn(7, 3)).needs_forward_metadata_init(site.attention)


@pytest.mark.parametrize("turn", [Turn(8, 0), None])
def test_a_plan_for_the_lengths_of_another_epoch_is_refused(turn: Turn | None) -> None:
    site, batch = ready()
    batch.turn = Turn(7, 0)
    batch.mark_forward_metadata_ready(site.attention.plan(batch), steps=3)
    of = "None" if turn is None else "8"
    with pytest.raises(StalePlanError, match=f"planned for the lengths of epoch 7, the batch has the lengths of {of}"):
        replace(batch, turn=turn).needs_forward_metadata_init(site.attention)


def test_a_plan_from_before_the_cells_moved_is_stale_though_it_is_marked_after() -> None:
    site = make_site(attention=CountingAttention)
    batch = site.runner.init_batch(Desk().extend({1: PROMPT, 2: OTHER}))
    plan = site.attention.plan(batch)
    site.cells.replace_storage()
    batch.mark_forward_metadata_ready(plan)
    with pytest.raises(StalePlanError, match=FOUND["generation"]):
        batch.needs_forward_metadata_init(site.attention)


@pytest.mark.parametrize("kind", FOUND)
def test_a_plan_declared_equivalent_is_made_again_instead(kind: str) -> None:
    site, batch = ready(equivalent=True)
    assert not batch.needs_forward_metadata_init(site.attention)
    drifted, backend = drift(site, batch, kind)
    assert drifted.needs_forward_metadata_init(backend)


def test_marking_again_records_the_sizes_of_now() -> None:
    site, batch = ready(equivalent=True)
    larger = replace(batch, batch_size=4)
    assert larger.needs_forward_metadata_init(site.attention)
    larger.mark_forward_metadata_ready(site.attention.plan(batch), replan_equivalent=True)
    assert not larger.needs_forward_metadata_init(site.attention)
    assert larger.plan_record is not None and larger.plan_record.batch_size == 4
    assert batch.plan_record is not None and batch.plan_record.batch_size == 2


@pytest.mark.parametrize("equivalent", [True, False])
def test_padding_after_planning_does_not_pass_unseen(equivalent: bool) -> None:
    site = make_site(attention=CountingAttention)
    desk = Desk()
    site.runner.run_eager(site.runner.init_batch(desk.extend({1: PROMPT, 2: OTHER})))
    batch = site.runner.init_batch(desk.decode(1, 2))
    batch.mark_forward_metadata_ready(site.attention.plan(batch), replan_equivalent=equivalent)
    padded = site.runner.decode_registry.extract_buffer(batch, 4, 4)
    if equivalent:
        assert padded.needs_forward_metadata_init(site.attention)
        return
    with pytest.raises(StalePlanError, match="planned for 2 requests and 2 tokens, the batch now has 4 and 4"):
        padded.needs_forward_metadata_init(site.attention)


@pytest.mark.parametrize("equivalent", [True, False])
def test_the_children_of_a_planned_batch_start_unmarked(equivalent: bool) -> None:
    site, batch = ready(equivalent)
    for first, last in ((0, 8), (0, 4), (2, 5), (8, 8)):
        child = filter_batch(batch, first, last)
        assert child.plan_record is None
        assert child.needs_forward_metadata_init(site.attention)
    assert not batch.needs_forward_metadata_init(site.attention)


def plans_of(runner: type[ModelRunner], kind: str | None = None) -> tuple[int, Tensor | None, Site]:
    """Run a forward of a batch with a plan, after a change of `kind`; return the number of new
    plans and the hidden states (None if the batch was refused)."""
    site, batch = ready(runner=runner)
    before = site.attention.plans  # pyright: ignore[reportAttributeAccessIssue]
    if kind is not None:
        batch, _ = drift(site, batch, kind)
    try:
        hidden = site.runner.run_eager(batch)
    except StalePlanError:
        hidden = None
    return site.attention.plans - before, hidden, site  # pyright: ignore[reportAttributeAccessIssue]


def test_the_runner_honours_a_plan_that_is_ready() -> None:
    again, hidden, site = plans_of(ModelRunner)
    assert again == 0
    assert hidden is not None
    assert_close(hidden, torch.cat([site.model.dense(PROMPT), site.model.dense(OTHER)]))


class DistrustfulRunner(ModelRunner):
    """Mutant: plans even if the batch is marked."""

    def run_eager(self, batch: ForwardBatch, *given: Any) -> Tensor:
        """Run the batch without its marker."""
        batch.plan_record = None
        return super().run_eager(batch, *given)


def test_a_runner_that_ignores_the_mark_is_caught() -> None:
    assert plans_of(DistrustfulRunner)[0] == 1


@pytest.mark.parametrize("kind", ["generation", "batch_size"])
def test_the_runner_refuses_a_stale_plan(kind: str) -> None:
    again, hidden, _ = plans_of(ModelRunner, kind)
    assert (again, hidden) == (0, None)


class TrustingRunner(ModelRunner):
    """Mutant: accepts any marker."""

    def run_eager(self, batch: ForwardBatch) -> Tensor:
        """Run the batch without checking what its plan was made for."""
        view = self.prepared(batch)
        if view.plan_record is None:
            view.mark_forward_metadata_ready(self.attn_backend.plan(view))
        with forward_context(ForwardContext(self.attn_backend, view, self._layers)):
            return self.model(view)


def test_a_runner_that_trusts_the_mark_is_caught() -> None:
    assert plans_of(TrustingRunner, "generation")[1] is not None


def test_a_plan_of_another_runners_backend_is_refused_by_this_one() -> None:
    site, batch = ready()
    draft = make_site(attention=CountingAttention)
    batch.mark_forward_metadata_ready(draft.attention.plan(batch))
    with pytest.raises(StalePlanError, match="planned by"):
        site.runner.run_eager(batch)


@pytest.mark.parametrize("kind", ["planner", "batch_size", "tokens"])
def test_attention_itself_refuses_a_plan_for_something_else(kind: str) -> None:
    site, batch = ready(equivalent=True)
    drifted, backend = drift(site, batch, kind)
    with pytest.raises(StalePlanError, match=f"attention of {FOUND[kind]}"):
        backend.forward(torch.zeros(8, 4), None, None, site.model.attention_layers[0], drifted)


def test_attention_itself_refuses_a_batch_without_a_plan() -> None:
    site, batch = ready()
    batch.plan_record = None
    for given in (batch, None):
        with pytest.raises(StalePlanError, match="found a batch without a plan"):
            site.attention.forward(torch.zeros(8, 4), None, None, site.model.attention_layers[0], given)


def test_an_equivalent_plan_is_made_again_by_the_runner_when_the_pool_moved() -> None:
    site, batch = ready(equivalent=True)
    site.cells.replace_storage()
    assert_close(site.runner.run_eager(batch)[:4], site.model.dense(PROMPT))
    assert batch.plan_record is not None and batch.plan_record.generation == 1


def test_a_plan_knows_its_planner_and_the_pool_it_was_made_over() -> None:
    site, batch = ready()
    site.cells.replace_storage()
    for plan in (site.attention.plan(batch), site.attention.capture_plan(Bucket(1, 1))):
        assert isinstance(plan, AttentionPlan)
        assert (plan.planner, plan.generation) == (site.attention, 1)
