"""Names and values of calls: their limits, their types, and the notations in which models write
them."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglcore.serving.chat.parsers.delta import Delta, calls_of, joined, text_of
from sglcore.serving.chat.parsers.families import TOOLS
from sglcore.serving.chat.parsers.json_calls import LONGEST_NAME
from sglcore.serving.chat.parsers.parser import DeltaParser, long_id, short_id
from sglcore.serving.chat.parsers.xml_calls import as_json
from tests.serving.chat.test_parsers import NAMED, NAMES

FAMILY = {family.name: family for family in TOOLS}
FLAT = [{"type": "function", "name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}]
NESTED = [{"type": "function", "function": FLAT[0]}]


def deltas_of(name: str, text: str, tools: Any = (), size: int | None = None) -> list[Delta]:
    """Return the joined deltas of an answer that arrives in parts of `size`; None: at once."""
    reader = DeltaParser(calls=FAMILY[name].calls, tools=tools, new_id=lambda: "id")
    size = size or max(len(text), 1)
    parts = [reader.push(text[begin : begin + size]) for begin in range(0, len(text), size)]
    return joined([*(delta for part in parts for delta in part), *reader.finish()])


def read(name: str, text: str, tools: Any = ()) -> tuple[list[tuple[str, str, str]], str]:
    """Return the calls (name, arguments, id) and the content of an answer, which are the same
    however it is split."""
    whole = deltas_of(name, text, tools)
    assert deltas_of(name, text, tools, 1) == deltas_of(name, text, tools, 3) == whole
    return [(call.name, call.arguments, call.call_id) for call in calls_of(whole)], text_of(whole, "content")


WITH_NAME = {
    "hermes": '<tool_call>{"name": "NAME", "arguments": {}}</tool_call>',
    "llama3": '{"name": "NAME", "parameters": {}}',
    "mistral": "[TOOL_CALLS]NAME[ARGS]{}",
    "mistral bare": "[TOOL_CALLS]NAME{}",
    "mistral list": '[TOOL_CALLS][{"name": "NAME", "arguments": {}}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek fenced": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>NAME<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "qwen3_coder": "<tool_call><function=NAME></function></tool_call>",
    "glm": "<tool_call>NAME\n</tool_call>",
    "minimax": '<minimax:tool_call><invoke name="NAME"></invoke></minimax:tool_call>',
    "lfm2": "<|tool_call_start|>[NAME()]<|tool_call_end|>",
    "gemma": "<|tool_call>call:NAME{}<tool_call|>",
}


@pytest.mark.parametrize("form", WITH_NAME)
def test_a_name_is_as_long_as_the_limit_and_no_longer(form: str) -> None:
    longest = "n" * LONGEST_NAME
    family = form.partition(" ")[0]
    assert read(family, WITH_NAME[form].replace("NAME", longest)) == ([(longest, "{}", "id")], "")
    text = WITH_NAME[form].replace("NAME", longest + "n")
    assert read(family, text) == ([], text)


@pytest.mark.parametrize("form", WITH_NAME)
def test_a_call_without_a_name_is_content(form: str) -> None:
    for nothing in ("", " "):
        text = WITH_NAME[form].replace("NAME", nothing)
        if nothing and ('"name"' in text or "=NAME" in text):
            continue
        assert read(form.partition(" ")[0], text) == ([], text)


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("mistral", ("two words", "a\tb", "a\nb", "a\rb", "[a", "a]", '"a"', "'a'")),
        ("qwen3_coder", ("a<b", 'a"b', "a{b", "a\nb")),
        ("glm", ("a<b", 'a"b', "a{b")),
        ("minimax", ("a<b", "a{b", "a\nb")),
        ("lfm2", ("two words", "a[b", "a]b", "a{b", "a}b", "a<b", "a>b", 'a"b', "a'b", "a=b", "a:b", "a,b")),
        ("gemma", ("two words", "a(b", "a)b", "a]b", "a=b", "a:b", "a,b")),
    ],
)
def test_text_that_can_be_no_name_is_content(form: str, names: tuple[str, ...]) -> None:
    for name in names:
        text = WITH_NAME[form].replace("NAME", name)
        assert read(form, text) == ([], text), name


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"id": "x1", "type": "function", "name": "f", "arguments": {"a": 1}}', ("f", '{"a": 1}', "x1")),
        ('{"name": "f", "id": "x1", "arguments": {}}', ("f", "{}", "x1")),
        ('{"id": "x1", "name": "f", "type": "function", "parameters": {}}', ("f", "{}", "x1")),
        ('{"arguments": {"a": 1}, "id": "x1", "name": "f"}', ("f", '{"a": 1}', "x1")),
        ('{"id": "x1", "name": "f"}', ("f", "{}", "x1")),
        ('{"name": "f", "arguments": {}, "id": "late", "type": "function"}', ("f", "{}", "id")),
        ('{"name": "a\\"b\\u00e9\\\\", "arguments": {}}', ('a"bé\\', "{}", "id")),
        ('{"name": "first", "name": "f", "arguments": {}}', ("f", "{}", "id")),
        (' \n{ "name" : "f" , "arguments" : {} }\n', ("f", "{}", "id")),
    ],
)
def test_the_fields_of_a_call_come_in_any_order(text: str, call: tuple[str, str, str]) -> None:
    assert read("hermes", f"So.<tool_call>{text}</tool_call>Done.") == ([call], "So.Done.")
    assert read("hermes", f"So.<tool_call>[{text}]</tool_call>Done.") == ([call], "So.Done.")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "more": 1, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"id": "x", "type": "function"}',
        '{"name": "f" "arguments": {}}',
        '{"name": "\\q", "arguments": {}}',
        '{"name": "f\\',
        '{"name": "\\ud83d", "arguments": {}}',
        '{"name": "f", "arguments": []}',
        '{"arguments": {"a": tru}, "name": "f"}',
        '["name", "f"]',
    ],
)
def test_an_object_that_is_no_call_is_content(text: str) -> None:
    for wrapped in (f"<tool_call>{text}</tool_call>", f"<tool_call>[{text}]</tool_call>"):
        assert read("hermes", wrapped) == ([], wrapped)


@pytest.mark.parametrize(
    ("family", "text", "names", "content"),
    [
        ("llama3", '{"name": "f", "parameters": {}}{"name": "g", "parameters": {}}', "fg", ""),
        ("llama3", '{"name": "f", "parameters": {}}; <|python_tag|>{"name": "g", "parameters": {}} so', "fg", ";so"),
        ("llama3", 'So <|python_tag|>{"name": "f", "parameters": {}};{"name": "g", "parameters": {}}', "fg", "So"),
        ("llama3", '{"name": "f", "parameters": {}}; {"name": "g"}', "f", '; {"name": "g"}'),
        ("deepseek", WITH_NAME["deepseek"].replace("NAME", "f") + " so", "f", "so"),
        ("deepseek", WITH_NAME["deepseek fenced"].replace("NAME", "f") + " so", "f", "so"),
        ("kimi", WITH_NAME["kimi"].replace("NAME", "f") + " so", "f", "so"),
        ("kimi", WITH_NAME["kimi"].replace("NAME", "f") * 2, "ff", ""),
        ("qwen3_coder", WITH_NAME["qwen3_coder"].replace("NAME", "f") + " so", "f", "so"),
        ("qwen3_coder", "<tool_call><function=f></function><function=g></function></tool_call>so", "fg", "so"),
        ("qwen3_coder", "<function=f></function> <function=g></function> so", "fg", "so"),
        ("glm", WITH_NAME["glm"].replace("NAME", "f") + "\n" + WITH_NAME["glm"].replace("NAME", "g"), "fg", ""),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "g"}] so', "fg", "so"),
        ("lfm2", "<|tool_call_start|>[f(), g(a=1)] so", "fg", "so"),
        ("gemma", "<|tool_call>call:f{}<tool_call|><|tool_call>call:g{} so", "fg", "so"),
    ],
)
def test_calls_follow_one_another_and_content_follows_them(family: str, text: str, names: str, content: str) -> None:
    found, rest = read(family, text)
    assert ("".join(name for name, _, _ in found), rest) == (names, content)


@pytest.mark.parametrize(
    ("text", "call_id"),
    [
        ("functions.f:0", "functions.f:0"),
        (" functions.f:12 ", "functions.f:12"),
        ("f:3", "f:3"),
        ("functions.f", "id"),
        ("f", "id"),
    ],
)
def test_an_id_with_a_number_is_kept_as_it_was_written(text: str, call_id: str) -> None:
    assert read("kimi", WITH_NAME["kimi"].replace("NAME", text)) == ([("f", "{}", call_id)], "")


def test_ids_have_the_form_that_clients_and_templates_take() -> None:
    for make, size in ((long_id, 29), (short_id, 9)):
        made = {make() for _ in range(50)}
        assert len(made) == 50 and {len(each) for each in made} == {size}
        assert all(each.removeprefix("call_").isalnum() for each in made)


TYPED: list[tuple[str, dict[str, str]]] = [
    ("true", {"boolean": "true", "string": '"true"', "null": '"true"', "integer": "true", "": "true"}),
    ("True", {"boolean": "true", "string": '"True"', "null": '"True"', "integer": '"True"', "": '"True"'}),
    (" FALSE ", {"boolean": "false", "string": '" FALSE "', "null": '" FALSE "', "integer": '" FALSE "'}),
    ("null", {"boolean": "null", "string": '"null"', "null": "null", "integer": "null", "": "null"}),
    ("None", {"boolean": '"None"', "string": '"None"', "null": "null", "integer": '"None"', "": '"None"'}),
    (" 12\n", {"boolean": "12", "string": '" 12\\n"', "null": '" 12\\n"', "integer": "12", "": "12"}),
    ('{"a": [1]}', {"object": '{"a": [1]}', "string": '"{\\"a\\": [1]}"', "": '{"a": [1]}'}),
    ("Zürich", {"object": '"Zürich"', "string": '"Zürich"', "": '"Zürich"'}),
    ("", {"object": '""', "string": '""', "null": '""', "": '""'}),
    ("NaN", {"number": '"NaN"', "": '"NaN"'}),
    ("-Infinity", {"number": '"-Infinity"', "": '"-Infinity"'}),
]


@pytest.mark.parametrize(("text", "wanted"), TYPED, ids=str)
def test_a_value_in_tags_has_a_type_that_the_schema_allows(text: str, wanted: dict[str, str]) -> None:
    for kind, value in wanted.items():
        assert as_json(text, {"type": kind} if kind else {}) == value, kind
        json.loads(value)


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("True", ["integer", "null"], '"True"'),
        ("True", ["string", "boolean"], "true"),
        ("None", ["string", "boolean"], '"None"'),
        ("None", ["string", "null"], "null"),
        ("12", ["string", "null"], '"12"'),
        ("12", ["string", "null", "integer"], "12"),
    ],
)
def test_a_value_in_tags_has_one_of_several_types(text: str, kinds: list[str], value: str) -> None:
    for schema in ({"type": kinds}, {"anyOf": [{"type": each} for each in kinds]}):
        assert as_json(text, schema) == value
    assert as_json(text, {"oneOf": [{"type": kinds[0]}, {"anyOf": [{"type": kinds[1:]}]}]}) == value


def test_a_value_that_nests_too_deep_is_text() -> None:
    deep = "[" * 100_000
    text = f"<function=f><parameter=a>{deep}</parameter></function>"
    (found,) = calls_of(deltas_of("qwen3_coder", text))
    assert json.loads(found.arguments) == {"a": deep}
    (found,) = calls_of(deltas_of("lfm2", f"<|tool_call_start|>[f(a={'(' * 100_000})]<|tool_call_end|>"))
    assert found.arguments.startswith('{"a": "((')


@pytest.mark.parametrize("value", ["", "\n", "\n\n", "  two  ", "\n x\n", "a\n\nb"])
def test_one_line_end_at_each_side_of_a_value_is_no_part_of_it(value: str) -> None:
    for tools in (FLAT, NESTED):
        found, _ = read("qwen3_coder", f"<function=f><parameter=a>\n{value}\n</parameter></function>", tools)
        assert json.loads(found[0][1]) == {"a": value}
        found, _ = read("minimax", f'<invoke name="f"><parameter name="a">{value}</parameter></invoke>', tools)
        assert json.loads(found[0][1]) == {"a": value}


def test_tools_may_be_flat_or_nested() -> None:
    for tools in (FLAT, NESTED, [{"function": {"name": "other"}}, *FLAT]):
        found, _ = read("qwen3_coder", "<function=f><parameter=a>12</parameter></function>", tools)
        assert found == [("f", '{"a": "12"}', "id")]
        found, _ = read("harmony", '<|channel|>commentary to=f<|message|>{"a": 1}<|call|>', tools)
        assert found == [("f", '{"a": 1}', "id")]


ESCAPES = ["\\n", "\\t", "\\r", "\\b", "\\f", "\\\\", "\\'", '\\"', "\\x41", "\\xe9", "\\u00e9", "\\u6771"]
ASTRAL = ["\\U0001f642", "\\U0010ffff", "\\U000000e9", "\\ud83d\\ude42x"]


@pytest.mark.parametrize("escape", [*ESCAPES, *ASTRAL])
@pytest.mark.parametrize("quote", ["'", '"'])
def test_an_escape_in_pythons_notation_means_what_it_means_in_python(quote: str, escape: str) -> None:
    text = f"{quote}a{escape}b{quote}"
    ((_, arguments, _),), content = read("lfm2", f"<|tool_call_start|>[f(a={text})]<|tool_call_end|>")
    wanted = ast.literal_eval(text).encode("utf-16", "surrogatepass").decode("utf-16")
    assert json.loads(arguments.encode()) == {"a": wanted} and content == ""


@pytest.mark.parametrize(
    ("escape", "wanted"),
    [("\\/", "/"), ("\\q", "\\q"), ("\\x4", "\\x4"), ("\\u12", "\\u12"), ("\\U0001f6", "\\U0001f6")]
    + [("\\U00110000", "\\U00110000"), ("\\xg1", "\\xg1"), ("\\", "\\")],
)
def test_an_escape_that_is_none_is_text(escape: str, wanted: str) -> None:
    found, _ = read("lfm2", f"<|tool_call_start|>[f(a='{escape} b')]<|tool_call_end|>")
    assert json.loads(found[0][1]) == {"a": f"{wanted} b"}


@pytest.mark.parametrize("escape", ["\\U0000d83d", "\\ud83d"])
def test_half_a_character_in_an_escape_can_be_sent(escape: str) -> None:
    found, _ = read("lfm2", f"<|tool_call_start|>[f(a='{escape}')]<|tool_call_end|>")
    assert found[0][1].encode() and json.loads(found[0][1]) == {"a": "\ud83d"}


@pytest.mark.parametrize("family", ["lfm2", "granite"])
@settings(max_examples=40)
@given(calls=st.lists(st.tuples(NAMES, st.dictionaries(NAMES, NAMED, max_size=4)), min_size=1, max_size=3))
def test_calls_that_are_written_for_a_template_are_read_back(family: str, calls: list[tuple[str, Any]]) -> None:
    write = FAMILY[family].write
    assert write is not None
    text = write([{"function": {"arguments": arguments, "name": name}} for name, arguments in calls])
    whole = deltas_of(family, text)
    assert [(call.name, json.loads(call.arguments)) for call in calls_of(whole)] == calls
    assert text_of(whole, "content") == ""


@pytest.mark.parametrize(
    ("family", "value", "wanted"),
    [
        ("functiongemma", '<escape>a "b" \\n</escape>', None),
        ("functiongemma", '<escape>a "b" \\n<escape>', 'a "b" \\n'),
        ("functiongemma", '"a\\nb"', "a\nb"),
        ("gemma", '<|"|>a "b" \\n<|"|>', 'a "b" \\n'),
        ("functiongemma", '"a, b}"', "a, b}"),
        ("gemma", '"a, b}"', "a, b}"),
        ("gemma", '[1, <|"|>x<|"|>, {k: true}]', [1, "x", {"k": True}]),
        ("gemma", '{<|"|>a b<|"|>: 1, c: None}', {"a b": 1, "c": None}),
        ("gemma", "some text", "some text"),
        ("gemma", "NaN", "NaN"),
        ("gemma", "-1.5e3", -1500.0),
        ("gemma", "[]", []),
        ("gemma", "{}", {}),
    ],
)
def test_values_in_a_notation_have_its_quotes(family: str, value: str, wanted: Any) -> None:
    begin, end = FAMILY[family].marks
    found, content = read(family, f"{begin}call:f{{a:{value}}}{end}")
    if wanted is None:
        assert found[0][1].startswith('{"a": "a') and not found[0][1].endswith("}")
        return
    assert json.loads(found[0][1]) == {"a": wanted} and content == ""


@pytest.mark.parametrize("depth", [63, 64, 65])
def test_lists_and_objects_nest_as_deep_as_the_limit(depth: int) -> None:
    for begin, end in ("[]", ("{'k':", "}")):
        value = begin * depth + end * depth if begin == "[" else begin * depth + "1" + end * depth
        found, content = read("lfm2", f"<|tool_call_start|>[f(a={value})]<|tool_call_end|>")
        assert (content == "") is (depth <= (64 if begin == "[" else 63)), begin
        assert found[0][0] == "f"


@pytest.mark.parametrize(
    ("header", "is_call"),
    [
        ("commentary to=functions.f", True),
        ("commentary to=functions.f <|constrain|>json", True),
        ("commentary to=f", True),
        ("commentary to=functions.other", True),
        ("commentary to=other", False),
        ("commentary to=", False),
        ("commentary to=functions.", False),
        ("commentary auto=f", False),
        ("commentary", False),
    ],
)
def test_a_message_to_a_function_is_a_call(header: str, is_call: bool) -> None:
    found, content = read("harmony", f'<|channel|>{header}<|message|>{{"a": 1}}', NESTED)
    assert (bool(found), content) == (is_call, "" if is_call else '{"a": 1}')


def test_a_header_is_as_long_as_the_limit_and_no_longer() -> None:
    rest = "final".ljust(LONGEST_NAME, "x")
    assert read("harmony", f"<|channel|>{rest}<|message|>Yes.") == ([], "Yes.")
    assert read("harmony", f"<|channel|>{rest}x<|message|>Yes.")[1] != "Yes."
