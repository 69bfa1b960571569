"""Heartbeats: an engine process sends one each second, with the number of rounds of its loop; the
frontend counts the seconds without a heartbeat, and without a new round."""

from __future__ import annotations

import threading
from contextlib import suppress

import msgspec
import zmq

from sglcore.serving.replicas.channel import use_keys
from sglcore.serving.replicas.ipc import Address, Beat

BEAT_SECONDS = 1.0
"""Seconds between two heartbeats, and between two checks by the frontend."""
QUIET_TICKS = 5
"""Number of checks without a heartbeat, or without a new round, after which other replicas are
preferred."""
MOST_QUEUED = 4
"""Maximum number of heartbeats that wait for a frontend that does not read them; further ones are
dropped."""


class Heartbeat:
    """The engine's end: it sends heartbeats to the frontend. A thread sends them as long as the
    process runs, whatever the loop does."""

    def __init__(self, address: Address, seconds: float = BEAT_SECONDS) -> None:
        """Start a thread that sends heartbeats to `address.beats`; does not wait for a connection.
        `seconds`: between two heartbeats."""
        self._address, self._seconds, self._rounds = address, seconds, 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def count(self) -> None:
        """Count a round of the engine's loop, for the next heartbeat; does not wait. Called by the
        loop's thread."""
        self._rounds += 1

    def close(self) -> None:
        """Stop the heartbeats; waits for the thread. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _beat(self) -> None:
        with zmq.Context(io_threads=1) as context, context.socket(zmq.PUSH) as socket:
            socket.linger, socket.sndhwm = 0, MOST_QUEUED
            use_keys(socket, self._address)
            socket.connect(self._address.beats)
            while True:
                with suppress(zmq.Again):
                    socket.send(msgspec.msgpack.encode(Beat(self._rounds)), zmq.NOBLOCK)
                if self._closing.wait(self._seconds):
                    return


class Pulse:
    """The frontend's end for one engine. Times are counted in checks (`tick`) by the frontend, so
    that a time in which the frontend itself slept counts as one. Nothing is counted before the
    first heartbeat, because a process may wait long for its machine."""

    def __init__(self) -> None:
        self.silence = 0
        """Checks since the last sign of life."""
        self.standstill = 0
        """Checks since the loop's last round; checks while the engine is silent are not counted."""
        self._rounds = -1
        self._has_begun = False

    def hear(self) -> None:
        """Note that a message of the engine, or a heartbeat, arrived: it is not silent."""
        self.silence = 0

    def beat(self, rounds: int) -> None:
        """Note that a heartbeat arrived, with this number of rounds."""
        self._has_begun = True
        self.silence = 0
        if rounds != self._rounds:
            self._rounds, self.standstill = rounds, 0

    def tick(self) -> None:
        """Count a check by the frontend."""
        if self._has_begun:
            self.silence += 1
            self.standstill += self.silence < QUIET_TICKS

    def begin_rounds(self) -> None:
        """Count checks without a new round from now on, because the engine's loop begins now: those
        during its start are forgotten."""
        self.standstill = 0

    @property
    def is_silent(self) -> bool:
        """Whether nothing arrived from the engine in the last QUIET_TICKS checks; false before its
        first heartbeat."""
        return self.silence >= QUIET_TICKS

    @property
    def is_still(self) -> bool:
        """Whether the loop did no round in QUIET_TICKS checks, not counting those while the engine
        is silent: a step takes long, or hangs."""
        return self.standstill >= QUIET_TICKS
