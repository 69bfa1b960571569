"""However a rank ends, every waiting caller soon gets the cause, and no process is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglcore.core.errors import ConfigError, WorkerLost
from sglcore.engine.metered_worker import Meter
from sglcore.engine.ranks.ranks_start import RankOptions
from sglcore.engine.ranks.spec import RankProcess, RankSpec
from sglcore.engine.ranks.watch import Patience
from sglcore.engine.start import start
from sglcore.engine.token_engine import TokenEngine as Tokens
from sglcore.sampling.params import SamplingParams
from sglcore.serving.replicas.engine_service import EngineService
from tests.checkpoints import llama, save
from tests.laws.engine import random_prompts
from tests.parallel import defects
from tests.parallel.engine import RankedEngine, configured, lead_and_die
from tests.parallel.forked import Forking, forking

DEAF = Patience(silence=3600.0, starting=3600.0)
"""Would wait an hour for a silent rank, so a death must be detected by its effects, or a test does
not end."""
QUICK = Patience(silence=3.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(llama(max_position_embeddings=128), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def started(folder: Path) -> Iterator[Callable[..., RankedEngine]]:
    engines: list[RankedEngine] = []

    def start(
        defect: Callable[[int], None] = defects.nothing, patience: Patience = DEAF, **settings: Any
    ) -> RankedEngine:
        engines.append(RankedEngine(folder, defect, patience, **settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.worker.close()
        check_none_is_left(engine.forking)


def check_none_is_left(forking: Forking) -> None:
    """Check that every started process has ended and was reaped."""
    for process in forking.processes:
        process.wait(10)
        assert process.poll() is not None


def run_to_its_end(engine: RankedEngine) -> str:
    """Run requests until a step raises; return the error's text."""
    with pytest.raises(WorkerLost) as caught:
        engine.run(random_prompts(1, (5, 9)), 100)
    return str(caught.value)


def test_a_rank_speaks_often_in_the_time_after_which_silence_is_its_end(folder: Path) -> None:
    told: list[float] = []

    def spawn(spec: RankSpec) -> RankProcess:
        told.append(spec.beat)
        raise OSError("no process")

    with pytest.raises(OSError, match="no process"):
        start(configured(folder, tp=2), ranks=RankOptions(spawn, Patience(silence=6.0)))
    assert 0 < told[0] <= 2.0


@pytest.mark.parametrize(("victim", "shards"), [(0, 1), (1, 1), (0, 2), (1, 2)])
def test_a_killed_rank_ends_every_open_request_at_once(
    victim: int, shards: int, started: Callable[..., RankedEngine]
) -> None:
    engine = started(dp=shards)
    prompts = random_prompts(1, (5, 9))
    engine.run(prompts, 2)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    requests = [engine.request(prompt, params) for prompt in prompts]
    for request in requests:
        engine.scheduler.add(request)
    for _ in range(4):
        engine.loop.step()
    os.kill(engine.worker.pids[victim], signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(WorkerLost, match=rf"rank {victim} \(process \d+\) ended by SIGKILL"):
        while engine.loop.has_work:
            engine.loop.step()
    assert time.monotonic() - killed < 5.0  # takes a fiftieth of a second on an idle machine
    engine.loop.drain()
    assert [request.finish_reason for request in requests] == ["error", "error"]
    assert all("rank" in (request.error or "") for request in requests)
    with pytest.raises(WorkerLost, match="SIGKILL"):
        engine.worker.check()


def test_an_exception_on_one_rank_is_told_and_not_what_follows_from_it(
    started: Callable[..., RankedEngine],
) -> None:
    said = run_to_its_end(started(defects.raises_in_a_step))
    assert "rank 1 failed in a step: ValueError: the fifth step is too much" in said


def test_a_rank_that_leaves_without_a_word_is_lost_too(started: Callable[..., RankedEngine]) -> None:
    said = run_to_its_end(started(defects.leaves_in_a_step))
    assert "rank 1" in said and "exit code 0" in said


def test_a_rank_that_stops_is_lost_when_it_has_been_silent_for_long(started: Callable[..., RankedEngine]) -> None:
    engine = started(patience=QUICK)
    engine.run(random_prompts(1, (5,)), 2)
    os.kill(engine.worker.pids[1], signal.SIGSTOP)
    said = run_to_its_end(engine)
    assert "rank 1" in said and "has sent nothing for 3." in said


def test_a_death_while_nothing_runs_is_noticed_before_the_next_request(started: Callable[..., RankedEngine]) -> None:
    engine = started()
    os.kill(engine.worker.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerLost, match="SIGKILL"):
        while True:
            engine.worker.check()
            time.sleep(0.01)


def test_an_engine_process_ends_with_the_cause_when_a_rank_dies_while_it_idles(
    started: Callable[..., RankedEngine],
) -> None:
    """The server, which has its own policy for restarting engines, then informs every client."""
    engine = started()

    class Nobody:
        def send(self, reply: Any) -> None: ...

        def receive(self, timeout_ms: int) -> list[Any]:
            time.sleep(min(timeout_ms, 10) / 1000)
            return []

    channel: Any = Nobody()
    meter = Meter(engine.worker)
    service = EngineService(Tokens(meter, frozenset({2})), meter, channel, engine.started.check)
    os.kill(engine.worker.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerLost, match="rank 0 .* ended by SIGKILL"):
        service.run()


@pytest.mark.parametrize("step", ["world", "model", "worker"])
def test_a_death_while_ranks_come_up_ends_the_others(step: str, folder: Path) -> None:
    with pytest.raises(WorkerLost, match=r"rank 1 \(process \d+\) ended by SIGKILL"):
        RankedEngine(folder, partial(defects.dies_in, step), DEAF)


def test_a_rank_without_memory_for_its_weights_says_so(folder: Path) -> None:
    with pytest.raises(WorkerLost, match="rank 1 failed in .*: MemoryError: no room for weights"):
        RankedEngine(folder, defects.has_no_memory, DEAF)


def test_ranks_that_were_closed_have_ended_by_themselves(started: Callable[..., RankedEngine]) -> None:
    engine = started()
    engine.run(random_prompts(1, (5,)), 2)
    engine.worker.close()
    assert [process.poll() for process in engine.forking.processes] == [0, 0]
    channels = (*engine.worker._steps, *(member.control for member in engine.worker._watch.members))
    assert [channel.fileno() for channel in channels] == [-1] * 4
    engine.worker.close()


def test_what_a_person_can_mend_is_told_as_such(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 4096"):
        RankedEngine(folder, max_model_len=4096)


def test_ranks_end_when_their_leader_is_killed(folder: Path) -> None:
    context = forking()
    ours, theirs = context.Pipe()
    leader = context.Process(target=lead_and_die, args=(folder, theirs))
    leader.start()
    theirs.close()
    pids = ours.recv()
    leader.join(60)
    assert leader.exitcode == -signal.SIGKILL
    end = time.monotonic() + 300
    while any(_lives(pid) for pid in pids):
        assert time.monotonic() < end, "ranks outlive their leader"
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    """Whether the process lives; a process that ended and was not reaped counts as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
