"""Two functions take turns in one thread: where one would wait, it pauses, and the other runs on.

Each is a greenlet with a context of its own, so that what one sets in a context variable the other never sees. What torch keeps by
thread (the current stream, inference mode) is common to both, and neither may change it across a pause.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any, Generic, TypeVar

from greenlet import greenlet

Result = TypeVar("Result")


class Turn(Generic[Result]):
    """One of two functions: its greenlet, and `pause`, which lets the other run until that one pauses or ends."""

    __slots__ = ("_function", "_other", "_skips", "pause", "result", "strand")

    def __init__(self, function: Callable[[], Result], skips: int) -> None:
        """The first `skips` pauses are none."""
        self._function, self._skips = function, skips
        self._other: Turn[Any] | None = None
        self.pause: Callable[[], object] = _goes_on
        self.result: Result | None = None
        self.strand = greenlet(self._run)
        self.strand.gr_context = copy_context()

    def beside(self, other: Turn[Any] | None) -> None:
        """From here on `other` runs while this one pauses; None: nobody does, and it goes on."""
        self._other = other
        if other is None:
            self.pause = _goes_on
        else:
            self.pause = self._skip if self._skips else other.strand.switch

    def _skip(self) -> None:
        self._skips -= 1
        self.beside(self._other)

    def _run(self) -> None:
        _turn.set(self)
        try:
            self.result = self._function()
        finally:
            if self._other is not None:
                self._other.beside(None)


def _goes_on() -> None:
    """There is no other."""


_turn: ContextVar[Turn[Any] | None] = ContextVar("sglcore_turn", default=None)

current_turn: Callable[[], Turn[Any] | None] = _turn.get
"""That of the function which runs, where another takes turns with it."""


def pause() -> None:
    """Here something is waited for: the other of two functions runs until it pauses too. Does nothing elsewhere."""
    turn = _turn.get()
    if turn is not None:
        turn.pause()


def take_turns(first: Callable[[], Result], second: Callable[[], Result], stagger: int = 0) -> tuple[Result, Result]:
    """What both give. The first starts, and is `stagger` pauses ahead: it goes through so many before the second starts. Raises what
    one of them raised, once the other has been ended where it paused; what that raises meanwhile becomes a note."""
    turns = Turn(first, stagger), Turn(second, 0)
    turns[0].beside(turns[1])
    turns[1].beside(turns[0])
    try:
        for turn in turns:
            while not turn.strand.dead:
                turn.strand.switch()
    except BaseException as error:
        _end(turns, error)
        raise
    finally:
        for turn in turns:
            turn.beside(None)
    return turns[0].result, turns[1].result  # pyright: ignore[reportReturnType]


def _end(turns: tuple[Turn[Any], Turn[Any]], error: BaseException) -> None:
    """End what has not ended: its `finally` blocks run, and nothing pauses any more."""
    for turn in turns:
        turn.beside(None)
    for turn in turns:
        if turn.strand.dead:
            continue
        try:
            turn.strand.throw()
        except BaseException as second:
            error.add_note(f"the other half failed too, while it was ended: {second!r}")
