"""The reported cause if several ranks end: the one that ended by itself, in whatever order the
messages arrive."""

from __future__ import annotations

import signal
import time
from itertools import permutations

import pytest

from sglcore.device.errors import ConfigError, WorkerLost
from sglcore.engine.ranks.spec import HOST_GONE
from sglcore.engine.ranks.watch import Patience, ended
from sglcore.engine.ranks.wire import Kind
from tests.parallel.test_leader import Far, Process, far

FOLLOWED = ["a collective failed: rank 1 is gone", True, 1, "a step"]
CAUSED = ["no room for weights", False, 1, "its model"]


def cause_of(ranks: Far) -> str:
    """The text of the error that the leader raises."""
    while (error := ranks.watch.go_round()) is None:
        pass
    assert isinstance(error, WorkerLost)
    return str(error)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_what_follows_from_another_ranks_end_is_not_told_as_the_cause(order: tuple[int, ...]) -> None:
    with far(3) as ranks:
        for rank in order:
            ranks.say(rank, Kind.FAILED, CAUSED if rank == 1 else FOLLOWED)
        assert cause_of(ranks) == "rank 1 failed in its model: no room for weights"


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_that_died_without_a_word_is_the_cause_of_what_others_say(is_first: bool) -> None:
    with far(2) as ranks:
        ranks.members[1].process = Process(-signal.SIGKILL)
        if is_first:
            ranks.control[1].close()
        ranks.say(0, Kind.FAILED, FOLLOWED)
        if not is_first:
            ranks.control[1].close()
        assert cause_of(ranks).startswith("rank 1 (process 1) ended by SIGKILL")


def test_a_rank_that_said_why_it_followed_and_then_left_is_no_cause_either() -> None:
    with far(2) as ranks:
        ranks.say(0, Kind.FAILED, FOLLOWED)
        ranks.control[0].close()
        ranks.members[0].process = Process(1)
        while not ranks.members[0].is_gone:
            ranks.watch._hear(ranks.members[0])
        ranks.say(1, Kind.FAILED, CAUSED)
        assert cause_of(ranks) == "rank 1 failed in its model: no room for weights"


def test_where_there_are_only_consequences_the_first_is_told_when_no_cause_has_come() -> None:
    with far(2) as ranks:
        for rank in range(2):
            ranks.say(rank, Kind.FAILED, FOLLOWED)
        assert cause_of(ranks) == "rank 0 failed in a step: a collective failed: rank 1 is gone"


def test_a_cause_that_is_the_users_to_mend_is_told_as_such() -> None:
    with far(2) as ranks:
        ranks.say(0, Kind.FAILED, FOLLOWED)
        ranks.say(1, Kind.FAILED, ["tp is 3", False, ConfigError.exit_code, "its model"])
        while (error := ranks.watch.go_round()) is None:
            pass
        assert isinstance(error, ConfigError) and "tp is 3" in str(error)


@pytest.mark.parametrize(
    ("is_ready", "silent", "is_lost"),
    [(False, 30.0, False), (False, 70.0, True), (True, 10.0, False), (True, 30.0, True)],
)
def test_a_rank_may_be_silent_for_longer_while_it_starts(is_ready: bool, silent: float, is_lost: bool) -> None:
    with far(2) as ranks:
        ranks.watch.patience = Patience(silence=20.0, starting=60.0, round=0.01)
        now = time.monotonic()
        for member in ranks.members:
            member.ready, member.heard, member.phase = {} if is_ready else None, now, "its model"
        ranks.members[1].heard = now - silent
        error = ranks.watch.go_round()
        assert (error is not None) is is_lost
        assert error is None or str(error).startswith(
            f"rank 1 (process 1) has sent nothing for {silent:.1f} s, last in its model"
        )


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (-signal.SIGKILL, "ended by SIGKILL"),
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (HOST_GONE, "is gone with its host"),
    ],
)
def test_an_exit_code_is_told_in_words(code: int, told: str) -> None:
    assert ended(code).startswith(told)
