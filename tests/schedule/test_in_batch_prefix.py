"""A common prefix of prompts that arrive together is computed once. No request waits for a short
prefix, or for a request that no longer computes one."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from sglcore.schedule.cache import in_batch_prefix
from sglcore.schedule.cache.in_batch_prefix import Awaited
from sglcore.schedule.request import Request
from sglcore.schedule.running_requests import MOST_PASSED_OVER, RunningRequests
from tests.schedule.drive import Drive
from tests.schedule.trace import draw_trace, play

COMMON = [(3 * index) % 5 for index in range(96)]


def wide(**given: Any) -> Drive:
    return Drive(
        **{"max_model_len": 256, "num_pages": 200, "page_size": 4, "max_batch_tokens": 400, "max_requests": 8, **given}
    )


def add_alike(drive: Drive, count: int, common: list[int] = COMMON, own: int = 9) -> list[Request]:
    """Requests with the prefix `common` and `own` tokens of their own."""
    return [drive.add(f"r{index}", [*common, index % 5, *([index % 3] * (own - 1))], 3) for index in range(count)]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_common_prefix_is_computed_once(overlap: bool) -> None:
    drive = wide(overlap=overlap)
    requests = add_alike(drive, 5)
    drive.run()
    assert [request.cached_tokens for request in requests] == [0, 96, 96, 96, 96]
    assert all(request.output_ids == drive.alone(request) for request in requests)
    assert drive.scheduler.stats().computed_prompt_tokens == 105 + 4 * 9


def test_without_a_cache_nobody_waits() -> None:
    drive = wide(prefix_cache=False, max_batch_tokens=1000)
    add_alike(drive, 5)
    drive.step()
    assert len(drive.worker.rids[0]) == 5
    drive.run()


@pytest.mark.parametrize(
    ("common", "own", "together"), [(60, 9, True), (64, 9, False), (64, 250, True), (96, 250, False)]
)
def test_who_would_save_little_does_not_wait(common: int, own: int, together: bool) -> None:
    drive = wide(max_model_len=512, max_batch_tokens=2000, num_pages=400)
    add_alike(drive, 2, (COMMON * 2)[:common], own)
    drive.step()
    assert (len(drive.worker.rids[0]) == 2) == together
    drive.run()


def test_of_several_that_run_the_one_with_the_longest_common_beginning_is_waited_for() -> None:
    drive = wide()
    running = [drive.add(f"r{first}", [first, *COMMON], 3) for first in range(3)]
    waiting = drive.add("w", [1, *COMMON, 1, 1], 3)
    drive.step()
    awaited = drive.awaited(waiting)
    assert awaited is not None and awaited.request is running[1]
    drive.run()


def test_what_is_cached_already_is_no_part_of_what_waiting_must_save() -> None:
    drive = wide(max_model_len=900, max_batch_tokens=2000, num_pages=800)
    cached = [index % 3 for index in range(400)]
    drive.add("before", cached, 1)
    drive.run()
    first, second = add_alike(drive, 2, [*cached, *COMMON[:64]], 180)
    drive.step()
    assert drive.awaited(second) == Awaited(first, 464 // 4)
    drive.run()


def test_who_waits_starts_when_the_common_part_is_there_not_the_rest() -> None:
    drive = wide(max_batch_tokens=100)
    drive.add("a", COMMON + [1] * 140, 2)
    second = drive.add("b", [*COMMON, 0, 0], 2)
    drive.run()
    assert drive.worker.rids[:3] == [["a"], ["a"], ["a", "b"]]
    assert second.cached_tokens == 96


@pytest.mark.parametrize(("common", "pages"), [(64, 16), (67, 16), (68, 17), (96, 24)])
def test_who_waits_waits_for_every_common_page_and_for_none_besides(common: int, pages: int) -> None:
    drive = wide()
    first = drive.add("a", COMMON[:common] + [6] * 9, 9)
    second = drive.add("b", COMMON[:common] + [7] * 9, 2)
    drive.step()
    assert drive.awaited(second) == Awaited(first, pages)
    must_wait = drive.scheduler.running._in_batch_prefixes.must_wait
    for shared, waits in ((pages - 1, True), (pages, False)):
        first.held.shared = shared
        assert must_wait(second) is waits
    first.held.shared = 0
    drive.run()
    assert second.cached_tokens == 4 * pages


@pytest.mark.parametrize(("lookahead", "own", "pages"), [(0, 9, 17), (0, 0, 16), (1, 9, 16), (1, 0, 16)])
def test_who_waits_does_not_wait_for_a_page_that_would_not_be_taken(lookahead: int, own: int, pages: int) -> None:
    """A request always computes its last token itself; with lookahead, a page's key includes the
    tokens after it."""
    drive = wide(lookahead=lookahead)
    first = drive.add("a", COMMON[:68] + [6] * 30, 9)
    second = drive.add("b", COMMON[:68] + [0] * own, 2)
    drive.step()
    assert drive.awaited(second) == Awaited(first, pages)
    drive.run()
    assert second.cached_tokens == 4 * pages


def test_of_several_who_compute_the_same_the_first_is_waited_for() -> None:
    drive = wide(max_batch_tokens=240)
    first = drive.add("a", [*COMMON, 0, 0], 9)
    drive.add("scores", [*COMMON, 1, 1], 9, prompt_logprobs=0)
    third = drive.add("b", [*COMMON, 2, 2], 2)
    drive.step()
    assert drive.worker.rids[0] == ["a", "scores"]
    assert drive.awaited(third) == Awaited(first, 24)
    drive.run()


def test_a_request_of_one_token_is_waited_for_until_its_step_is_collected() -> None:
    drive = wide()
    requests = [drive.add(f"r{index}", [*COMMON, index, 1, 1], 1) for index in range(4)]
    drive.run()
    assert [request.cached_tokens for request in requests] == [0, 96, 96, 96]


def test_nobody_waits_for_who_publishes_nothing_more() -> None:
    """Two requests that share a page compute it twice. While the first runs, the second one's later
    pages are not published."""
    drive = wide(max_batch_tokens=60, max_model_len=700, num_pages=800)
    page, alike = COMMON[:8], [2 + index % 3 for index in range(400)]
    for rid, rest, most in (("first", [1] * 20, 30), ("duplicate", alike, 1), ("third", [*alike, 0], 3)):
        drive.add(rid, page + rest, most)
    drive.step(12)
    assert any({"duplicate", "third"} <= set(rids) for rids in drive.worker.rids)
    drive.run()


class KeepsAwaitedAtStart(RunningRequests):
    """Mutant: a running request keeps naming the request that it waited for."""

    def _start(self, request: Request) -> None:
        awaited = dict(self._in_batch_prefixes._awaited)
        super()._start(request)
        self._in_batch_prefixes._awaited |= awaited


class KeepsAwaitedAtEnd(RunningRequests):
    """Mutant: so does an aborted request."""

    def forget(self, request: Request) -> None:
        """Do nothing."""


@pytest.mark.parametrize("mutant", [None, KeepsAwaitedAtStart, KeepsAwaitedAtEnd])
def test_who_runs_or_has_ended_waits_for_nobody(mutant: type | None) -> None:
    drive = wide()
    if mutant is not None:
        drive.scheduler.running.__class__ = mutant
    _, starts, ends = add_alike(drive, 3)
    drive.step()
    assert drive.awaited(starts) and drive.awaited(ends)
    drive.scheduler.abort(ends.rid)
    if mutant is not None:
        with pytest.raises(AssertionError, match="still wait for a common prefix"):
            drive.step(2)
        return
    drive.step(2)
    assert drive.awaited(starts) is drive.awaited(ends) is None
    drive.run()
    assert not drive.scheduler.running._in_batch_prefixes._compared


def test_who_starts_anew_is_no_duplicate_any_more() -> None:
    drive = wide()
    first, second = add_alike(drive, 2)
    first.held.is_duplicate = True
    drive.step()
    assert not first.held.is_duplicate and drive.awaited(second) == Awaited(first, 24)
    drive.run()


def test_who_is_passed_over_keeps_its_slot() -> None:
    drive = wide(max_requests=3)
    add_alike(drive, 2)
    for index in range(2):
        drive.add(f"other{index}", 10, 100)
    drive.run()
    assert next(step for step, rids in enumerate(drive.worker.rids) if "r1" in rids) <= 2
    assert drive.worker.rids[0] == ["r0", "other0"]


def test_who_is_passed_over_keeps_its_pages() -> None:
    drive = wide(max_requests=8, num_pages=64)
    drive.add("first", [*COMMON, 0, 0], 3)
    drive.add("second", [*COMMON, 1, *[2] * 79], 3)
    drive.add("large", 100, 60)
    drive.step()
    assert drive.worker.rids[0] == ["first"], "the pages that are left are the second's"
    drive.run()
    assert drive.finishes()[-1] == "large"


def test_planning_does_not_grow_with_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    drive, asked = wide(max_requests=100, max_batch_tokens=2000, num_pages=3000), []
    must_wait = in_batch_prefix.InBatchPrefixes.must_wait
    monkeypatch.setattr(
        in_batch_prefix.InBatchPrefixes,
        "must_wait",
        lambda self, request: asked.append(request) or must_wait(self, request),
    )
    add_alike(drive, 300)
    drive.step()
    assert len(asked) <= 1 + MOST_PASSED_OVER
    drive.run()


def test_nobody_waits_for_an_aborted_request() -> None:
    drive = wide(max_batch_tokens=50)
    requests = add_alike(drive, 3)
    drive.step()
    drive.scheduler.abort("r0")
    drive.run()
    assert [request.finish_reason for request in requests] == ["abort", "length", "length"]
    assert [request.cached_tokens for request in requests] == [0, 0, 48], "what the aborted one had computed"


def test_others_may_run_meanwhile() -> None:
    drive = wide()
    add_alike(drive, 2)
    drive.add("other", 20, 1)
    drive.step()
    assert drive.worker.rids[0] == ["r0", "other"]
    drive.run()


def test_who_scores_its_prompt_waits_for_nobody() -> None:
    drive = wide()
    add_alike(drive, 1)
    drive.add("scores", [*COMMON, 2, 2], 1, prompt_logprobs=0)
    drive.step()
    assert drive.worker.rids[0] == ["r0", "scores"]
    drive.run()


def test_a_prompt_is_compared_once_for_each_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    drive, compared = wide(max_requests=2), []
    find = in_batch_prefix.InBatchPrefixes._find
    monkeypatch.setattr(
        in_batch_prefix.InBatchPrefixes, "_find", lambda self, *asked: compared.append(asked) or find(self, *asked)
    )
    for index in range(6):
        drive.add(f"r{index}", 20 + index, 40)
    drive.step(30)
    assert len(compared) <= 6
    drive.run()


def test_waiting_keeps_the_laws_of_random_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits so low that every common page makes a request wait."""
    monkeypatch.setattr(in_batch_prefix, "LEAST_TOKENS", 1)
    monkeypatch.setattr(in_batch_prefix, "LEAST_SHARE", 0.0)
    waited: list[bool] = []
    must_wait = in_batch_prefix.InBatchPrefixes.must_wait
    monkeypatch.setattr(
        in_batch_prefix.InBatchPrefixes,
        "must_wait",
        lambda self, request: waited.append(must_wait(self, request)) or waited[-1],
    )
    for seed in range(400):
        print("seed", seed)
        play(draw_trace(Random(seed)))
    assert sum(waited) >= 20
