"""The steps of a parser: what each reads, however the text is split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglcore.serving.chat.parsers.delta import Call, Delta, calls_of, joined, text_of
from sglcore.serving.chat.parsers.scanner import Malformed, Scan, Scanner

Step = Callable[[Scanner], Scan[Any]]


def ran(step: Step, text: str, size: int) -> tuple[Any, str]:
    """Return the result of a step (or Malformed) over text in parts of `size`, and the text that it
    left unread."""
    s, found = Scanner(lambda: "id"), list[Any]()

    def steps() -> Iterator[None]:
        try:
            found.append((yield from step(s)))
        except Malformed:
            found.append(Malformed)
        yield from s.pass_until((), "content")

    running = steps()
    for begin in range(0, len(text), size):
        s.push(text[begin : begin + size])
        next(running, None)
    s.end()
    next(running, None)
    return found[0], text_of(s.taken(), "content")


def upto(*marks: str, limit: int | None = None) -> Step:
    return lambda s: s.upto(marks, limit)


@pytest.mark.parametrize(
    ("step", "text", "found", "left"),
    [
        (upto("]"), "name]rest", ("name", "]"), "rest"),
        (upto("]", limit=4), "name]rest", ("name", "]"), "rest"),
        (upto("]", limit=3), "name]rest", Malformed, None),
        (upto("]", limit=0), "]rest", ("", "]"), "rest"),
        (upto("]", limit=4), "names without an end", Malformed, None),
        (upto("]"), "no end", Malformed, ""),
        (upto("<b>", "<a>"), "x<a>y<b>", ("x", "<a>"), "y<b>"),
        (lambda s: s.take("word"), "  word rest", True, " rest"),
        (lambda s: s.take("word"), "  wore rest", False, "  wore rest"),
        (lambda s: s.take("word"), " \n wo", False, " \n wo"),
        (lambda s: s.literal("word"), "\n\t word.", None, "."),
        (lambda s: s.literal("word"), "wor", Malformed, "wor"),
        (lambda s: s.starts("word"), "  word", True, "word"),
        (lambda s: s.starts("word"), "  other", False, "other"),
        (lambda s: s.starts("word"), "wo", False, "wo"),
        (lambda s: s.peek(), " \r\n\tab", "a", "ab"),
        (lambda s: s.peek(), "  ", "", ""),
        (lambda s: s.skip("\n"), "\n\nab", None, "\nab"),
        (lambda s: s.skip("\n"), "ab", None, "ab"),
        (lambda s: s.skip("\n"), " \nab", None, " \nab"),
        (lambda s: s.skip("\n"), "", None, ""),
        (lambda s: s.more(), "a", True, "a"),
        (lambda s: s.more(), "", False, ""),
        (lambda s: s.json_object(lambda text: None), '{"a": 1} rest', True, " rest"),
        (lambda s: s.json_object(lambda text: None), '{"a": !} rest', False, "!} rest"),
        (lambda s: s.json_object(lambda text: None), '{"a": 1', False, ""),
        (lambda s: s.hand_on(("]",), lambda text: None), "a]b", "]", "b"),
        (lambda s: s.hand_on(("]",), lambda text: None), "ab", "", ""),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_step_reads_what_it_says_and_no_more(step: Step, text: str, size: int, found: Any, left: str | None) -> None:
    result, rest = ran(step, text, size)
    assert result == found and (left is None or rest == left)


@pytest.mark.parametrize("size", [1, 2, 100])
def test_an_attempt_that_fails_gives_the_text_back_and_keeps_its_deltas(size: int) -> None:
    def step(s: Scanner) -> Scan[Any]:
        inner = yield from s.attempt(both(s))
        assert inner is None
        return (yield from s.upto(("c",)))[0]

    def both(s: Scanner) -> Scan[str]:
        yield from s.literal("a")
        assert (yield from s.attempt(s.literal("x"))) is None
        s.start_call("f")
        yield from s.literal("bd")
        return "read"

    assert ran(step, " abcd", size) == (" ab", "d")


@pytest.mark.parametrize("marks", [("ab", "abc"), ("abc", "ab")])
def test_of_two_marks_that_begin_together_the_longer_one_is_read(marks: tuple[str, ...]) -> None:
    assert ran(upto(*marks), "xabcd", 100) == (("x", "abc"), "d")


def said(*steps: Callable[[Scanner], Any]) -> str:
    """Return the text that a client sees after some steps, up to the end of the answer."""
    s = Scanner(lambda: "id")
    for step in steps:
        step(s)
    s.end()
    next(s.pass_until((), "content"), None)
    return text_of(s.taken(), "content")


def says(text: str) -> Callable[[Scanner], Any]:
    return lambda s: s.say("content", text)


def ends_block(joint: str = "") -> Callable[[Scanner], Any]:
    return lambda s: s.border(joint)


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([says("a "), says(" b \n")], "a  b \n"),
        ([says("a \n"), ends_block(), says(" \n"), says(""), says("\n b ")], "ab "),
        ([says("a \n"), ends_block("\n\n"), says("\n"), says(" b"), says(" c")], "a\n\nb c"),
        ([says("a"), ends_block("\n\n"), says(" \n")], "a"),
        ([says("a"), ends_block("\n\n"), ends_block(), says("b")], "ab"),
        ([says("a "), lambda s: s.start_call("f"), says(" b")], "ab"),
        ([says("  \n")], "  \n"),
    ],
)
def test_white_space_is_dropped_next_to_a_block_alone(steps: list[Callable[[Scanner], Any]], wanted: str) -> None:
    assert said(*steps) == wanted


def test_calls_are_numbered_and_those_without_an_id_get_a_new_one() -> None:
    new = iter("xyz")
    s = Scanner(lambda: next(new))
    assert [s.start_call("f"), s.start_call("g", "own"), s.start_call("h")] == [0, 1, 2]
    s.arguments(1)("")
    s.arguments(1)("{}")
    assert s.taken()[3:] == [Delta("tool_arguments", "{}", 1)] and s.taken() == []
    s.start_call("i")
    assert s.taken() == [Delta("tool_start", "", 3, "i", "z")]


def test_text_is_passed_on_as_it_comes_except_what_may_begin_a_mark() -> None:
    s = Scanner(lambda: "id", controls=("<end>",))
    step = s.pass_until(("<tool>",), "content")
    shown: list[str] = []
    for part in ("Hel", "lo <", "b> <e", "nd>", " x <en", "d <to", "ol>"):
        s.push(part)
        next(step, None)
        shown.append(text_of(s.taken(), "content"))
    assert shown == ["Hel", "lo", " <b>", "", "  x", " <end", ""]


START, OTHER = Delta("tool_start", "", 0, "f", "x"), Delta("tool_start", "", 1, "g", "y")


def test_neighbours_of_one_kind_and_call_are_joined_and_no_others() -> None:
    content, reasoning = Delta("content", "a"), Delta("reasoning", "b")
    first, second = Delta("tool_arguments", "1", 0), Delta("tool_arguments", "2", 1)
    assert joined([content, content, reasoning, content]) == [Delta("content", "aa"), reasoning, content]
    assert joined([START, OTHER, first, second, second]) == [START, OTHER, first, Delta("tool_arguments", "22", 1)]
    assert joined([START, START]) == [START, START] and joined([]) == []


def test_arguments_belong_to_the_call_that_they_name() -> None:
    parts = [("{", 0), ("[", 1), ("}", 0), ("]", 1)]
    found = calls_of([START, OTHER, *(Delta("tool_arguments", text, index) for text, index in parts)])
    assert found == [Call("f", "{}", "x"), Call("g", "[]", "y")]


@pytest.mark.parametrize(
    ("deltas", "said"),
    [
        ([START, START], "call 0 starts after 1 calls"),
        ([OTHER], "call 1 starts after 0 calls"),
        ([START, OTHER, START], "call 0 starts after 2 calls"),
        ([Delta("tool_arguments", "{}", 0)], "arguments of call 0 come before"),
        ([START, Delta("tool_arguments", "{}", 1)], "arguments of call 1 come before"),
    ],
)
def test_calls_out_of_order_are_an_error(deltas: list[Delta], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        calls_of(deltas)
