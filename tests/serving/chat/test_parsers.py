"""Parsers of answers: any calls and any text around them, split anywhere; text that is not a call
stays content, to the character."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglcore.serving.chat.parsers.delta import Delta, calls_of, joined, text_of
from sglcore.serving.chat.parsers.families import REASONING, TOOLS
from sglcore.serving.chat.parsers.json_text import MAX_DEPTH, JsonText
from sglcore.serving.chat.parsers.parser import DeltaParser, ReasoningFamily
from sglcore.serving.chat.parsers.xml_calls import QWEN3_CODER
from sglcore.serving.chat.parsers.xml_calls import as_json as read_value

FAMILY = {family.name: family for family in TOOLS}
THINK = next(family for family in REASONING if family.name == "think")
MARKS = [mark for family in (*TOOLS, *REASONING) for mark in family.marks]
STRINGS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(['"', "\\", "}", "{", "]", "</tool_call>", "[TOOL_CALLS]", "```", ";", "\n", "é🙂", *MARKS[:3]]),
)
NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,12}", fullmatch=True)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(STRINGS, VALUES, max_size=4)), min_size=1, max_size=3)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: list[tuple[str, str]]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": {as_json(n)}, "arguments": {a}}}\n</tool_call>' for n, a in calls)


def llama3(calls: list[tuple[str, str]]) -> str:
    return "; ".join(f'{{"name": {as_json(n)}, "parameters": {a}}}' for n, a in calls)


def mistral_list(calls: list[tuple[str, str]]) -> str:
    return "[TOOL_CALLS] [" + ", ".join(f'{{"name": {as_json(n)}, "arguments": {a}}}' for n, a in calls) + "]"


def mistral_named(calls: list[tuple[str, str]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


def mistral_bare(calls: list[tuple[str, str]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}{arguments}" for name, arguments in calls)


def deepseek_fenced(calls: list[tuple[str, str]]) -> str:
    one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    return "<｜tool▁calls▁begin｜>" + "\n".join(one.format(*call) for call in calls) + "<｜tool▁calls▁end｜>"


def deepseek_bare(calls: list[tuple[str, str]]) -> str:
    one = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    return "<｜tool▁calls▁begin｜>" + "".join(one.format(*call) for call in calls) + "<｜tool▁calls▁end｜>"


def kimi(calls: list[tuple[str, str]]) -> str:
    one = "<|tool_call_begin|>functions.{}:{} <|tool_call_argument_begin|>{}<|tool_call_end|>"
    made = (one.format(name, number, arguments) for number, (name, arguments) in enumerate(calls))
    return f"<|tool_calls_section_begin|>{''.join(made)}<|tool_calls_section_end|>"


def granite(calls: list[tuple[str, str]]) -> str:
    return "<|tool_call|>[" + ", ".join(f'{{"name": {as_json(n)}, "arguments": {a}}}' for n, a in calls) + "]"


def phi(calls: list[tuple[str, str]]) -> str:
    return "".join(f'<|tool_call|>{{"name": {as_json(n)}, "arguments": {a}}}<|/tool_call|>' for n, a in calls)


WRITERS: list[tuple[str, Callable[[list[tuple[str, str]]], str]]] = [
    ("hermes", hermes),
    ("llama3", llama3),
    ("mistral", mistral_list),
    ("mistral", mistral_named),
    ("mistral", mistral_bare),
    ("deepseek", deepseek_fenced),
    ("deepseek", deepseek_bare),
    ("kimi", kimi),
    ("granite", granite),
    ("granite", phi),
]


def parser(name: str | None, tools: Any = (), reasoning: ReasoningFamily | None = None, **given: Any) -> DeltaParser:
    calls = FAMILY[name].calls if name else None
    return DeltaParser(calls=calls, tools=tools, reasoning=reasoning, new_id=lambda: "id", **given)


def split(reader: DeltaParser, text: str, places: list[int]) -> list[Delta]:
    cuts = sorted({min(place, len(text)) for place in places})
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return joined([*(delta for part in parts for delta in reader.push(part)), *reader.finish()])


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=lambda value: getattr(value, "__name__", value))
@settings(max_examples=25)
@given(calls=CALLS, places=st.lists(st.integers(0, 400), max_size=8), spaced=st.booleans())
def test_calls_come_back_as_they_were_written(
    name: str, write: Callable[..., str], calls: list[tuple[str, Any]], places: list[int], spaced: bool
) -> None:
    separators = (", ", ": ") if spaced else (",", ":")
    written = [(n, json.dumps(a, ensure_ascii=not spaced, separators=separators)) for n, a in calls]
    before, after = ("" if name == "llama3" else "First.\n"), " Last."
    text = before + write(written) + after
    whole = parser(name).whole(text)
    assert [(call.name, call.arguments) for call in calls_of(whole)] == written
    assert text_of(whole, "content") == before.strip() + after.strip()
    assert split(parser(name), text, places) == whole
    assert split(parser(name), text, list(range(len(text)))) == whole


TYPES = {"s": "string", "n": "number", "i": "integer", "b": "boolean", "o": "object", "a": "array", "z": "null"}
TOOL = {"name": "f", "parameters": {"properties": {key: {"type": kind} for key, kind in TYPES.items()}}}
TYPED = st.fixed_dictionaries(
    {},
    optional={
        "s": STRINGS.filter(lambda text: "</parameter>" not in text and "</arg_value>" not in text),
        "n": st.floats(allow_nan=False, allow_infinity=False),
        "i": st.integers(),
        "b": st.booleans(),
        "o": st.dictionaries(STRINGS, VALUES, max_size=2),
        "a": st.lists(VALUES, max_size=2),
        "z": st.none(),
    },
)


TAGGED = {
    "qwen3_coder": (
        "",
        "<tool_call>\n<function=f>\n",
        "<parameter=",
        ">\n",
        "\n</parameter>\n",
        "</function>\n</tool_call>\n",
        "",
    ),
    "glm": ("", "<tool_call>f\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>\n", ""),
    "minimax": (
        *("<minimax:tool_call>\n", '<invoke name="f">\n', '<parameter name="', '">', "</parameter>\n"),
        *("</invoke>\n", "</minimax:tool_call>"),
    ),
}
"""(text before all calls, before the parameters of each call, around parameter names and values,
after each call, after all calls)"""


@pytest.mark.parametrize("name", TAGGED)
@settings(max_examples=25)
@given(calls=st.lists(TYPED, min_size=1, max_size=3), places=st.lists(st.integers(0, 400), max_size=8))
def test_values_in_tags_get_the_types_of_the_schema(name: str, calls: list[dict[str, Any]], places: list[int]) -> None:
    begin, head, key_begin, middle, value_end, tail, end = TAGGED[name]

    def value(item: Any) -> str:
        return item if isinstance(item, str) else as_json(item) if isinstance(item, dict | list) else str(item)

    parameters = (
        "".join(f"{key_begin}{key}{middle}{value(item)}{value_end}" for key, item in call.items()) for call in calls
    )
    text = f"Go.\n{begin}{''.join(head + part + tail for part in parameters)}{end}"
    whole = parser(name, [{"type": "function", "function": TOOL}]).whole(text)
    assert [json.loads(call.arguments) for call in calls_of(whole)] == calls
    assert text_of(whole, "content") == "Go."
    assert split(parser(name, [{"function": TOOL}]), text, places) == whole


def in_gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_gemma(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(in_gemma, value)) + "]"
    return as_json(value)


def lfm2(calls: list[tuple[str, Any]]) -> str:
    made = (f"{n}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for n, a in calls)
    return f"<|tool_call_start|>[{', '.join(made)}]<|tool_call_end|>"


def gemma(calls: list[tuple[str, Any]]) -> str:
    return "".join(f"<|tool_call>call:{n}{in_gemma(a)}<tool_call|>" for n, a in calls)


NAMED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(("name", "write"), [("lfm2", lfm2), ("gemma", gemma)])
@settings(max_examples=25)
@given(
    calls=st.lists(st.tuples(NAMES, st.dictionaries(NAMES, NAMED, max_size=4)), min_size=1, max_size=3),
    places=st.lists(st.integers(0, 400), max_size=8),
)
def test_values_in_a_notation_become_json(
    name: str, write: Callable[..., str], calls: list[tuple[str, Any]], places: list[int]
) -> None:
    text = f"First.\n{write(calls)} Last."
    whole = parser(name).whole(text)
    assert [(call.name, json.loads(call.arguments)) for call in calls_of(whole)] == calls
    assert text_of(whole, "content") == "First.Last."
    assert split(parser(name), text, places) == whole
    assert split(parser(name), text, list(range(len(text)))) == whole


@pytest.mark.parametrize(
    ("name", "text", "arguments", "content"),
    [
        ("lfm2", "(a='b\\'c\\x41\\u00e9\\U0001f642\\q\\u12')]<|tool_call_end|>", {"a": "b'cAé🙂\\q\\u12"}, ""),
        (
            "lfm2",
            '(a="b", c=[True, None, {"d": 1.5}], e=text)]',
            {"a": "b", "c": [True, None, {"d": 1.5}], "e": "text"},
            "",
        ),
        ("lfm2", "()]<|tool_call_end|>Done.", {}, "Done."),
        ("lfm2", '("positional")]', {}, '"positional")]'),
        ("lfm2", "(a='cut o", '{"a": "cut o', ""),
        ("lfm2", "(a=12", '{"a": 12', ""),
        ("lfm2", "(a=)]", '{"a": ', ")]"),
        ("lfm2", "(a=" + "[" * 100, '{"a": ' + "[" * 64, "[" * 36),
    ],
)
def test_calls_in_pythons_notation_that_are_broken_keep_what_was_read(
    name: str, text: str, arguments: Any, content: str
) -> None:
    text = f"<|tool_call_start|>[f{text}"
    for places in ([], list(range(len(text)))):
        deltas = split(parser(name), text, places)
        (call,) = calls_of(deltas)
        assert call.name == "f" and text_of(deltas, "content").strip() == content
        assert (call.arguments if isinstance(arguments, str) else json.loads(call.arguments)) == arguments


PIECES = st.lists(
    st.sampled_from(
        [
            *MARKS,
            "{",
            "}",
            "[",
            "]",
            '"name"',
            '"arguments"',
            '"parameters"',
            ":",
            ",",
            ";",
            '"f"',
            "{}",
            " ",
            "\n",
            "function",
        ]
        + [
            "```json",
            "```",
            "f",
            "<",
            "[",
            '"',
            "\\",
            '{"name": "f", "arguments": {',
            '{"name": "f", "parameters": {}}',
            "1",
        ]
    )
    | st.text(max_size=3),
    max_size=14,
).map("".join)


@pytest.mark.parametrize("name", [*FAMILY, None])
@settings(max_examples=50)
@given(text=PIECES, places=st.lists(st.integers(0, 200), max_size=6), thinks=st.booleans(), is_open=st.booleans())
def test_any_text_is_read_without_an_error_and_the_same_however_it_is_split(
    name: str | None, text: str, places: list[int], thinks: bool, is_open: bool
) -> None:
    def make() -> DeltaParser:
        return parser(name, reasoning=THINK if thinks else None, reasoning_open=is_open)

    whole = make().whole(text)
    assert split(make(), text, places) == whole
    assert split(make(), text, list(range(len(text)))) == whole
    found = calls_of(whole)
    if name == "harmony":  # its markers are hidden wherever they are
        return
    if not found and not text_of(whole, "reasoning") and THINK.marks[0] not in text and not (thinks and is_open):
        assert text_of(whole, "content") == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"nome": "f"}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call> text'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "text"}</tool_call>'),
        ("hermes", "half a mark <tool_ca"),
        ("llama3", ' {"name": "Bob", "age": 5}'),
        ("llama3", '{"name": "f"}'),
        ("llama3", "<|python_tag|>search(1)"),
        ("mistral", "[TOOL_CALLS] [1, 2]"),
        ("mistral", "[TOOL_CALLS] no call {}"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>poem<｜tool▁sep｜>f\n```json\n{}"),
        ("qwen3_coder", "<tool_call>\n<function=f>\nnothing</function>"),
        ("qwen3_coder", "<function=<b>>"),
        ("kimi", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>text"),
        ("granite", "<|tool_call|> I would call one"),
        ("granite", "<|tool_call|>[]"),
        ("nemotron", "<TOOLCALL>[1]</TOOLCALL>"),
        ("lfm2", "<|tool_call_start|>no call<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>"),
        ("lfm2_json", "<|tool_call_start|>[f()]<|tool_call_end|>"),
        ("gemma", "<|tool_call>call me{}<tool_call|>"),
        ("glm", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("glm", "<tool_call>call me</tool_cal"),
        ("minimax", '<minimax:tool_call>\n<invoke name="f">nothing</invoke>'),
        ("minimax", "<minimax:tool_call></minimax:tool_call>"),
    ],
)
def test_what_is_no_call_is_content_with_its_markers(name: str, text: str) -> None:
    assert parser(name).whole(text) == [Delta("content", text)]


def test_a_call_that_breaks_off_keeps_what_was_read_and_loses_nothing() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": tru!}}</tool_call>'
    assert parser("hermes").whole(text)[1:] == [
        Delta("tool_arguments", '{"a": tru'),
        Delta("content", "!}}</tool_call>"),
    ]
    text = '<tool_call>{"name": "f", "arguments": {"a": "b'
    assert parser("hermes").whole(text)[1:] == [Delta("tool_arguments", '{"a": "b')]


def test_arguments_come_while_they_are_written() -> None:
    reader = parser("hermes")
    assert reader.push('<tool_call>{"name": "f", "arguments": ') == []
    assert [delta.kind for delta in reader.push('{"a": "b')] == ["tool_start", "tool_arguments"]
    assert reader.push("c") == [Delta("tool_arguments", "c")]
    for name, begin in (
        ("qwen3_coder", "<function=f>\n<parameter=s>\nlong "),
        ("glm", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>long "),
        ("minimax", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">long '),
        ("lfm2", '<|tool_call_start|>[f(s="long '),
        ("gemma", '<|tool_call>call:f{s:<|"|>long '),
    ):
        reader = parser(name, [{"function": TOOL}])
        reader.push(begin)
        assert reader.push("text") == [Delta("tool_arguments", "text")]


@pytest.mark.parametrize(
    ("name", "text", "arguments", "content"),
    [
        ("glm", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>cut o", '{"s": "cut o', ""),
        ("glm", "<tool_call>f\n<arg_key>i</arg_key>\n<arg_value>12", '{"i": 12', ""),
        ("glm", "<tool_call>f\n<arg_key>i</arg_key>\n<arg_value>many</arg_value></tool_call>", '{"i": "many"}', ""),
        ("glm", "<tool_call>f\n<arg_key>i</arg_key>!</tool_call>", "{}", "<arg_key>i</arg_key>!</tool_call>"),
        ("glm", "<tool_call>f</tool_call>", "{}", ""),
        ("glm", "<tool_call>\nf\n</tool_call>\nDone.", "{}", "Done."),
        ("qwen3_coder", "<function=f><parameter=s>no margin</parameter></function>", '{"s": "no margin"}', ""),
        ("minimax", '<invoke name="f">\n</invoke>\n', "{}", ""),
        ("minimax", '<minimax:tool_call><invoke name="f"><parameter name="i">1</parameter>', '{"i": 1}', ""),
    ],
)
def test_calls_in_tags_that_are_broken_keep_what_was_read(name: str, text: str, arguments: str, content: str) -> None:
    for places in ([], list(range(len(text)))):
        deltas = split(parser(name, [{"function": TOOL}]), text, places)
        assert [(call.name, call.arguments) for call in calls_of(deltas)] == [("f", arguments)]
        assert text_of(deltas, "content").strip() == content


def test_arguments_may_come_before_the_name_and_may_be_missing() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    found = calls_of(parser("hermes").whole(text))
    assert [(call.name, call.arguments) for call in found] == [("f", '{"a": 1}'), ("g", "{}")]


def test_an_id_that_the_model_writes_is_the_calls_id() -> None:
    text = '[TOOL_CALLS] [{"id": "abcdefghi", "name": "f", "arguments": {}}][TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}'
    assert [call.call_id for call in calls_of(parser("mistral").whole(text))] == ["abcdefghi", "123456789"]


@pytest.mark.parametrize("rest", ['"id": "abcdefghi", "name": "f"', '"name": "f", "id": "abcdefghi"'])
def test_an_id_behind_arguments_that_come_before_the_name_is_the_calls_id(rest: str) -> None:
    [found] = calls_of(parser("mistral").whole(f'[TOOL_CALLS] [{{"arguments": {{"a": 1}}, {rest}}}]'))
    assert (found.name, found.arguments, found.call_id) == ("f", '{"a": 1}', "abcdefghi")


def test_an_id_that_holds_a_number_is_the_calls_id() -> None:
    text = "".join(
        f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for name in ("functions.a.b:7", "functions.f", "g:x")
    )
    found = calls_of(parser("kimi").whole(f"<|tool_calls_section_begin|>{text}<|tool_calls_section_end|>"))
    assert [(call.name, call.call_id) for call in found] == [("a.b", "functions.a.b:7"), ("f", "id"), ("g:x", "id")]


def test_a_list_that_breaks_off_keeps_its_whole_calls() -> None:
    whole = parser("granite").whole('<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "g", "argu')
    assert [call.name for call in calls_of(whole)] == ["f"]
    assert text_of(whole, "content") == ', {"name": "g", "argu'


@pytest.mark.parametrize(
    ("text", "is_open", "found"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, ("hm", "yes")),
        ("\nhm</think>yes", True, ("hm", "yes")),
        ("<think>again</think>yes", True, ("again", "yes")),
        ("yes <think>no</think>", False, ("", "yes <think>no</think>")),
        ("<think>cut off", False, ("cut off", "")),
        ("<think></think>yes", False, ("", "yes")),
        ("  yes\n", False, ("", "  yes\n")),
    ],
)
def test_reasoning_ends_where_its_marker_is(text: str, is_open: bool, found: tuple[str, str]) -> None:
    for places in ([], list(range(len(text)))):
        deltas = split(parser(None, reasoning=THINK, reasoning_open=is_open), text, places)
        assert (text_of(deltas, "reasoning"), text_of(deltas, "content")) == found


def test_marks_around_content_are_hidden() -> None:
    granite = next(family for family in REASONING if family.name == "granite")
    text = "<think>hm <response></think>\n<response> Yes, <b>. </response>\n"
    for places in ([], list(range(len(text)))):
        deltas = split(parser(None, reasoning=granite), text, places)
        assert (text_of(deltas, "reasoning"), text_of(deltas, "content")) == ("hm", "Yes, <b>. \n")


def test_calls_inside_reasoning_are_reasoning() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    deltas = parser("hermes", reasoning=THINK).whole(f"<think>maybe {call}</think>{call}")
    assert text_of(deltas, "reasoning") == f"maybe {call}"
    assert len(calls_of(deltas)) == 1


def test_special_tokens_that_are_no_markers_are_not_shown() -> None:
    text = "Hi<|eot|>[TOOL_CALLS]f[ARGS]{}<|eot|>"
    for places in ([], list(range(len(text)))):
        deltas = split(parser("mistral", controls=("<|eot|>",)), text, places)
        assert text_of(deltas, "content") == "Hi" and len(calls_of(deltas)) == 1


@pytest.mark.parametrize(
    "text",
    ['{"a": [1}', '{"a": {"b": 1]}', '{"a": 1,}', '{"a": [1,]}', "{,}", '{"a"}', "{1: 2}", '{"a": 01}', '{"a": 1.}']
    + ['{"a": +1}', '{"a": NaN}', '{"a": True}', '{"a": "\n"}', '{"a": "\\x"}', '{"a": "\\u12g4"}', "{'a': 1}", "[]"],
)
def test_what_is_almost_an_object_is_bad(text: str) -> None:
    reader = JsonText()
    assert reader.feed(text) < len(text) and reader.bad and not reader.done


def test_json_that_is_nested_too_deep_is_bad() -> None:
    for depth, is_bad in ((MAX_DEPTH, False), (MAX_DEPTH + 1, True)):
        reader = JsonText()
        reader.feed('{"a":' + "[" * (depth - 1))
        assert reader.bad == is_bad


@settings(max_examples=80)
@given(
    text=st.dictionaries(STRINGS, VALUES, max_size=4).map(as_json),
    place=st.integers(0, 200),
    mark=st.sampled_from('x}"],:{ 0-'),
)
def test_an_object_ends_where_json_says_and_nothing_else_is_one(text: str, place: int, mark: str) -> None:
    whole = JsonText()
    assert whole.feed(text + "}}") == len(text) and whole.done
    place = min(place, len(text))
    broken = text[:place] + mark + text[place:]
    try:
        value, end = json.JSONDecoder().raw_decode(broken)
        wanted = end if isinstance(value, dict) else None
    except ValueError:
        wanted = None
    reader = JsonText()
    size = sum(reader.feed(character) for character in broken)
    assert (size if reader.done else None) == wanted


@pytest.mark.parametrize("schema", [{"anyOf": 5}, {"type": [[1], "integer"]}, {"oneOf": [3]}, 7, None])
def test_a_parameter_of_a_senseless_schema_is_read_all_the_same(schema: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    text = "<tool_call>\n<function=f>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
    found = calls_of(DeltaParser(calls=QWEN3_CODER, tools=tools).whole(text))
    assert [(call.name, call.arguments) for call in found] == [("f", '{"a": 3}')]


@pytest.mark.parametrize(
    ("schema", "value", "found"),
    [
        ({"type": ["string", "null"]}, "12", '"12"'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "true", '"true"'),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": ["integer", "null"]}, "None", "null"),
        ({"type": ["integer", "string"]}, "12", "12"),
        ({"type": "integer"}, "None", '"None"'),
    ],
)
def test_a_value_in_tags_is_of_a_type_that_its_schema_allows(schema: Any, value: str, found: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert [call.arguments for call in calls_of(parser("qwen3_coder", tools).whole(text))] == [f'{{"a": {found}}}']


@pytest.mark.parametrize("value", ["12", "true", "None", "null", "a b", "[1]", "", "1.5"])
@pytest.mark.parametrize(
    "kinds", [("string", "null"), ("integer", "null"), ("boolean", "string"), ("null",), ("string",)]
)
def test_a_value_in_tags_is_the_same_however_its_schema_lists_the_types(kinds: tuple[str, ...], value: str) -> None:
    types = [{"type": kind} for kind in kinds]
    ways = ({"type": list(kinds)}, {"anyOf": types}, {"oneOf": types}, {"anyOf": [{"oneOf": types}]})
    assert len({read_value(value, schema) for schema in ways}) == 1


@pytest.mark.parametrize("parameters", [{"properties": 5}, {"properties": ["a"]}, 5])
def test_parameters_that_are_no_schema_are_read_all_the_same(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = "<function=f>\n<parameter=a>\n3\n</parameter>\n</function>"
    found = calls_of(DeltaParser(calls=QWEN3_CODER, tools=tools).whole(text))
    assert [call.arguments for call in found] == ['{"a": 3}']
