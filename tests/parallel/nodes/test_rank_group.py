"""A group of ranks as a worker: what its ranks are sent, and what it does when one of them ends."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from sglcore.core.errors import ConfigError, WorkerLost
from sglcore.engine.ranks.codec import decode, encode
from sglcore.engine.ranks.wire import Gone, Kind
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch
from sglcore.worker.model_worker import Ticket
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from sglcore.worker.step_plan import StepPlan
from tests.parallel.nodes.test_leader import Far, Process, far, grouped, result
from tests.parallel.nodes.test_watch import CAUSED, FOLLOWED
from tests.schedule.drive import Drive
from tests.schedule.fake_worker import make_limits

SAMPLING = SamplingBatch.from_params([(SamplingParams(), 0)])


def batch_of(composition: int, mode: ForwardMode = ForwardMode.DECODE, shard: int | None = None) -> ScheduleBatch:
    drive = Drive(overlap=False)
    drive.add("a", 3)
    batch = drive.scheduler.next_batch()
    assert batch is not None
    batch.composition, batch.forward_mode, batch.sampling = composition, mode, SAMPLING
    batch.step_plan = None if shard is None else StepPlan((3, 3), shard=shard)
    return batch


def test_a_group_runs_ahead_and_has_the_limits_of_its_ranks_otherwise() -> None:
    with far(2) as ranks, grouped(ranks, 1) as (group, _):
        assert group.limits == replace(make_limits(), runs_ahead=True) and group.pids == (1, 1)


@pytest.mark.parametrize("mode", [ForwardMode.EMBED, ForwardMode.IDLE])
def test_steps_without_samples_do_not_end_a_composition(mode: ForwardMode) -> None:
    with far(2) as ranks, grouped(ranks, 1) as (group, _):
        for composition, given in ((5, ForwardMode.DECODE), (6, mode), (5, ForwardMode.DECODE), (5, mode)):
            group.submit(batch_of(composition, given))
        group.submit(batch_of(6))
        for channel in ranks.steps:
            channel.wait_at_most(5.0)
            found = [decode(channel.receive().body) for _ in range(5)]
            assert [step.sampling is not None for step in found] == [True, True, False, True, True]


def test_a_step_without_a_plan_is_the_first_shards() -> None:
    with far(4) as ranks, grouped(ranks, 2) as (group, _):
        for shard in (None, 1, 0):
            group.submit(batch_of(1, shard=shard))
        counts = (2, 2, 1, 1)
        for channel in ranks.steps:
            channel.wait_at_most(5.0)
        found = [
            [decode(each.receive().body).step_plan for _ in range(n)]
            for each, n in zip(ranks.steps, counts, strict=True)
        ]
        assert [[plan and plan.shard for plan in each] for each in found] == [[None, 0]] * 2 + [[1]] * 2


def lost(group: object) -> WorkerLost:
    """The error that ended the group, once its watcher has it."""
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        try:
            group.check()  # pyright: ignore[reportAttributeAccessIssue]
        except WorkerLost as error:
            return error
        time.sleep(0.001)
    raise AssertionError("the group goes on")


@pytest.mark.parametrize("code", [1, ConfigError.exit_code])
def test_after_a_failure_no_step_is_taken_and_every_process_is_ended(code: int) -> None:
    """A group that has served requests is lost, whatever a restart could mend."""
    with far(2) as ranks, grouped(ranks, 1) as (group, ended):
        ranks.say(1, Kind.FAILED, ["no room for weights", False, code, "its model"])
        error = lost(group)
        assert "no room for weights" in str(error)
        group._watcher.join(30.0)
        assert [member.process.poll() for member in ranks.members] == [-signal.SIGKILL] * 2
        with pytest.raises(WorkerLost, match="no room for weights"):
            group.submit(batch_of(1))
        with pytest.raises(WorkerLost, match="no room for weights"):
            group.collect(Ticket(1, group._shards[0]))
        for channel in (*ranks.steps, *ranks.control):
            channel.wait_at_most(5.0)
            with pytest.raises(Gone):
                channel.receive()
        assert not ended
    assert ended == ["at the end"]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_caller_whose_channel_breaks_is_told_the_cause_that_comes_a_moment_later(is_known: bool) -> None:
    with far(2) as ranks, grouped(ranks, 1) as (group, _):
        ticket = group.submit(batch_of(1))

        def fail() -> None:
            ranks.say(0, Kind.FAILED, FOLLOWED)
            ranks.say(1, Kind.FAILED, CAUSED)

        later = threading.Timer(0.05, fail if is_known else lambda: None)
        later.start()
        ranks.steps[0].close()
        cause = "rank 1 failed in its model: no room" if is_known else "the other end of a channel"
        with pytest.raises(WorkerLost, match=cause):
            group.collect(ticket)
        later.join()


def test_a_caller_waits_for_the_cause_no_longer_than_it_takes_to_come() -> None:
    with far(2) as ranks:
        ranks.watch.patience = replace(ranks.watch.patience, settle=60.0)
        with grouped(ranks, 1) as (group, _):
            ticket = group.submit(batch_of(1))
            ranks.say(1, Kind.FAILED, CAUSED)
            ranks.steps[0].close()
            begin = time.monotonic()
            with pytest.raises(WorkerLost, match="rank 1 failed in its model: no room"):
                group.collect(ticket)
            assert time.monotonic() - begin < 60.0


def test_ranks_are_all_told_to_end_before_one_of_them_is_waited_for() -> None:
    with far(2) as ranks, grouped(ranks, 1) as (group, ended):
        closing = threading.Thread(target=group.close)
        closing.start()
        for channel in reversed(ranks.steps):
            channel.wait_at_most(5.0)
            assert channel.receive().kind is Kind.CLOSE
        for member in ranks.members:
            member.process.code = 0  # pyright: ignore[reportAttributeAccessIssue]
        for channel in ranks.steps:
            channel.send(Kind.RESULT)
            channel.send(Kind.CLOSED)
        closing.join(30.0)
        assert not closing.is_alive() and ended == ["at the end"]
        assert [member.process.poll() for member in ranks.members] == [0, 0], "none was killed"
        channels = (*ranks.near, *(member.control for member in ranks.members))
        assert isinstance(ranks, Far) and np.all([channel.fileno() == -1 for channel in channels])


@pytest.mark.parametrize(("count", "shards"), [(3, 1), (6, 2), (6, 3), (2, 2)])
def test_each_shard_has_consecutive_ranks_and_its_first_one_answers(count: int, shards: int) -> None:
    each = count // shards
    with far(count) as ranks, grouped(ranks, shards) as (group, _):
        for channel in ranks.steps:
            channel.wait_at_most(5.0)
        for shard in range(shards):
            ticket = group.submit(batch_of(1, shard=shard))
            own = range(shard * each, (shard + 1) * each)
            assert [ranks.steps[rank].receive().kind for rank in own] == [Kind.STEP] * each
            ranks.steps[own[0]].send(Kind.RESULT, encode(result(ticket.step)))
            assert group.collect(ticket).step == ticket.step
            assert [ranks.steps[rank].receive().kind for rank in own] == [Kind.COLLECT] * each
        for channel in ranks.steps:
            channel.wait_at_most(0.001)
            with pytest.raises(TimeoutError):
                channel.receive()
            channel.wait_at_most(5.0)
            channel.send(Kind.CLOSED)


@pytest.mark.parametrize("first", [0, 1])
def test_a_shard_that_waits_in_a_step_that_another_has_ended_is_lost(first: int) -> None:
    """Whichever of both is collected first. Nobody is lost for a step that takes long on both."""
    with far(2) as ranks:
        ranks.watch.patience = replace(ranks.watch.patience, shard=0.1)
        with grouped(ranks, 2) as (group, _):
            tickets = [group.submit(batch_of(1, shard=shard)) for shard in range(2)]
            later = threading.Timer(0.4, ranks.steps[0].send, (Kind.RESULT, encode(result(tickets[0].step))))
            later.start()
            assert group.collect(tickets[0]).step == tickets[0].step
            ranks.steps[1].send(Kind.RESULT, encode(result(tickets[1].step)))
            group.collect(tickets[1])
            tickets = [group.submit(batch_of(1, shard=shard)) for shard in range(2)]
            ranks.steps[1].send(Kind.RESULT, encode(result(tickets[1].step)))
            if first == 1:
                group.collect(tickets[1])
            with pytest.raises(WorkerLost, match="shard 0 has waited in a step .*, and shard 1 has ended it"):
                group.collect(tickets[0])
            with pytest.raises(WorkerLost, match="shard 0 has waited"):
                group.submit(batch_of(1, shard=1))
            assert [member.process.poll() for member in ranks.members] == [-signal.SIGKILL] * 2


def test_all_shards_are_asked_for_the_results_of_a_step_at_once() -> None:
    with far(2) as ranks, grouped(ranks, 2) as (group, _):
        for channel in ranks.steps:
            channel.wait_at_most(5.0)
            channel.send(Kind.RESULT, encode(result(1)))
        tickets = [group.submit(batch_of(1, shard=shard)) for shard in range(2)]
        group.collect(tickets[0])
        assert [[channel.receive().kind for _ in range(2)] for channel in ranks.steps] == [
            [Kind.STEP, Kind.COLLECT]
        ] * 2
        group.collect(tickets[1])
        for channel in ranks.steps:
            channel.wait_at_most(0.001)
            with pytest.raises(TimeoutError):
                channel.receive()
            channel.wait_at_most(5.0)
            channel.send(Kind.CLOSED)


def test_ranks_are_told_to_end_though_one_has_left_before() -> None:
    with far(3) as ranks:
        with grouped(ranks, 1):
            ranks.steps[0].close()
            for channel in ranks.steps[1:]:
                channel.send(Kind.CLOSED)
        for channel in ranks.steps[1:]:
            assert channel.receive().kind is Kind.CLOSE


class Freeing(Process):
    """A process that frees its device for a while after its last word."""

    def wait(self, timeout: float) -> int:
        self.code = 0 if self.code is None else self.code
        return self.code


def test_ranks_that_have_said_that_they_are_closed_have_the_time_to_end() -> None:
    with far(2) as ranks, grouped(ranks, 1) as (group, _):
        for member in ranks.members:
            member.process = Freeing()
        for channel in ranks.steps:
            channel.send(Kind.CLOSED)
        group.close()
        assert [member.process.poll() for member in ranks.members] == [0, 0], "none was killed"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_leaves_while_its_group_is_closed_is_no_failure(rank: int) -> None:
    with far(2) as ranks, grouped(ranks, 1) as (group, ended):
        for member in ranks.members:
            member.process = Freeing()
        closing = threading.Thread(target=group.close)
        closing.start()
        for channel in ranks.steps:
            channel.wait_at_most(5.0)
            assert channel.receive().kind is Kind.CLOSE
        ranks.control[rank].close()
        group._watcher.join(30.0)
        group.check()
        for channel in ranks.steps:
            channel.send(Kind.CLOSED)
        closing.join(30.0)
        assert not closing.is_alive() and ended == ["at the end"]
        group.check()
