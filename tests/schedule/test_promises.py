"""Promises that are kept: pages for running requests, pages with the content that they claim, and
prompt scores returned once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglcore.schedule.batch_builder import BatchBuilder
from sglcore.schedule.cache.request_pages import Memory
from sglcore.schedule.decode_rows import DecodeRows
from sglcore.schedule.request import Request
from sglcore.schedule.result_checks import take_prompt_logprobs
from sglcore.schedule.running_requests import RunningRequests
from tests.schedule.drive import Drive
from tests.schedule.fake_worker import compose, make_limits, make_scores

PROMPT = list(range(14))


def test_nobody_is_admitted_to_the_page_that_a_running_request_needs_next() -> None:
    drive = Drive(num_pages=16, page_size=4, max_batch_tokens=64, prefix_cache=False)
    drive.add("old", 7, 20)
    newcomer = drive.add("new", 56, 4)
    drive.run()
    assert drive.scheduler.stats().retractions == 0
    assert all(rids == ["old"] for rids in drive.worker.rids[:20])
    assert newcomer.finish_reason == "length"


def test_a_newcomer_that_leaves_a_page_for_who_runs_is_admitted() -> None:
    drive = Drive(num_pages=16, page_size=4, max_batch_tokens=64, prefix_cache=False)
    drive.add("old", 7, 20)
    drive.add("new", 52, 1)
    drive.run()
    assert drive.worker.rids[0] == ["old", "new"]


class GivesWay(RunningRequests):
    """Counts a preemption for every chunk of the old request."""

    def take_chunk(self, request: Request, budget: int) -> int:
        self.retractions += request.rid == "old"
        return super().take_chunk(request, budget)


@pytest.mark.parametrize(("kind", "together"), [(RunningRequests, True), (GivesWay, False)])
def test_nobody_is_admitted_in_a_step_in_which_somebody_gives_way(kind: type, together: bool) -> None:
    drive = Drive(max_batch_tokens=8)
    drive.scheduler.running.__class__ = kind
    drive.add("old", 12, 2)
    drive.add("new", 3, 2)
    drive.run()
    assert drive.worker.rids[0] == ["old"]
    assert (drive.worker.rids[1] == ["old", "new"]) is together


class NeverAsksAgain(Memory):
    """Mutant: publishing pages does not make a refused request eligible again."""

    def publish(self, request: Request, cells: int) -> None:
        version = self.version
        super().publish(request, cells)
        self.version = version


@pytest.mark.parametrize(("kind", "is_early"), [(Memory, True), (NeverAsksAgain, False)])
def test_who_was_refused_is_asked_again_when_pages_that_it_shares_are_there(kind: type, is_early: bool) -> None:
    drive = Drive(num_pages=16, page_size=4, max_batch_tokens=64)
    drive.scheduler.running.memory.__class__ = kind
    drive.add("old", [*range(40)], 20)
    drive.add("new", [*range(36), 1, 1], 2)
    drive.run()
    assert (drive.finishes()[0] == "new") is is_early


class Impatient(RunningRequests):
    """Mutant: does not count pages that steps in flight will return."""

    def _comes_back(self, count: int) -> bool:
        return False


SHORT_OF_PAGES = {"num_pages": 5, "max_model_len": 20}
SHORT_OF_WINDOWS = {"num_window_pages": 5, "window": 9, "max_batch_tokens": 3}
FEW_PAGES = (
    (SHORT_OF_PAGES, (("a", 4, 6), ("b", 2, 5), ("c", 2, 8))),
    (SHORT_OF_WINDOWS, (("a", 3, 7), ("b", 1, 5), ("c", 1, 8))),
)


@pytest.mark.parametrize(("kind", "retractions"), [(RunningRequests, 0), (Impatient, 1)])
@pytest.mark.parametrize(("limits", "requests"), FEW_PAGES, ids=["pages", "window pages"])
def test_nobody_is_retracted_for_pages_that_are_on_their_way_back(
    limits: dict[str, Any], requests: tuple[tuple[str, int, int], ...], kind: type, retractions: int
) -> None:
    drive = Drive(page_size=4, prefix_cache=False, **limits)
    drive.scheduler.running.__class__ = kind
    for rid, prompt, most in requests:
        drive.add(rid, prompt, most)
    drive.run()
    assert drive.scheduler.stats().retractions == retractions


class CountsAnew(RunningRequests):
    """Mutant: counts the cached tokens at each start anew."""

    def _start(self, request: Request) -> None:
        request.cached_tokens = -1
        super()._start(request)


@pytest.mark.parametrize(("kind", "is_first"), [(RunningRequests, True), (CountsAnew, False)])
def test_cached_tokens_are_those_of_the_first_start_though_the_request_is_retracted(kind: type, is_first: bool) -> None:
    drive = Drive(num_pages=16, page_size=4, max_batch_tokens=64)
    drive.scheduler.running.__class__ = kind
    drive.add("old", 7, 50)
    young = drive.add("young", 40, 20)
    drive.run()
    assert drive.scheduler.stats().retractions > 0
    assert (young.cached_tokens == 0) is is_first


def repeated(drive: Drive, prompt: list[int]) -> Request:
    """Run a second request with the prompt to its end; the worker checks its cached KV cells."""
    request = drive.add("again", prompt, 2)
    drive.run()
    assert request.output_ids == drive.alone(request)
    return request


def test_an_aborted_request_publishes_nothing_of_a_step_that_failed() -> None:
    drive = Drive()
    drive.worker.fail_collect = {1}
    drive.add("a", PROMPT)
    drive.step()
    drive.scheduler.abort("a")
    with pytest.raises(RuntimeError, match="planned failure"):
        drive.step()
    assert repeated(drive, PROMPT).cached_tokens == 0


def test_an_aborted_request_publishes_nothing_of_a_row_that_was_bad() -> None:
    drive = Drive()
    drive.worker.bad_requests = {"a"}
    drive.add("a", PROMPT)
    drive.step()
    drive.scheduler.abort("a")
    drive.step()
    assert repeated(drive, PROMPT).cached_tokens == 0


def test_an_aborted_request_publishes_what_its_last_step_wrote() -> None:
    drive = Drive()
    drive.add("a", PROMPT)
    drive.step()
    drive.scheduler.abort("a")
    drive.step()
    assert repeated(drive, PROMPT).cached_tokens == 12


def test_a_request_that_stopped_publishes_nothing_of_a_step_that_was_not_taken() -> None:
    drive = Drive()
    first = drive.stop_after(drive.make("a", 3, None), 1)
    drive.worker.fail_submit = {2}
    drive.scheduler.add(first)
    drive.step()
    with pytest.raises(RuntimeError, match="planned failure"):
        drive.step()
    drive.loop.drain()
    assert first.finish_reason == "stop"
    assert repeated(drive, [*first.prompt_ids.tolist(), *first.output_ids, 1, 2]).cached_tokens == 0


def test_prompt_scores_are_taken_once_though_the_request_is_retracted() -> None:
    drive = Drive(num_pages=16, page_size=4, max_batch_tokens=64, prefix_cache=False)
    drive.add("old", 7, 50)
    scored = drive.add("scored", 40, 20, prompt_logprobs=1)
    drive.run()
    assert drive.scheduler.stats().retractions > 0
    assert np.concatenate([-part.chosen for part in scored.prompt_logprobs]).tolist() == scored.prompt_ids[1:].tolist()
    assert sum(batch.prompt_logprobs is not None for batch in drive.worker.seen) == 1


def test_scores_of_a_chunk_that_were_taken_are_not_taken_again() -> None:
    request = Drive().make("a", 9, prompt_logprobs=0)
    for start, end in ((0, 4), (0, 4), (4, 9), (2, 9)):
        take_prompt_logprobs(request, make_scores(list(range(start + 1, end + 1)), 0), start, end)
    assert np.concatenate([-part.chosen for part in request.prompt_logprobs]).tolist() == list(range(1, 9))


def test_a_step_s_tokens_are_those_of_the_slots_whose_rows_emit() -> None:
    """A chunk that got too few pages precedes one that is complete."""
    builder, requests = BatchBuilder(make_limits(), compose, 0), [Drive().make("a", 9), Drive().make("b", 4)]
    for slot, request in enumerate(requests, start=2):
        request.run.slot, request.run.target, request.held.pages = slot, len(request.prompt_ids), [slot]
    batch = builder.build(1, DecodeRows(4), np.zeros(0, np.intp), [(request, 4) for request in requests], 0)
    assert batch.emits.tolist() == [False, True] and builder.slots.tolist() == [3]
