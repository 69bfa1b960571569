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
    """One of two functions: its greenlet, and `other`, whose turn it is when this one pauses; None once both are to end."""

    __slots__ = ("_function", "_skips", "other", "result", "strand")

    def __init__(self, function: Callable[[], Result], skips: int) -> None:
        """The first `skips` pauses are none."""
        self._function, self._skips = function, skips
        self.other: greenlet | None = None
        self.result: Result | None = None
        self.strand = greenlet(self._run)
        self.strand.gr_context = copy_context()

    def pause(self) -> None:
        """Let the other run until it pauses or ends; at once back where it has ended."""
        if self._skips:
            self._skips -= 1
        elif self.other is not None and not self.other.dead:
            self.other.switch()

    def _run(self) -> None:
        _turn.set(self)
        self.result = self._function()


_turn: ContextVar[Turn[Any] | None] = ContextVar("sglcore_turn", default=None)


def takes_turns() -> bool:
    """Whether another function runs while this one pauses."""
    return _turn.get() is not None


def pause() -> None:
    """Here something is waited for: the other of two functions runs until it pauses too. Does nothing elsewhere."""
    turn = _turn.get()
    if turn is not None:
        turn.pause()


def take_turns(
    first: Callable[[], Result], second: Callable[[], Result], stagger: int = 0
) -> tuple[Result, Result]:
    """What both give. The first starts, and is `stagger` pauses ahead: it goes through so many before the second starts. Raises what
    one of them raised, once the other has been ended where it paused; what that raises meanwhile becomes a note."""
    turns = Turn(first, stagger), Turn(second, 0)
    turns[0].other, turns[1].other = turns[1].strand, turns[0].strand
    try:
        for turn in turns:
            while not turn.strand.dead:
                turn.strand.switch()
    except BaseException as error:
        _end(turns, error)
        raise
    finally:
        for turn in turns:
            turn.other = None
    return turns[0].result, turns[1].result  # pyright: ignore[reportReturnType]


def _end(turns: tuple[Turn[Any], Turn[Any]], error: BaseException) -> None:
    """End what has not ended: its `finally` blocks run, and nothing pauses any more."""
    for turn in turns:
        turn.other = None
    for turn in turns:
        if turn.strand.dead:
            continue
        try:
            turn.strand.throw()
        except BaseException as second:
            error.add_note(f"the other half failed too, while it was ended: {second!r}")
