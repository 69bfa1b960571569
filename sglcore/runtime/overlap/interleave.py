"""Interleaves two functions in one thread.

Where one would wait, it pauses, and the other continues. Each function has its own context
variables; the second runs in its own greenlet. State that torch keeps per thread (current stream,
inference mode) is shared, and neither may change it across a pause.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Generic, TypeVar

from greenlet import getcurrent, greenlet

Result = TypeVar("Result")


def _goes_on() -> None:
    """Do nothing: there is no other function to switch to."""


class Turn:
    """Belongs to one of two interleaved functions, which calls `pause` to let the other run until
    that one pauses or ends.
    """

    __slots__ = ("_skips", "_switch", "pause")

    def __init__(self, switch: Callable[[], object], skips: int = 0) -> None:
        """`switch` goes to the other function. The first `skips` pauses do nothing."""
        self._switch, self._skips = switch, skips
        self.pause: Callable[[], object] = self._skip if skips else switch

    def _skip(self) -> None:
        self._skips -= 1
        if not self._skips:
            self.pause = self._switch

    def goes_on(self) -> None:
        """Make later pauses do nothing: the other function does not run any more."""
        self.pause = _goes_on


_turn: ContextVar[Turn | None] = ContextVar("sglcore_turn", default=None)

current_turn: Callable[[], Turn | None] = _turn.get
"""Returns the turn of the running function; None if it is not interleaved with another."""


def pause() -> None:
    """Let the other function run until it pauses or ends; call before a wait.

    Does nothing if the running function is not interleaved with another.
    """
    turn = _turn.get()
    if turn is not None:
        turn.pause()


class _Second(Generic[Result]):
    """Runs the second function in its own greenlet.

    An exception in it is raised in the first function, at the point where that one paused.
    """

    __slots__ = ("_first", "_function", "_turn", "error", "result", "strand")

    def __init__(self, function: Callable[[], Result], stagger: int) -> None:
        self._function = function
        self.result: Result | None = None
        self.error: BaseException | None = None
        self.strand = greenlet(self._run)
        self.strand.gr_context = copy_context()
        self._first, self._turn = Turn(self.strand.switch, stagger), Turn(getcurrent().switch)

    def beside(self, function: Callable[[], Result]) -> Result:
        """Run the first function, `function`, and return its result; its pauses switch to the
        second, which may not have ended yet when this returns.
        """
        _turn.set(self._first)
        return function()

    def _run(self) -> None:
        _turn.set(self._turn)
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._first.goes_on()

    def finish(self) -> None:
        """Run the second function to its end, without further pauses; it may have ended already."""
        self._turn.goes_on()
        while not self.strand.dead:
            self.strand.switch()

    def ended(self, error: BaseException) -> BaseException:
        """End the second function and return the exception to raise after `error` left the first.

        The second function ends at its pause: its `finally` blocks run, without further pauses. The
        result is the exception that was raised first, with the other one as a note.
        """
        self._first.goes_on()
        self._turn.goes_on()
        first, second = self.error or error, error
        if self.error is None:
            try:
                self.strand.throw()
            except BaseException as raised:
                second = raised
        if second is not first:
            first.add_note(f"the other micro-batch failed too, while it was stopped: {second!r}")
        return first


def take_turns(first: Callable[[], Result], second: Callable[[], Result], stagger: int = 0) -> tuple[Result, Result]:
    """Run both functions interleaved and return both results.

    The first starts and passes `stagger` pauses before the second starts. An exception in one of
    them is raised after the other was ended at its pause; an exception from that is added as a
    note.
    """
    other = _Second(second, stagger)
    try:
        result = copy_context().run(other.beside, first)
        other.finish()
    except BaseException as error:
        raise other.ended(error)  # noqa: B904
    if other.error is not None:
        raise other.error
    return result, other.result  # pyright: ignore[reportReturnType]
