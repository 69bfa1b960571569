"""Two functions alternate at their pauses: the first begins and stays ahead, each has its own
context variables, and an error in one ends the other."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import pytest
from greenlet import GreenletExit

from sglcore.runtime.overlap import interleave
from sglcore.runtime.overlap.interleave import current_turn, pause, take_turns

COLOUR: ContextVar[str] = ContextVar("colour", default="none")


def stages(name: str, count: int, seen: list[str]) -> Callable[[], str]:
    def run() -> str:
        for stage in range(count):
            seen.append(f"{name}{stage}")
            if stage < count - 1:
                pause()
        return name

    return run


def order(stagger: int, first: int = 3, second: int = 3) -> str:
    seen: list[str] = []
    assert take_turns(stages("a", first, seen), stages("b", second, seen), stagger) == ("a", "b")
    return " ".join(seen)


def test_the_first_begins_and_is_ahead_by_the_stagger() -> None:
    assert order(0) == "a0 b0 a1 b1 a2 b2"
    assert order(1) == "a0 a1 b0 a2 b1 b2"
    assert order(2) == "a0 a1 a2 b0 b1 b2"
    assert order(9) == order(2)


def test_one_that_has_ended_is_waited_for_no_more() -> None:
    assert order(0, 1, 4) == "a0 b0 b1 b2 b3"
    assert order(0, 4, 1) == "a0 b0 a1 a2 a3"
    assert order(1, 4, 2) == "a0 a1 b0 a2 b1 a3"


def test_a_pause_outside_of_turns_does_nothing() -> None:
    assert current_turn() is None
    pause()


def test_each_has_a_context_of_its_own_that_begins_as_the_callers() -> None:
    def painted(colour: str) -> Callable[[], list[str]]:
        def run() -> list[str]:
            found = [COLOUR.get()]
            for shade in ("light", "dark"):
                COLOUR.set(f"{shade} {colour}")
                pause()
                assert current_turn() is not None
                found.append(COLOUR.get())
            return found

        return run

    outer = COLOUR.set("grey")
    try:
        first, second = take_turns(painted("red"), painted("blue"))
        assert COLOUR.get() == "grey"
    finally:
        COLOUR.reset(outer)
    assert first == ["grey", "light red", "dark red"]
    assert second == ["grey", "light blue", "dark blue"]


def paused_often(seen: list[str]) -> Callable[[], None]:
    def run() -> None:
        try:
            for _ in range(9):
                pause()
        except BaseException as error:
            seen.append(f"ended by {type(error).__name__}")
            raise
        finally:
            pause()
            seen.append("cleaned")

    return run


def failing(after: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(after):
            pause()
        raise ValueError("first")

    return run


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_error_in_one_ends_the_other_and_is_raised(is_first: bool, after: int) -> None:
    seen: list[str] = []
    pair = (failing(after), paused_often(seen)) if is_first else (paused_often(seen), failing(after))
    with pytest.raises(ValueError, match="first"):
        take_turns(*pair)
    how = GreenletExit if is_first else ValueError
    assert seen == ([] if is_first and not after else [f"ended by {how.__name__}", "cleaned"])
    assert current_turn() is None


def test_what_fails_while_it_is_ended_is_a_note_on_the_first_error() -> None:
    def other() -> None:
        try:
            pause()
        finally:
            raise KeyError("second")

    with pytest.raises(ValueError, match="first") as caught:
        take_turns(failing(1), other)
    assert caught.value.__notes__ == ["the other micro-batch failed too, while it was stopped: KeyError('second')"]


def test_an_error_that_is_swallowed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    own = interleave._Second.beside

    def swallowing(self: interleave._Second[None], function: Callable[[], None]) -> None:
        try:
            own(self, function)
        except ValueError:
            return

    monkeypatch.setattr(interleave._Second, "beside", swallowing)
    with pytest.raises(pytest.fail.Exception):
        test_an_error_in_one_ends_the_other_and_is_raised(is_first=True, after=0)


def test_an_error_of_the_second_that_the_first_swallows_is_raised_nonetheless() -> None:
    def swallowing() -> None:
        try:
            pause()
        except ValueError:
            pause()

    with pytest.raises(ValueError, match="first"):
        take_turns(swallowing, failing(0))
