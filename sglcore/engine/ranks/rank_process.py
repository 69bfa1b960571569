"""The process of one rank: it receives steps from the leader and runs them; the first rank of a
shard returns the results. It has no scheduler.

Started as `python -m sglcore.engine.ranks.rank_process`, with a RankSpec as one line of JSON on its
standard input. When the leader is gone, its channels close, and the process ends.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import MutableMapping
from dataclasses import asdict
from typing import Any

import msgspec

from sglcore.config.engine_config import EngineConfig, config_of_plain
from sglcore.core.errors import SglcoreError
from sglcore.core.ledger import DecisionLedger
from sglcore.device.choice import ChosenDevice, check_same
from sglcore.engine.process_end import leave
from sglcore.engine.ranks.codec import decode, encode
from sglcore.engine.ranks.interface import interface_of
from sglcore.engine.ranks.rank_launch import TORCHRUN
from sglcore.engine.ranks.spec import RankSpec
from sglcore.engine.ranks.wire import Channel, Gone, Kind, connect
from sglcore.engine.start import bring_up, choose, model_folder
from sglcore.engine.timed_read import is_readable
from sglcore.worker.model_worker import ModelWorker, Ticket
from sglcore.worker.schedule_batch import HostSampling, ScheduleBatch
from sglcore.worker.topology import Place

LEADER_GONE = 3
"""The exit code of a rank after its leader ended without a message."""
FAILED = 1
"""The exit code of a rank that has reported why it ends."""
HOST_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable with the network interface for collectives of host tensors (gloo)."""
PROGRESS_EVERY = 0.1
"""Seconds between two progress reports of one phase."""


def main() -> int:
    """Run one rank, whose RankSpec is on standard input, until its leader closes it; returns the
    exit code."""
    with open(0, "rb", closefd=False) as given:
        spec = msgspec.json.decode(given.readline(), type=RankSpec)
    return run(spec)


def run(spec: RankSpec) -> int:
    """Run the rank of a spec. Returns 0 after the leader has closed it, or LEADER_GONE if it cannot
    connect.

    If it fails later, it reports why and ends the process at once with FAILED or LEADER_GONE,
    whatever its other threads do, because the other ranks wait for it.
    """
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # the leader gets it, drains and closes its ranks
    place = Place.from_plain(spec.place)
    logging.basicConfig(level=logging.INFO, format=f"%(levelname)s rank {place.rank}: %(message)s")
    tell_interface(spec, place, os.environ)
    try:
        steps, control = _channel(spec, place, "steps"), Control(_channel(spec, place, "control"), spec.beat)
    except (OSError, Gone):
        return LEADER_GONE
    try:
        serve(spec, place, steps, control)
    except Gone:
        os._exit(LEADER_GONE)
    except BaseException as error:
        control.fail(error)
        os._exit(FAILED)
    return 0


def tell_interface(spec: RankSpec, place: Place, environ: MutableMapping[str, str]) -> None:
    """Set the variables of `environ` that choose the network interface for collectives, to the one
    by which hosts reach each other; otherwise the libraries take the one that the host's name
    resolves to. Variables that are set already stay. The variables of torchrun are removed: ranks
    get their places from the spec."""
    for name in [name for name in environ if name in TORCHRUN or name.startswith("TORCHELASTIC_")]:
        del environ[name]
    is_one_host = not spec.own_address and place.neighbours == place.topology.world
    name = "lo" if is_one_host and sys.platform == "linux" else None
    if spec.own_address:
        name = interface_of(spec.own_address)
    if name is not None:
        for variable in (HOST_INTERFACE, *spec.interface_variables):
            environ.setdefault(variable, name)


def _channel(spec: RankSpec, place: Place, use: str) -> Channel:
    channel = Channel(connect(spec.address), spec.epoch)
    channel.send(Kind.HELLO, msgspec.msgpack.encode([spec.secret, place.rank, use, os.getpid()]))
    return channel


class Control:
    """The channel on which a rank reports its state. A thread of its own sends heartbeats, whatever
    the model does. `phase` and `step` are sent with them; the caller sets them."""

    def __init__(self, channel: Channel, beat: float) -> None:
        """Start the thread that sends heartbeats on `channel`. `beat`: seconds between two
        heartbeats."""
        self.phase, self.step = "starting", -1
        self._channel, self._beat = channel, beat
        self._lock = threading.Lock()
        self._is_closing = False
        self._told, self._next = "", 0.0
        self._parent = os.getppid()
        threading.Thread(target=self._run, name="beats", daemon=True).start()

    def progress(self, phase: str, done: int, total: int) -> None:
        """Report that `done` of `total` units of a phase are complete; a phase is reported at most
        every PROGRESS_EVERY seconds, and at its end."""
        self.phase, now = phase, time.monotonic()
        if phase != self._told or done == total or now >= self._next:
            self._told, self._next = phase, now + PROGRESS_EVERY
            self.say(Kind.PROGRESS, [phase, done, total])

    def fail(self, error: BaseException) -> None:
        """Send the last message: the error, whether it only follows from another rank's end, the
        exit code for the leader, and the phase."""
        follows = any(type(each).__name__ == "CollectiveError" for each in (error, error.__cause__, error.__context__))
        if isinstance(error, SglcoreError):
            text, code = str(error), error.exit_code
        else:
            logging.error("%s", "".join(traceback.format_exception(error)))
            text, code = f"{type(error).__name__}: {error}", 1
        self.say(Kind.FAILED, [text, follows, code, self.phase])

    def say(self, kind: Kind, values: Any) -> None:
        """Send a message with `values`, encoded as msgpack; if the leader is gone, the process
        ends. Thread-safe."""
        try:
            with self._lock:
                self._channel.send(kind, msgspec.msgpack.encode(values))
        except Gone:
            self._leave()

    def let_go(self) -> None:
        """Call it when this rank is closed: from now on the leader may close the channel without
        ending this process."""
        self._is_closing = True

    def _run(self) -> None:
        while not self._is_closing:
            # The leader sends nothing on this channel: readable means that the leader or its host
            # has ended.
            if is_readable(self._channel, self._beat) or os.getppid() != self._parent:
                self._leave()
            self.say(Kind.BEAT, [self.step, self.phase])

    def _leave(self) -> None:
        """End the process with LEADER_GONE, unless this rank is closed."""
        if not self._is_closing:
            os._exit(LEADER_GONE)


class KnownSampling:
    """Keeps the last sampling state that a batch brought. The leader sends the state once for a
    composition (`ScheduleBatch.composition`); later batches of the composition come without it."""

    def __init__(self) -> None:
        self._known: tuple[int, HostSampling] | None = None

    def completed(self, batch: ScheduleBatch) -> ScheduleBatch:
        """Return `batch` itself; if it has no sampling state, that of its composition is set,
        unless the composition is not the known one."""
        if batch.sampling is not None:
            self._known = batch.composition, batch.sampling
        elif self._known is not None and self._known[0] == batch.composition:
            batch.sampling = self._known[1]
        return batch


def serve(spec: RankSpec, place: Place, steps: Channel, control: Control) -> None:
    """Bring this rank up, report that it is ready, and run the steps that arrive until the leader
    closes it. Raises the exceptions of a step, and Gone."""
    config = config_of_plain(spec.config)
    worker, ready = start_rank(config, ChosenDevice.decode(spec.chosen), place, control)
    control.say(Kind.READY, ready)
    control.phase = "waiting"
    out: deque[Ticket] = deque()
    known = KnownSampling()
    while True:
        frame = steps.receive()
        if frame.kind is Kind.STEP:
            batch = known.completed(decode(frame.body))
            control.step, control.phase = batch.step, "a step"
            out.append(worker.submit(batch))
        elif frame.kind is Kind.COLLECT:
            result = worker.collect(out.popleft())
            if place.decides:
                steps.send(Kind.RESULT, encode(result))
            control.phase = "waiting"
        elif frame.kind is Kind.CLOSE:
            control.phase = "closing"
            worker.close()
            control.let_go()
            steps.send(Kind.CLOSED)
            return


def start_rank(
    config: EngineConfig, chosen: ChosenDevice, place: Place, control: Control
) -> tuple[ModelWorker, dict[str, Any]]:
    """Return the worker of this rank, and its report to the leader: limits, ledger, and seconds of
    bring-up steps. Waits for the other ranks."""
    folder = model_folder(config)
    choice = choose(config, DecisionLedger())
    check_same(choice.chosen, chosen)
    ledger = DecisionLedger(strict=config.strict)
    built, seconds = bring_up(config, folder, choice, ledger, control.progress, place)
    worker: ModelWorker = built["worker"]
    return worker, {"limits": asdict(worker.limits), "ledger": ledger.as_json(), "seconds": seconds}


if __name__ == "__main__":
    leave(main())
