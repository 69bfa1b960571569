"""The channel on which a rank reports its state, at the end of the leader and of the rank."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from sglcore.config.engine_config import EngineConfig, plain_config
from sglcore.core.errors import ConfigError, SglcoreError, WorkerLost
from sglcore.device.choice import ChosenDevice
from sglcore.engine.ranks import rank_process
from sglcore.engine.ranks.codec import decode, encode
from sglcore.engine.ranks.rank_process import LEADER_GONE, Control
from sglcore.engine.ranks.spec import RankSpec
from sglcore.engine.ranks.wire import Channel, Kind, listen
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch
from sglcore.worker.model_worker import BatchResult
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore.worker.topology import Place, Topology
from tests.schedule.drive import Drive

BEAT = 0.01


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The exit codes with which a process of its own would have ended."""
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise SystemExit(code)  # ends the thread

    monkeypatch.setattr(os, "_exit", end)
    yield codes
    assert not [thread for thread in threading.enumerate() if thread.name == "beats" and not ended(thread)]


def ended(thread: threading.Thread) -> bool:
    thread.join(10.0)
    return not thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_ends_when_its_leader_is_gone(exits: list[int]) -> None:
    near, far = socket.socketpair()
    Control(Channel(near, 0), BEAT)
    far.close()
    until = time.monotonic() + 10.0
    while not exits and time.monotonic() < until:
        time.sleep(BEAT)
    assert exits[0] == LEADER_GONE


def test_a_rank_that_is_closed_ends_by_itself_when_its_leader_hangs_up(exits: list[int]) -> None:
    near, far = socket.socketpair()
    control = Control(Channel(near, 0), BEAT)
    control.let_go()
    far.close()
    control.say(Kind.BEAT, [0, "closing"])
    time.sleep(5 * BEAT)
    assert exits == []


class Recorded:
    """A worker, and a control channel, that record what they are asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.phase, self.step = "", -1

    def submit(self, batch: ScheduleBatch) -> int:
        self.asked.append(("submit", batch.sampling))
        return batch.step

    def collect(self, ticket: int) -> BatchResult:
        self.asked.append(("collect", ticket))
        return BatchResult(ticket, np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.bool_))

    def close(self) -> None:
        self.asked.append(("close", self.phase))

    def let_go(self) -> None:
        self.asked.append(("let go", None))

    def say(self, kind: Kind, values: Any) -> None:
        self.asked.append((kind.name, values))


def steps_of(count: int) -> list[ScheduleBatch]:
    """The first steps of a request; from the second one on without the sampling of its
    composition."""
    drive, found = Drive(overlap=False), list[ScheduleBatch]()
    drive.add("a", 3)
    batch = drive.scheduler.next_batch()
    assert batch is not None
    sampling = SamplingBatch.from_params([(SamplingParams(), 0)])
    for step in range(count):
        batch.step, batch.sampling = step, sampling if step == 0 else None
        found.append(decode(bytearray(encode(batch))))
    return found


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_takes_steps_in_order_and_frees_its_device_before_it_says_that_it_is_closed(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 2 are the first of their shards, and alone send results."""
    seen = Recorded()
    control: Any = seen
    monkeypatch.setattr(rank_process, "start_rank", lambda *given: (seen, {"limits": {}}))
    near, far = (Channel(each, 0) for each in socket.socketpair())
    first, second = steps_of(2)
    for kind, body in (
        *((Kind.STEP, encode(batch)) for batch in (first, second)),
        *((Kind.COLLECT, b""), (Kind.COLLECT, b""), (Kind.CLOSE, b"")),
    ):
        far.send(kind, body)
    chosen = ChosenDevice("cpu", "", "", 1, "").encode()
    place = Place(rank, Topology(tp=4, dp=2), "", rank, 4)
    rank_process.serve(RankSpec(plain_config(EngineConfig()), chosen, {}, "", 0, ""), place, near, control)
    (ready, *submitted), rest = seen.asked[:3], seen.asked[3:]
    assert ready == ("READY", {"limits": {}}) and seen.step == 1
    assert [name for name, _ in submitted] == ["submit", "submit"]
    assert all(sampling is not None for _, sampling in submitted), "a composition's sampling is kept"
    assert rest == [("collect", 0), ("collect", 1), ("close", "closing"), ("let go", None)]
    results = [decode(far.receive().body).step for _ in range(2 if rank != 1 else 0)]
    assert results == ([] if rank == 1 else [0, 1]) and far.receive().kind is Kind.CLOSED
    near.close()
    far.close()


def test_sampling_of_another_composition_is_not_taken_for_that_of_a_step() -> None:
    known, (first, later) = rank_process.KnownSampling(), steps_of(2)
    assert known.completed(later).sampling is None
    assert known.completed(first).sampling is known.completed(later).sampling is not None
    (other,) = steps_of(1)
    other.composition, other.sampling = first.composition + 1, None
    assert known.completed(other).sampling is None


@pytest.mark.parametrize("is_followed", [False, True])
def test_progress_is_told_when_a_phase_begins_and_ends_and_now_and_then(
    is_followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(rank_process, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    near, far = (Channel(each, 0) for each in socket.socketpair())
    monkeypatch.setattr(threading, "Thread", lambda **how: SimpleNamespace(start=lambda: None))
    control = Control(near, 60.0)
    step = rank_process.PROGRESS_EVERY * (0.6 if is_followed else 0.1)
    for done in range(5):
        control.progress("weights", done, 4)
        clock[0] += step
    control.progress("graphs", 0, 9)
    near.close()
    found = list[list[Any]]()
    try:
        while True:
            found.append(msgspec.msgpack.decode(far.receive().body))
    except rank_process.Gone:
        pass
    far.close()
    between = [["weights", 2, 4]] if is_followed else []
    assert found == [["weights", 0, 4], *between, ["weights", 4, 4], ["graphs", 0, 9]]
    assert control.phase == "graphs"


@pytest.mark.parametrize(("error", "code"), [(ConfigError("no room"), 2), (WorkerLost("no room"), 1)])
def test_an_error_of_ours_is_told_in_its_own_words_with_its_exit_code(error: SglcoreError, code: int) -> None:
    assert error.exit_code == code
    near, far = (Channel(each, 0) for each in socket.socketpair())
    control = Control(near, 60.0)
    control.let_go()
    control.fail(error)
    frame = far.receive()
    while frame.kind is Kind.BEAT:
        frame = far.receive()
    assert msgspec.msgpack.decode(frame.body) == [str(error), False, code, "starting"]
    near.close()
    far.close()


def test_heartbeats_say_the_step_and_the_phase() -> None:
    near, far = (Channel(each, 0) for each in socket.socketpair())
    far.wait_at_most(10.0)
    control = Control(near, BEAT)
    control.step, control.phase = 7, "a step"
    found = [msgspec.msgpack.decode(far.receive().body) for _ in range(3)]
    assert found[1:] == [[7, "a step"]] * 2
    control.let_go()
    time.sleep(2 * BEAT)
    near.close()
    far.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_ends_when_another_process_becomes_its_parent(exits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The channel of a leader that was killed may stay open in another process."""
    near, far = socket.socketpair()
    parents = iter([5, 5, 5])
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 1))
    control = Control(Channel(near, 0), BEAT)
    until = time.monotonic() + 10.0
    while not exits and time.monotonic() < until:
        time.sleep(BEAT)
    assert exits[0] == LEADER_GONE
    control.let_go()
    near.close()
    far.close()


def started_with(monkeypatch: pytest.MonkeyPatch, serve: Any, address: str) -> tuple[int, list[tuple[int, Any]]]:
    """The exit code of a rank, and how it handles signals."""
    handled: list[tuple[int, Any]] = []
    monkeypatch.setattr(rank_process.signal, "signal", lambda *given: handled.append(given))
    monkeypatch.setattr(rank_process, "tell_interface", lambda *given: None)
    monkeypatch.setattr(rank_process, "serve", serve)
    place = Place(1, Topology(tp=2), "", 1, 2)
    code = rank_process.run(RankSpec({}, "", place.as_plain(), address, 7, "word", beat=60.0))
    return code, handled


def test_a_rank_that_finds_no_leader_ends_as_one_that_has_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, handled = started_with(monkeypatch, None, f"tcp:127.0.0.1:{port}")
    assert code == LEADER_GONE
    assert handled == [(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)], "the leader gets them"


@pytest.mark.parametrize("error", [None, rank_process.Gone("gone"), ValueError("broken"), KeyboardInterrupt()])
def test_a_rank_says_who_it_is_and_ends_by_the_way_it_failed(
    error: BaseException | None, exits: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listener, address = listen(tmp_path)
    controls: list[Control] = []

    def serve(spec: RankSpec, place: Place, steps: Channel, control: Control) -> None:
        controls.append(control)
        control.let_go()
        if error is not None:
            raise error

    if error is None:
        assert started_with(monkeypatch, serve, address)[0] == 0
    else:
        with pytest.raises(SystemExit):
            started_with(monkeypatch, serve, address)
    wanted = {type(None): [], rank_process.Gone: [LEADER_GONE]}.get(type(error), [rank_process.FAILED])
    assert exits == wanted
    steps, control = (Channel(listener.accept()[0], 7) for _ in range(2))
    for channel, use in ((steps, "steps"), (control, "control")):
        channel.wait_at_most(10.0)
        assert msgspec.msgpack.decode(channel.receive().body) == ["word", 1, use, os.getpid()]
    if wanted == [rank_process.FAILED]:
        kinds = [control.receive().kind]
        while kinds[-1] is Kind.BEAT:
            kinds.append(control.receive().kind)
        assert kinds[-1] is Kind.FAILED
    controls[0]._channel.close()
    for each in (listener, steps, control):
        each.close()


class CollectiveError(Exception):
    """An error of this name follows from the end of another rank."""


def raised(error: Exception, cause: Exception | None = None, context: Exception | None = None) -> Exception:
    error.__cause__, error.__context__ = cause, context
    return error


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (ValueError("outer"), False),
        (CollectiveError("outer"), True),
        (raised(ValueError("outer"), cause=CollectiveError("inner")), True),
        (raised(ValueError("outer"), context=CollectiveError("inner")), True),
        (raised(ValueError("outer"), cause=KeyError("inner"), context=KeyError("inner")), False),
    ],
)
def test_a_failure_says_whether_it_only_follows_from_another_ranks(error: Exception, follows: bool) -> None:
    near, far = (Channel(each, 0) for each in socket.socketpair())
    control = Control(near, 60.0)
    control.let_go()
    control.phase = "a step"
    control.fail(error)
    frame = far.receive()
    while frame.kind is Kind.BEAT:
        frame = far.receive()
    told = [f"{type(error).__name__}: outer", follows, 1, "a step"]
    assert (frame.kind, msgspec.msgpack.decode(frame.body)) == (Kind.FAILED, told)
    near.close()
    far.close()
