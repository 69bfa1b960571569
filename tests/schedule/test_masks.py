"""Grammars in the schedule: a mask depends on all tokens of its row and on no others; requests
without a grammar keep their overlap."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from sglcore.schedule.batch_builder import BatchBuilder
from sglcore.schedule.request import Request, State
from sglcore.schedule.request_errors import RequestError
from sglcore.schedule.running_requests import RunningRequests
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.step_loop import Loop
from sglcore.schedule.token_masks import fill_along
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.schedule.drive import Drive
from tests.schedule.fake_worker import FakeMatcher
from tests.schedule.trace import Outcome, Trace, draw_trace, play, with_proposals

SEEDS = range(120)
REFUSED = (0, 2)
"""Numbers of tokens after which a grammar refuses the next one."""


def constrain(trace: Trace, rnd: Random) -> Trace:
    """The same trace, with a grammar for about half of its requests."""
    for _, request in trace.arrivals:
        if request.task == "generate" and rnd.random() < 0.5:
            request.matcher = FakeMatcher(request, rnd.choice([None, None, None, *REFUSED]))
    return trace


def play_seed(seed: int, plant: Callable[[Scheduler], None] | None = None) -> tuple[Outcome, list[Request]]:
    """Play a constrained trace to its end; return the outcome and the requests with a grammar."""
    rnd = Random(seed)
    trace = with_proposals(rnd, draw_trace(rnd), rnd.choice([0, 3]), grammars=0)
    trace = constrain(trace, Random(seed))
    constrained = [request for _, request in trace.arrivals if request.matcher is not None]
    return play(trace, plant), constrained


def test_whatever_happens_a_mask_is_made_of_all_tokens_of_its_own_row() -> None:
    seen = dict.fromkeys(("retractions", "refused", "ended", "overlapped"), 0)
    for seed in SEEDS:
        print("seed", seed)
        outcome, constrained = play_seed(seed)
        refused = [request for request in constrained if "planned to be refused" in request.error]
        seen["retractions"] += outcome.scheduler.stats().retractions > 0 and len(constrained) > 0
        seen["refused"] += len(refused)
        seen["ended"] += sum(request.finish_reason in ("stop", "length") for request in constrained)
        seen["overlapped"] += outcome.worker.most_in_flight > 1
        assert all(request.matcher is None for request in constrained)
        assert all(len(request.output_ids) in REFUSED for request in refused), "a token that was refused is taken"
    assert min(seen.values()) >= 5, seen


class PlansAhead(Scheduler):
    @property
    def awaits_tokens(self) -> bool:
        return False


class MasksOfTheStepBefore(BatchBuilder):
    def _add_masks(self, batch: ScheduleBatch) -> None:
        super()._add_masks(batch)
        before, self.before = self.__dict__.get("before"), batch.masks
        if before is not None and batch.masks is not None and before.shape == batch.masks.shape:
            batch.masks = before


class MasksOfOtherRows(BatchBuilder):
    def _add_masks(self, batch: ScheduleBatch) -> None:
        super()._add_masks(batch)
        if batch.masks is not None:
            batch.masks = np.roll(batch.masks, 1, axis=0)


class MasksOnlyDecodes(BatchBuilder):
    def _add_masks(self, batch: ScheduleBatch) -> None:
        if batch.forward_mode.is_decode:
            super()._add_masks(batch)


class ForgetsWhenRetracted(RunningRequests):
    def _retract(self, victim: Request) -> None:
        super()._retract(victim)
        if isinstance(victim.matcher, FakeMatcher):
            victim.matcher = FakeMatcher(victim, victim.matcher.refuse_after)


class AcceptsInPlainStepsOnly(Scheduler):
    def take_run(self, request: Request, *given: Any) -> Any:
        matcher, request.matcher = request.matcher, None
        output = super().take_run(request, *given)
        request.matcher = matcher if request.state is not State.FINISHED else None
        return output


MUTANTS: dict[str, Callable[[Scheduler], None]] = {
    "plans ahead": lambda scheduler: setattr(scheduler, "__class__", PlansAhead),
    "masks of the step before": lambda scheduler: setattr(scheduler._builder, "__class__", MasksOfTheStepBefore),
    "masks of other rows": lambda scheduler: setattr(scheduler._builder, "__class__", MasksOfOtherRows),
    "no masks for prompts": lambda scheduler: setattr(scheduler._builder, "__class__", MasksOnlyDecodes),
    "forgets when retracted": lambda scheduler: setattr(scheduler.running, "__class__", ForgetsWhenRetracted),
    "accepts in plain steps only": lambda scheduler: setattr(scheduler, "__class__", AcceptsInPlainStepsOnly),
}


@pytest.mark.parametrize("name", list(MUTANTS))
def test_the_traces_catch(name: str) -> None:
    with pytest.raises(AssertionError):
        for seed in SEEDS:
            play_seed(seed, MUTANTS[name])


def test_free_requests_alone_keep_a_step_in_flight_and_beside_a_grammar_there_is_one_at_a_time() -> None:
    drive = Drive()
    drive.add("free", 4, 30)
    in_flight = []
    for _ in range(5):
        drive.step()
        in_flight.append(len(drive.scheduler.in_flight))
    assert in_flight == [1] * 5 and drive.worker.most_in_flight == 2
    bound = drive.make("bound", 4, 4)
    bound.matcher = FakeMatcher(bound)
    drive.scheduler.add(bound)
    drive.worker.most_in_flight = 0
    drive.step(2)
    steps = drive.scheduler.stats().steps
    drive.step(3)
    assert drive.scheduler.stats().steps == steps + 3, "a step of the loop is a step of the device"
    assert drive.worker.most_in_flight <= 2
    drive.run()
    assert bound.output_ids == drive.alone(bound) and bound.finish_reason == "length"
    drive.add("after", 4, 30)
    drive.worker.most_in_flight = 0
    drive.step(4)
    assert drive.worker.most_in_flight == 2


def test_a_token_that_is_refused_ends_its_request_alone_and_is_not_taken() -> None:
    drive = Drive()
    other = drive.add("other", 5, 9)
    bound = drive.make("bound", 4, 9)
    bound.matcher = FakeMatcher(bound, refuse_after=3)
    drive.scheduler.add(bound)
    drive.run()
    assert (bound.finish_reason, bound.output_ids) == ("error", drive.alone(bound)[:3])
    assert "does not follow the grammar: it was planned to be refused" in bound.error
    assert (other.finish_reason, other.output_ids) == ("length", drive.alone(other))


def test_a_mask_that_can_not_be_made_is_the_reason_that_its_request_is_told() -> None:
    drive = Drive()
    bound = drive.make("bound", 4, 9)
    bound.matcher = FakeMatcher(bound, error="its parser gave up")
    drive.worker.bad_requests = {"bound"}
    drive.scheduler.add(bound)
    drive.run()
    assert (bound.finish_reason, bound.error) == ("error", "the grammar cannot go on: its parser gave up")


def test_the_stop_token_ends_a_request_without_asking_its_grammar() -> None:
    drive = Drive()
    bound = drive.stop_after(drive.make("bound", 4, 20), 5)
    bound.matcher = matcher = FakeMatcher(bound)
    drive.scheduler.add(bound)
    drive.run()
    assert bound.finish_reason == "stop" and matcher.emitted == bound.output_ids[:-1]


def test_a_worker_that_takes_no_masks_is_never_given_a_grammar() -> None:
    drive = Drive(takes_masks=False)
    bound = drive.make("bound", 4)
    bound.matcher = FakeMatcher(bound)
    with pytest.raises(RequestError, match="takes no masks"):
        drive.scheduler.add(bound)


def test_outputs_that_came_before_a_failed_submit_are_not_lost() -> None:
    drive = Drive()
    bound = drive.make("bound", 4, 9)
    bound.matcher = FakeMatcher(bound)
    drive.scheduler.add(bound)
    drive.step(2)
    taken = len(bound.output_ids)
    drive.worker.fail_submit = {drive.scheduler.stats().steps + 1}
    with pytest.raises(RuntimeError, match="planned failure"):
        drive.loop.step()
    outputs = drive.loop.drain()
    assert [len(output.token_ids) for output in outputs] == [1, 0] and len(bound.output_ids) == taken + 1
    assert isinstance(drive.loop, Loop) and outputs[-1].finish_reason == "error"


class GivesUpAfterTwo(FakeMatcher):
    """Can make no mask after two tokens."""

    def fill(self, words: np.ndarray) -> None:
        super().fill(words)
        words[:] = -1
        self.error = "it gave up" if len(self.emitted) > 2 else ""


def test_masks_go_along_proposals_up_to_the_first_that_can_not_be_made_and_leave_no_trace() -> None:
    bound = Drive().make("bound", 4, stop_ids=frozenset({9}))
    matcher = bound.matcher = GivesUpAfterTwo(bound)
    for drafts, count in (([1, 2, 3], 3), ([1, 9, 3], 2), ([-1, 2, 3], 1), ([5], 2), ([], 1)):
        bound.drafts = drafts
        assert fill_along(bound, np.zeros((4, 2), dtype=np.int32), []) == count
        assert (matcher.emitted, matcher.error) == ([], "")
