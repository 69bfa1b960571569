"""Heartbeats: an engine process says each second that it lives, and how many rounds its loop has
made; the frontend counts the seconds in which it did not, or in which the loop stood still.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import msgspec
import zmq

from sglcore.serving.replicas.channel import use_keys
from sglcore.serving.replicas.ipc import Address, Beat

BEAT_SECONDS = 1.0
"""Between two heartbeats, and between two looks at them."""
QUIET_TICKS = 5
"""Looks without a heartbeat, or without a new round, after which other replicas are preferred."""
MOST_QUEUED = 4
"""Heartbeats that wait for a frontend that does not take them; more are dropped."""


class Heartbeat:
    """An engine's end. Its thread beats whatever the process's loop does, as long as the process
    runs."""

    def __init__(self, address: Address, seconds: float = BEAT_SECONDS) -> None:
        """Begins at once. `seconds` between two beats."""
        self._address, self._seconds, self._rounds = address, seconds, 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def count(self) -> None:
        """The loop has made a round; does not wait."""
        self._rounds += 1

    def close(self) -> None:
        """Beat no more; waits for the thread. Idempotent."""
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
    """The frontend's end. Times are looks (`tick`) of the frontend, so what it slept through itself
    counts as one; nothing counts before the first heartbeat, since a process may wait long for its
    machine."""

    def __init__(self) -> None:
        self.silence = 0
        """Looks since the process was heard."""
        self.standstill = 0
        """Looks since its loop made a round, of those at which the process was heard."""
        self._rounds = -1
        self._has_begun = False

    def hear(self) -> None:
        """The process has said something."""
        self.silence = 0

    def beat(self, rounds: int) -> None:
        """A heartbeat has come."""
        self._has_begun = True
        self.silence = 0
        if rounds != self._rounds:
            self._rounds, self.standstill = rounds, 0

    def tick(self) -> None:
        """The frontend looks."""
        if self._has_begun:
            self.silence += 1
            self.standstill += self.silence < QUIET_TICKS

    def begin_rounds(self) -> None:
        """The loop begins; before, nothing made rounds."""
        self.standstill = 0

    @property
    def is_silent(self) -> bool:
        """No sign of life for some seconds."""
        return self.silence >= QUIET_TICKS

    @property
    def is_still(self) -> bool:
        """It lives, and a step takes long, or for ever."""
        return self.standstill >= QUIET_TICKS
