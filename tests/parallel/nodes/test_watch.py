"""The reported cause if several ranks end: the one that ended by itself, in whatever order the
messages arrive."""

from __future__ import annotations

import signal
import time
from itertools import permutations
from typing import Any

import pytest

from sglcore.core.errors import ConfigError, WorkerLost
from sglcore.engine.ranks.spec import HOST_GONE
from sglcore.engine.ranks.watch import Patience, Watch, ended
from sglcore.engine.ranks.wire import Kind
from tests.parallel.nodes.test_leader import Far, Process, far

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


def test_a_rank_that_speaks_is_not_silent() -> None:
    with far(2) as ranks:
        ranks.watch.patience = Patience(silence=20.0, starting=20.0, round=0.01)
        for member in ranks.members:
            member.heard = time.monotonic() - 30.0
        for rank in range(2):
            ranks.say(rank, Kind.BEAT, [3, "a step"])
        assert ranks.watch.go_round() is None
        assert [(member.step, member.phase) for member in ranks.members] == [(3, "a step")] * 2


def test_a_rank_that_has_left_is_not_called_silent() -> None:
    with far(2) as ranks:
        ranks.watch.patience = Patience(silence=20.0, starting=20.0, round=0.01, settle=0.1)
        ranks.members[1].heard = time.monotonic()
        ranks.say(0, Kind.FAILED, FOLLOWED)
        ranks.control[0].close()
        while not ranks.members[0].is_gone:
            ranks.watch._hear(ranks.members[0])
        ranks.members[0].heard = time.monotonic() - 30.0
        ranks.say(1, Kind.FAILED, CAUSED)
        assert cause_of(ranks) == "rank 1 failed in its model: no room for weights"


def test_a_rank_that_stops_within_a_frame_does_not_hold_up_the_watch() -> None:
    with far(2) as ranks:
        member = ranks.members[1]
        watch = Watch([member], Patience(silence=60.0, starting=60.0, round=0.01, settle=0.05), ranks.watch.progress)
        member.heard, member.process = time.monotonic(), Process(1)
        ranks.control[1]._stream.sendall(b"\x47")
        while (error := watch.go_round()) is None:
            pass
        assert str(error) == "rank 1 (process 1) ended with exit code 1 in starting"
        watch.close()


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ([], "starting"),
        ([(Kind.READY, {"limits": {}})], "its steps"),
        ([(Kind.BEAT, [-1, "waiting"])], "waiting"),
        ([(Kind.BEAT, [0, "a step"])], "a step, its last step 0"),
        ([(Kind.PROGRESS, ["weights", 1, 2])], "weights"),
    ],
)
def test_the_end_of_a_rank_is_told_with_what_it_did_last(words: list[tuple[Kind, Any]], where: str) -> None:
    with far(1) as ranks:
        member = ranks.members[0]
        for kind, values in words:
            ranks.say(0, kind, values)
            ranks.watch._hear(member)
        member.process, member.host = Process(2), "10.0.0.2"
        ranks.control[0].close()
        assert cause_of(ranks) == f"rank 0 (process 1 on 10.0.0.2) ended with exit code 2 in {where}"


class Ending(Process):
    """A process that ends a moment after its channel."""

    looks = 3

    def poll(self) -> int | None:
        self.looks -= 1
        return -signal.SIGKILL if self.looks < 0 else None


@pytest.mark.parametrize(
    ("process", "how"), [(Ending(), "ended by SIGKILL"), (Process(), "has closed its channel")], ids=["later", "never"]
)
def test_a_rank_may_close_its_channel_before_its_process_ends(process: Process, how: str) -> None:
    with far(1) as ranks:
        ranks.members[0].process = process
        ranks.control[0].close()
        assert cause_of(ranks) == f"rank 0 (process 1) {how} in starting"
