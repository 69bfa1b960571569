"""All shards verify the same number of draft tokens, chosen by the results of all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglcore.schedule.data_parallel import dp_draft_length as module
from sglcore.schedule.data_parallel.dp_draft_length import AgreedLength
from sglcore.schedule.data_parallel.dp_plan import Proposals
from sglcore.worker.model_worker import BatchResult
from sglcore.worker.schedule_batch import ForwardMode
from tests.schedule.fake_worker import make_limits

LENGTHS = (0, 1, 3, 4)


def step(requests: int, mode: ForwardMode = ForwardMode.DECODE) -> Any:
    """A shard's batch with the fields that the choice reads."""
    return SimpleNamespace(batch_size=requests, forward_mode=mode)


def result(accepted: list[int]) -> BatchResult:
    """The result of a shard with these numbers of accepted draft tokens."""
    offsets = np.cumsum([0, *(each + 1 for each in accepted)]).astype(np.int32)
    return BatchResult(0, offsets, np.zeros(offsets[-1], np.int32), np.zeros(len(accepted), np.bool_))


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def made(draft_lengths: tuple[int, ...]) -> AgreedLength:
    return AgreedLength(make_limits(draft_tokens=4, draft_lengths=draft_lengths))


def test_a_start_with_one_length_keeps_it_and_one_without_proposals_has_none() -> None:
    fixed, plain = made(()), AgreedLength(make_limits())
    for _ in range(20):
        number, proposals = fixed.begin([step(2), None])
        assert proposals == Proposals(4, 4)
        fixed.end(number, [result([0, 0])])
        assert plain.begin([step(2), None])[1] == Proposals()


@pytest.mark.parametrize(("right", "slope", "best"), [(0, 0.3, 0), (4, 0.05, 4)])
def test_it_is_chosen_by_what_came_of_every_shard(
    right: int, slope: float, best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes as long as its slowest shard, wherever the requests are; idle shards do not
    count."""
    clock = Clock()
    for owner in (module.time,):
        monkeypatch.setattr(owner, "perf_counter", clock.perf_counter)
    agreed, taken = made(LENGTHS), list[int]()
    for turn in range(400):
        number, proposals = agreed.begin([step(1), None, step(3)] if turn % 2 else [None, step(4), None])
        accepted = [min(right, proposals.verified)] * 4
        clock.now += 1 + slope * proposals.verified
        agreed.end(number, [result(accepted[:1]), result(accepted[1:])] if turn % 2 else [result(accepted)])
        taken.append(proposals.verified)
    assert set(taken[:50]) == set(LENGTHS)
    assert taken[200:].count(best) > 170


def test_requests_and_what_was_right_are_counted_in_all_shards() -> None:
    """All draft tokens of two requests in one shard are accepted, none of one request in another,
    and the first of five requests in the last."""
    agreed = made((2, 4))
    number, proposals = agreed.begin([step(2), step(1), None, step(5)])
    agreed.end(number, [result([4, 4]), result([0]), result([1] * 5)])
    ((bucket, known),) = agreed._length._evidence.items()
    assert (proposals.verified, bucket) == (4, (8).bit_length())
    assert known.reached.tolist() == [8, 7, 2, 2] and known.right.tolist() == [7, 2, 2, 2]


def test_what_a_step_makes_the_next_one_verifies() -> None:
    agreed, before = made(LENGTHS), None
    for turn in range(60):
        mode = ForwardMode.EXTEND if turn % 7 == 3 else ForwardMode.DECODE
        number, proposals = agreed.begin([step(2, mode), None])
        assert before is None or proposals.verified == before.proposed
        assert mode is ForwardMode.DECODE or proposals.proposed == proposals.verified, "a prompt tells nothing"
        before = proposals
        agreed.end(number, [result([0, 0])] if mode is ForwardMode.DECODE else [])


def test_a_step_beside_prompts_tells_what_was_right_and_not_what_it_takes() -> None:
    agreed = made(LENGTHS)
    for _ in range(30):
        number, proposals = agreed.begin([step(2), step(9, ForwardMode.EXTEND)])
        agreed.end(number, [result([min(1, proposals.verified)] * 2)])
    (known,) = agreed._length._evidence.values()
    assert not known.seconds
    assert known.reached[0] > 10 and known.right[0] == pytest.approx(known.reached[0])


def test_a_step_that_makes_another_number_than_it_verifies_tells_nothing_of_what_one_takes() -> None:
    agreed, steady = made(LENGTHS), 0
    for _ in range(12):
        number, proposals = agreed.begin([step(2), None])
        steady += proposals.verified == proposals.proposed
        agreed.end(number, [result([0, 0])])
    (known,) = agreed._length._evidence.values()
    assert 0 < steady < 12 and sum(map(len, known.seconds.values())) == steady


def test_a_step_that_was_lost_is_passed_over() -> None:
    agreed = made(LENGTHS)
    agreed.begin([step(2), None])
    number, _ = agreed.begin([step(3), None])
    agreed.end(number, [result([0, 0, 0])])
    assert not agreed._times._started
