"""Two functions take turns in one thread: where one would wait, it pauses, and the other runs on.

Each has a context of its own, so that what one sets in a context variable the other never sees; the second has a greenlet of its
own too. What torch keeps by thread (the current stream, inference mode) is common to both, and neither may change it across a pause.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Generic, TypeVar

from greenlet import getcurrent, greenlet

Result = TypeVar("Result")


def _goes_on() -> None:
    """There is no other."""


class Turn:
    """That of one of two functions: `pause` lets the other run until that one pauses or ends."""

    __slots__ = ("_skips", "_switch", "pause")

    def __init__(self, switch: Callable[[], object], skips: int = 0) -> None:
        """`switch` goes to the other. The first `skips` pauses are none."""
        self._switch, self._skips = switch, skips
        self.pause: Callable[[], object] = self._skip if skips else switch

    def _skip(self) -> None:
        self._skips -= 1
        if not self._skips:
            self.pause = self._switch

    def goes_on(self) -> None:
        """From here on nobody runs while this one pauses."""
        self.pause = _goes_on


_turn: ContextVar[Turn | None] = ContextVar("sglcore_turn", default=None)

current_turn: Callable[[], Turn | None] = _turn.get
"""That of the function which runs, where another takes turns with it."""


def pause() -> None:
    """Here something is waited for: the other of two functions runs until it pauses too. Does nothing elsewhere."""
    turn = _turn.get()
    if turn is not None:
        turn.pause()


class _Second(Generic[Result]):
    """The second of two functions, in a greenlet beside that of the first, into which what it raises goes where that one paused."""

    __slots__ = ("_first", "_function", "_turn", "error", "result", "strand")

    def __init__(self, function: Callable[[], Result], stagger: int) -> None:
        self._function = function
        self.result: Result | None = None
        self.error: BaseException | None = None
        self.strand = greenlet(self._run)
        self.strand.gr_context = copy_context()
        self._first, self._turn = Turn(self.strand.switch, stagger), Turn(getcurrent().switch)

    def beside(self, function: Callable[[], Result]) -> Result:
        """What the first gives."""
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
        """Run to its end, by itself."""
        self._turn.goes_on()
        while not self.strand.dead:
            self.strand.switch()

    def ended(self, error: BaseException) -> BaseException:
        """`error` came out of the first, by itself or because of this one, which ends where it paused: its `finally` blocks run, and
        nothing pauses any more. What was raised first, with the other as a note."""
        self._first.goes_on()
        self._turn.goes_on()
        first, second = self.error or error, error
        if self.error is None:
            try:
                self.strand.throw()
            except BaseException as raised:
                second = raised
        if second is not first:
            first.add_note(f"the other half failed too, while it was ended: {second!r}")
        return first


def take_turns(first: Callable[[], Result], second: Callable[[], Result], stagger: int = 0) -> tuple[Result, Result]:
    """What both give. The first starts, and is `stagger` pauses ahead: it goes through so many before the second starts. Raises what
    one of them raised, once the other has been ended where it paused; what that raises meanwhile becomes a note."""
    other = _Second(second, stagger)
    try:
        result = copy_context().run(other.beside, first)
        other.finish()
    except BaseException as error:
        raise other.ended(error)  # noqa: B904
    if other.error is not None:
        raise other.error
    return result, other.result  # pyright: ignore[reportReturnType]
