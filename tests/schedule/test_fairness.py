"""No request starves: under endless streams of new requests, old ones finish within a bound that
does not depend on the stream."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request
from sglcore.schedule.running_requests import RunningRequests
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.waiting_queue import WaitingQueue
from tests.schedule.drive import Drive

ENDLESS = 200


def finish_under_a_stream(drive: Drive, watched: Request, *, prompt: int, max_tokens: int, most: int) -> int:
    """Return the number of steps until `watched` ends while one new request arrives in every step;
    fail after `most`."""
    for count in range(most):
        if watched.finish_reason is not None:
            return count
        drive.add(f"s{count}", [count % 50, count // 50, *range(prompt - 2)], max_tokens)
        drive.step()
    raise AssertionError(f"not finished after {most} steps: {drive.scheduler.stats()}")


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_long_prompt_is_not_overtaken_forever_by_short_ones(mixed: bool, prefix_cache: bool) -> None:
    drive = Drive(max_requests=3, allows_mixed_batches=mixed, prefix_cache=prefix_cache, num_pages=18)
    for index in range(3):
        drive.add(f"first{index}", 6, 8)
    watched = drive.add("long", 50, 4)
    assert finish_under_a_stream(drive, watched, prompt=6, max_tokens=8, most=ENDLESS) < 80


@pytest.mark.parametrize("mixed", [True, False])
def test_decoding_goes_on_under_a_stream_of_prompts(mixed: bool) -> None:
    drive = Drive(max_requests=4, allows_mixed_batches=mixed, num_pages=64)
    watched = drive.add("watched", 3, 30)
    drive.step(2)
    assert finish_under_a_stream(drive, watched, prompt=14, max_tokens=2, most=ENDLESS) <= 64


def test_the_oldest_goes_on_while_the_pool_is_far_too_small() -> None:
    drive = Drive(max_model_len=32, page_size=4, num_pages=8, max_requests=4)
    watched = drive.add("old", 10, 20)
    assert finish_under_a_stream(drive, watched, prompt=9, max_tokens=20, most=ENDLESS) < 60


def test_only_a_waiting_request_leaves_the_queue() -> None:
    queue, requests = WaitingQueue(), [Request(f"r{n}", np.array([1], np.int32), SamplingParams()) for n in range(4)]
    for arrival, request in enumerate(requests):
        request.arrival = arrival
    for request in requests[:3]:
        queue.add(request)
    queue.remove(requests[1])
    assert list(queue) == [requests[0], requests[2]]
    for absent in (requests[1], requests[3]):
        with pytest.raises(ValueError, match=f"request '{absent.rid}' does not wait"):
            queue.remove(absent)
    assert list(queue) == [requests[0], requests[2]]


class YoungestFirst(WaitingQueue):
    def __iter__(self) -> Iterator[Request]:
        return reversed(self._requests)


class PromptsFirst(Scheduler):
    @property
    def _extended_last(self) -> bool:
        return False

    @_extended_last.setter
    def _extended_last(self, value: bool) -> None:
        return None


class SendsTheRetractedToTheBack(RunningRequests):
    def _retract(self, victim: Request) -> None:
        oldest = min((*self.rows.requests, *self.extending), key=lambda request: request.arrival)
        oldest.arrival += 1_000_000
        super()._retract(oldest)


def test_serving_the_youngest_first_is_noticed() -> None:
    drive = Drive(max_requests=3, num_pages=18)
    drive.scheduler._waiting.__class__ = YoungestFirst
    for index in range(3):
        drive.add(f"first{index}", 6, 8)
    drive.step()
    watched = drive.add("long", 50, 4)
    with pytest.raises(AssertionError, match="not finished"):
        finish_under_a_stream(drive, watched, prompt=6, max_tokens=8, most=ENDLESS)


def test_serving_all_prompts_before_any_decode_is_noticed() -> None:
    drive = Drive(max_requests=64, allows_mixed_batches=False, max_batch_tokens=64, num_pages=600, vocab_size=99)
    drive.scheduler.__dict__.pop("_extended_last")
    drive.scheduler.__class__ = PromptsFirst
    watched = drive.add("watched", 3, 60)
    drive.step(2)
    with pytest.raises(AssertionError, match="not finished"):
        finish_under_a_stream(drive, watched, prompt=62, max_tokens=1, most=130)


def test_the_same_stream_lets_decodes_take_their_turns() -> None:
    drive = Drive(max_requests=64, allows_mixed_batches=False, max_batch_tokens=64, num_pages=600, vocab_size=99)
    watched = drive.add("watched", 3, 60)
    drive.step(2)
    assert finish_under_a_stream(drive, watched, prompt=62, max_tokens=1, most=130) <= 124


def test_retracting_the_oldest_to_the_back_of_the_queue_is_noticed() -> None:
    drive = Drive(max_model_len=32, page_size=4, num_pages=8, max_requests=4)
    drive.scheduler.running.__class__ = SendsTheRetractedToTheBack
    watched = drive.add("old", 10, 20)
    with pytest.raises(AssertionError, match="not finished"):
        finish_under_a_stream(drive, watched, prompt=9, max_tokens=20, most=ENDLESS)


def order_of_ends(priorities: dict[str, int]) -> list[str]:
    """The order in which requests end when one runs at a time."""
    drive = Drive(max_requests=1, num_pages=18)
    requests = {name: drive.add(name, 4, 3, priority=priority) for name, priority in priorities.items()}
    ended: list[str] = []
    while drive.loop.has_work:
        drive.step()
        ended += [name for name, each in requests.items() if each.finish_reason is not None and name not in ended]
    return ended


def test_the_lowest_priority_is_served_first_and_equal_ones_in_order_of_arrival() -> None:
    assert order_of_ends({"a": 0, "b": 5, "c": -1, "d": 5, "e": -1}) == ["c", "e", "a", "b", "d"]


def test_the_highest_priority_gives_up_its_place_first() -> None:
    drive = Drive(max_model_len=32, page_size=4, num_pages=8, max_requests=2)
    late = drive.add("late", 12, 16, priority=3)
    drive.step()
    urgent = drive.add("urgent", 12, 16)
    while urgent.finish_reason is None:
        drive.step()
    assert late.finish_reason is None and drive.scheduler.stats().retractions > 0


def test_serving_by_arrival_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglcore.schedule.waiting_queue.by_turn", lambda request: (0, request.arrival))
    assert order_of_ends({"a": 0, "b": 5, "c": -1}) == ["a", "b", "c"]
