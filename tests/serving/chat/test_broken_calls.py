"""Calls that are cut, mixed with text or written unusually, format by format: what was read is a
call, and all the rest is content."""

from __future__ import annotations

import pytest

from tests.serving.chat.test_call_values import FAMILY, read

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, ONE_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENT, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
Found = list[tuple[str, str, str]]


def kimi(*calls: str) -> str:
    return SECTION + "".join(f"{CALL}{each}{CALL_END}" for each in calls) + SECTION_END


def fenced(name: str = "f", arguments: str = "{}", fence: str = "\n```", kind: str = "function") -> str:
    return f"{ONE}{kind}{SEP}{name}\n```json\n{arguments}{fence}"


CASES: dict[str, list[tuple[str, Found, str]]] = {
    "mistral": [
        ("[TOOL_CALLS]f[CALL_ID]123456789{}", [("f", "{}", "123456789")], ""),
        ("[TOOL_CALLS]f[CALL_ID] 123456789 [ARGS] {}", [("f", "{}", "123456789")], ""),
        ("[TOOL_CALLS] f [ARGS]{} so", [("f", "{}", "id")], "so"),
        ("[TOOL_CALLS]f[CALL_ID]1[CALL_ID]2[ARGS]{}", [("f", "{}", "1[CALL_ID]2")], ""),
        ("[TOOL_CALLS]f[CALL_ID]1", [], "[TOOL_CALLS]f[CALL_ID]1"),
        ("[TOOL_CALLS]f[ARGS]5", [], "[TOOL_CALLS]f[ARGS]5"),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}} so', [("f", "{}", "id")], "so"),
        (
            '[TOOL_CALLS][{"name": "f", "arguments": {}, "x": 5}, {"name": "g"}]',
            [("f", "{}", "id")],
            ', "x": 5}, {"name": "g"}]',
        ),
    ],
    "hermes": [
        ('<tool_call>{"name": "f", "arguments": {}, "type": "a"}</tool_call>so', [("f", "{}", "id")], "so"),
        ('<tool_call>{"name": "f", "arguments": {}, "x": 5}</tool_call>', [("f", "{}", "id")], ', "x": 5}</tool_call>'),
        (
            '<tool_call>{"name": "f", "arguments": {}, "x": "\\q"}</tool_call>',
            [("f", "{}", "id")],
            ', "x": "\\q"}</tool_call>',
        ),
        ('<tool_call>{"name": "f", "arguments": {}</tool_call>so', [("f", "{}", "id")], "</tool_call>so"),
        ('<tool_call>[{"name": "f", "arguments": {}}</tool_call>so', [("f", "{}", "id")], "</tool_call>so"),
        ('<tool_call>[{"name": "f"}, 5]</tool_call>', [("f", "{}", "id")], ", 5]</tool_call>"),
        (
            '<tool_call>[{"name": "f", "arguments": {"a", {"name": "g", "arguments": {}}]</tool_call>',
            [("f", '{"a"', "id")],
            ', {"name": "g", "arguments": {}}]</tool_call>',
        ),
        ('<tool_call>{"type": "function", "name": "f"}</tool_call>', [("f", "{}", "id")], ""),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [("f", '{"a": 1}', "id")], ""),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', [("f", '{"a": 1}', "id")], ""),
    ],
    "llama3": [
        ('{"name": "f", "arguments": {"a": 1}}', [("f", '{"a": 1}', "id")], ""),
        ('{"parameters": {}, "name": "f"}', [("f", "{}", "id")], ""),
        ('{"name": "f", "parameters": {}, "x": 5}; {"name": "g", "parameters": {}}', [("f", "{}", "id")], "REST"),
        ('{"name": "f", "parameters": {"a": tru}}', [("f", '{"a": tru', "id")], "}}"),
        (
            '{"name": "f", "parameters": {"a" {"name": "g", "parameters": {}}',
            [("f", '{"a" ', "id")],
            '{"name": "g", "parameters": {}}',
        ),
        ('{"name": "f", "parameters": {}} ;; {"name": "g", "parameters": {}}', [("f", "{}", "id")], "REST"),
    ],
    "deepseek": [
        (f"{BEGIN}{fenced()}{ONE_END}{END}so", [("f", "{}", "id")], "so"),
        (f"{BEGIN}{fenced(kind=' function ')}{ONE_END}{END}", [("f", "{}", "id")], ""),
        (f"{BEGIN}{fenced(fence='')}{ONE_END}{END}", [("f", "{}", "id")], f"{ONE_END}{END}"),
        (f"{BEGIN}{fenced()}{END}so", [("f", "{}", "id")], "so"),
        (f"{BEGIN}{fenced()}{fenced('g')}{ONE_END}{END}", [("f", "{}", "id")], f"{fenced('g')}{ONE_END}{END}"),
        (f"{BEGIN}{ONE}f{SEP}{{}}{END}so", [("f", "{}", "id")], "so"),
        (f"{BEGIN}{ONE} f {SEP} {{}}{ONE_END} {END}", [("f", "{}", "id")], ""),
        (f"{BEGIN}{fenced(arguments='[]')}", [], f"{BEGIN}{fenced(arguments='[]')}"),
    ],
    "kimi": [
        (kimi(f"functions.f:12{ARGUMENT}{{}}"), [("f", "{}", "functions.f:12")], ""),
        (kimi(f"functions.a:b:3{ARGUMENT}{{}}"), [("a:b", "{}", "functions.a:b:3")], ""),
        (kimi(f"functions.f:3a{ARGUMENT}{{}}"), [("f:3a", "{}", "id")], ""),
        (kimi(f"functions.f:{ARGUMENT}{{}}"), [("f:", "{}", "id")], ""),
        (kimi(f" functions.f:0 {ARGUMENT} {{}}"), [("f", "{}", "functions.f:0")], ""),
        (kimi(f"a.f:0{ARGUMENT}{{}}"), [("a.f", "{}", "a.f:0")], ""),
        (kimi(f"functions.f:0{ARGUMENT}[]"), [], kimi(f"functions.f:0{ARGUMENT}[]")),
        (kimi(f"functions.:0{ARGUMENT}{{}}"), [], kimi(f"functions.:0{ARGUMENT}{{}}")),
        (f"{SECTION}{CALL}f:0{ARGUMENT}{{}}{SECTION_END}so", [("f", "{}", "f:0")], "so"),
        (
            f"{SECTION}{CALL}f:0{ARGUMENT}{{}}{CALL}g:1{ARGUMENT}{{}}{CALL_END}{SECTION_END}",
            [("f", "{}", "f:0")],
            f"{CALL}g:1{ARGUMENT}{{}}{CALL_END}{SECTION_END}",
        ),
    ],
    "qwen3_coder": [
        ("<function=f><parameter=a>1</parameter>", [("f", '{"a": 1}', "id")], ""),
        ("<function=f><parameter=a>1\n</parameter></function>", [("f", '{"a": 1}', "id")], ""),
        ("<function=f<parameter=a>1</parameter></function>", [("f", '{"a": 1}', "id")], ""),
        ("<function=f</function>so", [("f", "{}", "id")], "so"),
        (
            "<function=f>so<parameter=a>1</parameter></function>",
            [],
            "<function=f>so<parameter=a>1</parameter></function>",
        ),
        (
            "<tool_call><function=f><parameter=a>1</parameter></tool_call>so",
            [("f", '{"a": 1}', "id")],
            "</tool_call>so",
        ),
        ("<tool_call><function=f>\n</function>so</tool_call>", [("f", "{}", "id")], "so</tool_call>"),
        (
            "<tool_call><function=f><parameter=a>1</function></tool_call>",
            [("f", '{"a": 1</function></tool_call>', "id")],
            "",
        ),
        (
            "<function=f>x</function><tool_call><function=g></function></tool_call>",
            [("g", "{}", "id")],
            "<function=f>x</function>",
        ),
    ],
    "glm": [
        ("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", [("f", '{"a": 1}', "id")], ""),
        ("<tool_call> \n f \n</tool_call>", [("f", "{}", "id")], ""),
        ("<tool_call>f\n<arg_key>a</arg_key>1</tool_call>", [("f", "{}", "id")], "<arg_key>a</arg_key>1</tool_call>"),
        ("<tool_call>f\n</tool_call><tool_call>g\n</tool_call>so", [("f", "{}", "id"), ("g", "{}", "id")], "so"),
    ],
    "minimax": [
        ('<invoke name="f"><parameter name="a">1</parameter></invoke>so', [("f", '{"a": 1}', "id")], "so"),
        (
            '<minimax:tool_call><invoke name="f"></invoke>so</minimax:tool_call>',
            [("f", "{}", "id")],
            "so</minimax:tool_call>",
        ),
        (
            '<minimax:tool_call><invoke name="f"></invoke><invoke name="g"></invoke></minimax:tool_call>so',
            [("f", "{}", "id"), ("g", "{}", "id")],
            "so",
        ),
    ],
    "lfm2": [
        ("<|tool_call_start|>[f(a=1)<|tool_call_end|>so", [("f", '{"a": 1}', "id")], "<|tool_call_end|>so"),
        ("<|tool_call_start|>[f(a=1 b=2)]<|tool_call_end|>", [("f", '{"a": "1 b=2"}', "id")], ""),
        ("<|tool_call_start|>[f(a='1' b=2)]", [("f", '{"a": "1"}', "id")], "b=2)]"),
        ("<|tool_call_start|>[f(a=[1 2])]", [("f", '{"a": ["1 2"]}', "id")], ""),
        ("<|tool_call_start|>[f(a=['1' 2])]", [("f", '{"a": ["1"', "id")], "2])]"),
        ("<|tool_call_start|>[f(a={'k': 1, \"l\": [2]})]", [("f", '{"a": {"k": 1, "l": [2]}}', "id")], ""),
        ("<|tool_call_start|>[f('a'=1)]", [("f", '{"a": 1}', "id")], ""),
        ("<|tool_call_start|>[f('a b' = 1)]", [("f", '{"a b": 1}', "id")], ""),
        ("<|tool_call_start|>[f(a=, g())]so", [("f", '{"a": ', "id")], ", g())]so"),
        ("<|tool_call_start|>[f(a=]<|tool_call_end|>so", [("f", '{"a": ', "id")], "]<|tool_call_end|>so"),
        ("<|tool_call_start|>[f(a=1), 5]so", [("f", '{"a": 1}', "id")], ", 5]so"),
        ("<|tool_call_start|>[ f (a = 1) , g() ]so", [("f", '{"a": 1}', "id"), ("g", "{}", "id")], "so"),
        ("<|tool_call_start|>[f(a=NaN)]", [("f", '{"a": "NaN"}', "id")], ""),
        ("<|tool_call_start|>[f(a=1e999)]", [("f", '{"a": 1e999}', "id")], ""),
        ("<|tool_call_start|>[f(a=true, b=null)]", [("f", '{"a": true, "b": null}', "id")], ""),
    ],
    "gemma": [
        ("<|tool_call>call:f{a:{b:1}}so", [("f", '{"a": {"b": 1}}', "id")], "so"),
        ("<|tool_call>call: f {a : 1}<tool_call|>so", [("f", '{"a": 1}', "id")], "so"),
        ("<|tool_call>call:f{a:1<tool_call|>so", [("f", '{"a": "1<tool_call|>so"', "id")], ""),
        ('<|tool_call>call:f{a:<|"|>1<tool_call|>', [("f", '{"a": "1<tool_call|>', "id")], ""),
    ],
}


@pytest.mark.parametrize(
    ("family", "text", "found", "content"), [(name, *each) for name in CASES for each in CASES[name]]
)
def test_what_is_no_part_of_a_call_is_content(family: str, text: str, found: Found, content: str) -> None:
    calls, rest = read(family, text)
    assert calls == found
    assert rest == content or (content == "REST" and rest and text.endswith(rest))


def test_of_two_tools_of_one_name_the_first_says_what_its_values_are() -> None:
    text = "<function=f><parameter=a>1</parameter></function>"
    kinds = [{"name": "f", "parameters": {"properties": {"a": {"type": kind}}}} for kind in ("string", "integer")]
    for tools, value in ((kinds, '"1"'), (kinds[::-1], "1"), ([{"name": "f"}, *kinds], "1")):
        assert read("qwen3_coder", text, tools) == ([("f", f'{{"a": {value}}}', "id")], "")


def test_calls_are_written_in_the_words_and_quotes_of_their_model() -> None:
    arguments = {"a": 'x "é"\n', "b": True, "c": None, "d": [1.5, False]}
    calls = [{"function": {"name": name, "arguments": given}} for name, given in (("f", arguments), ("g", {}))]
    write = FAMILY["lfm2"].write
    assert write is not None
    written = '[f(a="x \\"é\\"\\n", b=True, c=None, d=[1.5, False]), g()]'
    assert write(calls) == f"<|tool_call_start|>{written}<|tool_call_end|>"
