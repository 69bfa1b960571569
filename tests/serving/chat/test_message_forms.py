"""Messages in each form that a template may need."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest

from sglcore.engine.tokenizers.chat_template import TextError
from sglcore.serving.chat.conversation import UNREADABLE, MessageForm, as_template_reads


def call(arguments: Any = "{}", name: str = "f", call_id: str | None = "a") -> dict[str, Any]:
    function = {"name": name} if arguments is None else {"name": name, "arguments": arguments}
    return {"id": call_id, "function": function}


def told(*calls: dict[str, Any], **given: Any) -> dict[str, Any]:
    return {"role": "assistant", **({"tool_calls": list(calls)} if calls else {}), **given}


def read(*messages: dict[str, Any], **form: Any) -> list[dict[str, Any]]:
    """Return the messages for a template; the given ones must not change."""
    before = deepcopy(messages)
    found = as_template_reads(messages, MessageForm(**form))
    assert messages == before
    return found


def written(calls: Any) -> str:
    return "|".join(json.dumps(each["function"]["arguments"]) for each in calls)


@pytest.mark.parametrize(
    ("given", "as_object", "as_text"),
    [
        (None, {}, "{}"),
        ("", {}, ""),
        ("{}", {}, "{}"),
        ('{"a": "é"}', {"a": "é"}, '{"a": "é"}'),
        ({"a": "é"}, {"a": "é"}, '{"a": "é"}'),
        ("[1]", {UNREADABLE: "[1]"}, "[1]"),
        ("null", {UNREADABLE: "null"}, "null"),
        ('"a"', {UNREADABLE: '"a"'}, '"a"'),
        ('{"a"', {UNREADABLE: '{"a"'}, '{"a"'),
    ],
)
def test_arguments_are_an_object_or_text_as_the_template_wants_them(
    given: Any, as_object: dict[str, Any], as_text: str
) -> None:
    def arguments(**form: Any) -> Any:
        (found,) = read(told(call(given)), **form)
        return found["tool_calls"][0]["function"]["arguments"]

    assert arguments() == as_object and arguments(arguments=False) == as_text
    for takes_object in (True, False):
        (found,) = read(told(call(given)), write=written, arguments=takes_object)
        assert found["content"] == json.dumps(as_object) and "tool_calls" not in found


@pytest.mark.parametrize(("is_empty", "nothing"), [(False, None), (True, "")])
def test_a_message_without_content_has_none_or_an_empty_one_if_it_has_calls(
    is_empty: bool, nothing: str | None
) -> None:
    first, second, both = read(told(call()), told(), told(call(), call(), content=None), empty=is_empty)
    assert first["content"] == both["content"] == nothing and second["content"] == ""
    split = read(told(call(call_id="a"), call(call_id="b"), content="So."), empty=is_empty, single=True)
    assert [each["content"] for each in split] == ["So.", nothing]
    (joined,) = read(told(call(), content="c", reasoning="t"), empty=is_empty, joined=True)
    assert joined["content"] == nothing and joined["thinking"] == "t\n\nc"


@pytest.mark.parametrize(
    ("message", "form", "content", "thoughts"),
    [
        (told(call(), content="c", reasoning="t"), {}, "c", "t"),
        (told(content="c", reasoning="t"), {"joined": True}, "c", "t"),
        (told(call(), content="c"), {"joined": True}, "c", None),
        (told(call(), content="", reasoning="t"), {"joined": True}, "", "t"),
        (told(call(), content=None, reasoning="t"), {"joined": True}, None, "t"),
        (
            told(call(), content="c", reasoning="t"),
            {"joined": True, "parts": True},
            [{"type": "text", "text": "c"}],
            "t",
        ),
        (told(content="c", reasoning="t", reasoning_content="r"), {}, "c", "r"),
        (told(content="c", reasoning="", reasoning_content=None), {}, "c", None),
    ],
)
def test_reasoning_has_each_of_its_names_and_stands_with_content_only_beside_calls(
    message: dict[str, Any], form: dict[str, Any], content: Any, thoughts: str | None
) -> None:
    (found,) = read(message, **form)
    assert found["content"] == content
    assert {found.get(name) for name in ("reasoning_content", "reasoning", "thinking")} == {thoughts}


def test_calls_that_are_written_follow_the_content_of_their_message() -> None:
    calls, parts = [call('{"a": 1}'), call('{"b": 2}')], [{"type": "text", "text": "So."}]
    text = '{"a": 1}|{"b": 2}'
    assert [each["content"] for each in read(told(*calls, content="So."), told(*calls), write=written)] == [
        f"So.{text}",
        text,
    ]
    (found,) = read(told(*calls, content=parts), write=written, parts=True)
    assert found["content"] == [*parts, {"type": "text", "text": text}]


def test_content_is_text_or_parts_as_the_template_wants_it() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache": 1}]
    plain = [{"type": "text", "text": text} for text in ("a", "b")]
    given = ({"role": "user", "content": "x"}, {"role": "user", "content": parts}, {"role": "user", "content": []})
    assert [each["content"] for each in read(*given)] == ["x", "a\nb", ""]
    assert [each["content"] for each in read(*given, parts=True)] == [
        plain[:0] + [{"type": "text", "text": "x"}],
        plain,
        [],
    ]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": "x"}, r"messages\[1\] has no role"),
        ({"role": None, "content": "x"}, r"messages\[1\] has no role"),
        ({"role": 5, "content": "x"}, r"messages\[1\] has no role"),
        ({"role": "user", "content": 5}, r"messages\[1\]\.content is int"),
        ({"role": "user", "content": {"type": "text"}}, r"messages\[1\]\.content is dict"),
        ({"role": "user", "content": ["x"]}, r"messages\[1\]\.content holds a part of type 'str'"),
        ({"role": "user", "content": [{"type": "image_url", "text": "x"}]}, r"a part of type 'image_url'"),
        ({"role": "user", "content": [{"text": "x"}]}, r"a part of type None"),
        ({"role": "user", "content": [{"type": "text"}]}, r"messages\[1\]\.content holds a part of type text without"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, r"a part of type text without a text"),
        (told({"id": "a"}), r"messages\[1\]\.tool_calls holds a call without function\.name"),
        (told({"function": {"name": 5}}), r"a call without function\.name"),
        (told({"function": "f"}), r"a call without function\.name"),
        ({"role": "assistant", "tool_calls": ["f"]}, r"a call without function\.name"),
    ],
)
def test_a_message_that_no_template_can_take_is_refused_by_its_place(message: dict[str, Any], said: str) -> None:
    with pytest.raises(TextError, match=said):
        read({"role": "user", "content": "x"}, message)


def test_fields_without_a_value_are_left_out_and_others_stay() -> None:
    (found,) = read({"role": "user", "content": "x", "name": None, "weight": 0, "mine": "y"})
    assert found == {"role": "user", "content": "x", "weight": 0, "mine": "y"}
    (found,) = read(told({**call(), "type": "custom", "mine": 1}))
    assert found["tool_calls"] == [{"type": "custom", "id": "a", "mine": 1, "function": {"name": "f", "arguments": {}}}]


def test_numbers_of_calls_go_on_through_the_conversation() -> None:
    def result(call_id: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call_id, "content": "r"}

    given = (told(call(call_id="a"), call(name="g", call_id="b")), result("b"), result("a"), result("z"))
    found = read(*given, told(call(call_id="a")), result("a"), numbered=True)
    assert [each["id"] for message in found for each in message.get("tool_calls", ())] == [
        "functions.f:0",
        "functions.g:1",
        "functions.f:2",
    ]
    results = [message["tool_call_id"] for message in found if message["role"] == "tool"]
    assert results == ["functions.g:1", "functions.f:0", "z", "functions.f:2"]


@pytest.mark.parametrize(
    ("calls", "results", "wanted"),
    [
        (("a", "b"), ("b", "a"), ["f0", "r1", "f1", "r0"]),
        (("a", "b"), ("a", "c", "b", "a"), ["f0", "r0", "r3", "f1", "r2", "r1"]),
        (("a", "a"), ("a", "a"), ["f0", "r0", "f1", "r1"]),
        (("a", "a"), ("a", "a", "a"), ["f0", "r0", "f1", "r1", "r2"]),
        ((None, None), (None, None), ["f0", "r0", "f1", "r1"]),
        ((None, "a", None), ("a", None, None), ["f0", "r1", "f1", "r0", "f2", "r2"]),
        (("a", "b", "c"), ("c",), ["f0", "f1", "f2", "r0"]),
        (("a", "b"), (), ["f0", "f1"]),
        (("a",), ("b", "a"), ["f0", "r0", "r1"]),
    ],
)
def test_each_result_is_told_once_and_after_a_call_of_its_own(
    calls: tuple[str | None, ...], results: tuple[str | None, ...], wanted: list[str]
) -> None:
    made = [call(name=f"f{place}", call_id=name) for place, name in enumerate(calls)]
    answers = [{"role": "tool", "tool_call_id": name, "content": f"r{place}"} for place, name in enumerate(results)]
    found = read(told(*made), *answers, {"role": "user", "content": "u"}, single=True)
    texts = [
        each["tool_calls"][0]["function"]["name"] if each["role"] == "assistant" else each["content"] for each in found
    ]
    assert texts == [*wanted, "u"]


def test_calls_that_follow_results_at_once_are_told_one_by_one_too() -> None:
    turns: list[dict[str, Any]] = []
    for names in ("ab", "cd"):
        turns.append(told(*(call(name=f"f{name}", call_id=name) for name in names), content="So."))
        turns += [{"role": "tool", "tool_call_id": name, "content": f"r{name}"} for name in names]
    found = read(*turns, told(content="Done."), single=True)
    texts = [[each["function"]["name"] for each in turn.get("tool_calls", ())] or turn["content"] for turn in found]
    assert texts == [["fa"], "ra", ["fb"], "rb", ["fc"], "rc", ["fd"], "rd", "Done."]


def test_tools_get_a_description_where_the_template_needs_one() -> None:
    null = {"type": "function", "function": {"name": "h", "description": None}}
    tools = [{"type": "function", "function": {"name": "f", "description": "d"}}, {"name": "g", "strict": True}, null]
    assert MessageForm().tools(tools) == tools
    assert MessageForm(described=True).tools(tools) == [
        {"type": "function", "function": {"name": "f", "description": "d"}},
        {"type": "function", "function": {"name": "g", "description": "", "strict": True}},
        {"type": "function", "function": {"name": "h", "description": ""}},
    ]
