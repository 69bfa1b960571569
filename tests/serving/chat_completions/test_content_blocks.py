"""An answer as blocks: when each opens, grows and closes, which log-probabilities belong to it, and
the arguments of its calls."""

from __future__ import annotations

from typing import Any

import pytest

from sglcore.schedule.request_output import TokenLogprob
from sglcore.serving.apis.content_blocks import Block, Blocks
from sglcore.serving.chat.conversation import UNREADABLE
from sglcore.serving.chat.parsers.delta import Delta

ONE, TWO, THREE = (TokenLogprob(token, -0.5, 1) for token in (1, 2, 3))


def start(index: int, name: str = "f") -> Delta:
    return Delta("tool_start", index=index, name=name, call_id=f"call_{index}")


def arguments(text: str, index: int) -> Delta:
    return Delta("tool_arguments", text, index)


def changes(*deltas: Delta) -> list[tuple[str, int, str]]:
    """Kind, block and text of each change, the end included."""
    blocks = Blocks()
    found = [change for delta in deltas for change in blocks.take(delta)] + blocks.finish()
    assert [block.index for block in blocks.all] == list(range(len(blocks.all))) and not blocks.finish()
    return [(change.kind, change.block.index, change.text) for change in found]


@pytest.mark.parametrize(
    ("deltas", "wanted"),
    [
        ([], []),
        ([Delta("content", "")], [("opened", 0, ""), ("closed", 0, "")]),
        (
            [Delta("content", "a"), Delta("content", "b")],
            [("opened", 0, ""), ("grew", 0, "a"), ("grew", 0, "b"), ("closed", 0, "")],
        ),
        (
            [Delta("content", "a"), Delta("reasoning", "b"), Delta("content", "c")],
            [
                *[("opened", 0, ""), ("grew", 0, "a"), ("closed", 0, "")],
                *[("opened", 1, ""), ("grew", 1, "b"), ("closed", 1, "")],
                *[("opened", 2, ""), ("grew", 2, "c"), ("closed", 2, "")],
            ],
        ),
        (
            [start(0), arguments("{", 0), arguments("}", 0)],
            [("opened", 0, ""), ("grew", 0, "{"), ("grew", 0, "}"), ("closed", 0, "")],
        ),
        ([start(0), start(1)], [("opened", 0, ""), ("closed", 0, ""), ("opened", 1, ""), ("closed", 1, "")]),
        (
            [start(0), start(0), arguments("{}", 0)],
            [("opened", 0, ""), ("closed", 0, ""), ("opened", 1, ""), ("grew", 1, "{}"), ("closed", 1, "")],
        ),
        (
            [start(0), arguments("a", 0), arguments("b", 1)],
            [
                *[("opened", 0, ""), ("grew", 0, "a"), ("closed", 0, "")],
                *[("opened", 1, ""), ("grew", 1, "b"), ("closed", 1, "")],
            ],
        ),
    ],
)
def test_a_block_is_open_as_long_as_its_kind_and_its_call_go_on(deltas: Any, wanted: Any) -> None:
    assert changes(*deltas) == wanted


def test_a_call_has_the_name_and_id_that_it_began_with() -> None:
    blocks = Blocks()
    for delta in (Delta("content", "a"), start(0, "f"), arguments('{"x"', 0), start(1, "g"), arguments(": 1}", 1)):
        blocks.take(delta)
    assert [(block.kind, block.name, block.call_id, block.text) for block in blocks.all] == [
        ("text", "", "", "a"),
        ("tool", "f", "call_0", '{"x"'),
        ("tool", "g", "call_1", ": 1}"),
    ]


def test_log_probabilities_of_silent_tokens_stand_once_with_the_next_text_and_with_nothing_else() -> None:
    blocks = Blocks()
    assert blocks.take(None, [ONE]) == [] == blocks.take(None, [TWO])
    _, grown = blocks.take(Delta("content", "a"), [THREE])
    assert grown.logprobs == (ONE, TWO, THREE)
    (again,) = blocks.take(Delta("content", "b"), [ONE])
    assert again.logprobs == (ONE,) and blocks.all[0].logprobs == [ONE, TWO, THREE, ONE]
    (silent,) = blocks.take(Delta("content", ""), [TWO])
    assert (silent.kind, silent.text, silent.logprobs) == ("grew", "", (TWO,))
    assert blocks.take(Delta("content", "")) == []
    blocks.take(None, [ONE])
    *_, thought = blocks.take(Delta("reasoning", "r"), [TWO])
    *_, text = blocks.take(Delta("content", "c"), [THREE])
    assert (thought.logprobs, text.logprobs) == ((), (THREE,))


def test_an_answer_without_any_block_is_an_empty_text() -> None:
    blocks = Blocks()
    (opened,) = blocks.force_text()
    assert (opened.kind, opened.block.kind, opened.block.index) == ("opened", "text", 0)
    assert blocks.force_text() == [] and [change.kind for change in blocks.finish()] == ["closed"]
    for delta in (Delta("reasoning", "r"), start(0), Delta("content", "")):
        begun = Blocks()
        begun.take(delta)
        assert begun.force_text() == []


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", {}),
        ("{}", {}),
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ('{"a": "Mon', {"a": "Mon"}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": 1, "b":', {"a": 1}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ("[1]", {UNREADABLE: "[1]"}),
        ('"a"', {UNREADABLE: '"a"'}),
        ("5", {UNREADABLE: "5"}),
        ("null", {UNREADABLE: "null"}),
        ("{a}", {UNREADABLE: "{a}"}),
    ],
)
def test_arguments_are_what_of_an_object_is_complete_and_else_the_text(text: str, wanted: Any) -> None:
    assert Block(0, "tool", pieces=list(text)).arguments == wanted
