"""Parts of grammars of calls: names, values and texts that templates of the families do not all
have."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.sampling.grammar_spec import Grammar, GrammarError
from sglcore.serving.chat.call_grammar import _after, _Literals
from sglcore.serving.chat.format import ChatFormat
from sglcore.serving.chat.self_test import Turn
from tests.serving.chat.test_call_grammar import GOOD, SAME_QUOTES, TAGGED, TOOLS, WITH_TOOLS, Case, cases

__all__ = ["cases"]

SEVERAL = [name for name in SAME_QUOTES if name not in ("llama", "harmony")]
IN_TAGS = ("coder", "glm", "glm close", "minimax")
SORTED = ("gemma", "functiongemma")
"""Families with templates that sort parameters by name, whatever the case."""


def tool(properties: dict[str, Any], *required: str, name: str = "look") -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


def test_of_marks_that_begin_alike_the_longest_is_the_token() -> None:
    literal = _Literals({"<a>": 1, "<a>b": 2, "": 3, "<": 4})
    assert literal("x<a>b<a><a") == '"x" <[2]> <[1]> <[4]> "a"' and literal("") == ""
    assert _Literals({})('a"b') == '"a\\"b"'


@pytest.mark.parametrize(
    ("text", "footer", "found"), [("{}<e><e>", "<e>", "{}<e>"), ("{} }\n<e> \n", "\n<e>\n", "{} }")]
)
def test_the_text_after_a_call_goes_on_up_to_the_last_end_of_the_turn(text: str, footer: str, found: str) -> None:
    assert _after(Turn(f"call{text}", False, (), footer), 4) == found
    assert _after(Turn(f"call{text}", False, (), " \n"), 4) == text.rstrip()


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_and_an_answer_are_refused_together_where_calls_begin_as_json_does(
    cases: dict[str, Case], name: str
) -> None:
    form, text = cases[name].format, cases[name].answer(("look", GOOD))
    answer = Grammar("json_object")
    if text[0] in "{[":
        with pytest.raises(GrammarError, match=r"calls look like JSON too; wanted one of them; set tool_choice to"):
            form.tool_grammar(TOOLS, "auto", answer=answer)
    elif name == "harmony":
        assert form.tool_grammar(TOOLS, "auto", answer=answer) is answer
    else:
        assert cases[name].accepts(form.tool_grammar(TOOLS, "auto", answer=answer), '{"a":1}')


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        (Grammar("regex", "a\nb"), "a\nb", "ab"),
        (Grammar("regex", "a\\\\/b"), "a\\/b", "a/b"),
        (Grammar("json_schema", "true"), "5", "five"),
        (Grammar("json_schema", '{"enum": ["a/b"]}'), '"a/b"', '"a"'),
    ],
)
def test_an_answer_of_any_text_may_stand_instead_of_calls(
    cases: dict[str, Case], answer: Grammar, good: str, bad: str
) -> None:
    grammar = cases["hermes"].format.tool_grammar(TOOLS, "auto", answer=answer)
    assert cases["hermes"].accepts(grammar, good) and not cases["hermes"].accepts(grammar, bad)


@pytest.mark.parametrize("name", SEVERAL)
def test_a_template_that_was_seen_to_write_one_call_writes_no_more(
    name: str, cases: dict[str, Case], codecs: dict[str, TextCodec], formats: dict[str, ChatFormat]
) -> None:
    form = formats[name]
    assert form._sample is not None and form._sample.two is not None
    one = replace(form, _sample=replace(form._sample, two=None)).tool_grammar(TOOLS, "required")
    assert cases[name].accepts(one, cases[name].answer(("look", GOOD)))
    assert not cases[name].accepts(one, cases[name].answer(("look", GOOD), ("look", GOOD)))


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "look"}}, {"name": "look"}])
def test_a_named_function_is_called_once(name: str, choice: dict[str, Any], cases: dict[str, Case]) -> None:
    grammar = cases[name].format.tool_grammar(TOOLS, choice)
    assert cases[name].accepts(grammar, cases[name].answer(("look", GOOD)))
    assert not cases[name].accepts(grammar, cases[name].answer(("look", GOOD), ("look", GOOD)))


@pytest.mark.parametrize("name", SORTED)
def test_parameters_are_sorted_as_the_template_sorts_them(cases: dict[str, Case], name: str) -> None:
    names = ("b", "A", "c", "B2")
    grammar = cases[name].format.tool_grammar([tool({each: {"type": "integer"} for each in names}, *names)], "required")
    text = cases[name].answer(("look", dict.fromkeys(names, 1)))
    assert [text.index(f"{each}:") for each in ("A", "b", "B2", "c")] == sorted(
        text.index(f"{each}:") for each in names
    )
    assert cases[name].accepts(grammar, text)


VALUES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "numbers": ({"enum": [1, 2]}, [1, 2], [3]),
    "typed numbers": ({"enum": [1, 2], "type": "integer"}, [1, 2], [3]),
    "nothing": ({"type": "null"}, [None], [1]),
    "truth": ({"type": "boolean"}, [True, False], [1]),
    "number": ({"type": "number", "minimum": 1}, [1.5], [0.5, True]),
    "list": ({"type": "array", "items": {"type": "integer"}}, [[1, 2], []], [1, ["a"]]),
    "object": ({"type": "object"}, [{}, {"a": 1}], [1, []]),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", IN_TAGS)
def test_a_value_in_tags_is_of_the_type_that_its_schema_names(cases: dict[str, Case], name: str, kind: str) -> None:
    """Without a type a value is text, which is not bound."""
    schema, good, bad = VALUES[kind]
    grammar = cases[name].format.tool_grammar([tool({"place": schema}, "place")], "required")
    call = cases[name].answer(("look", {"place": "HERE"}))
    for value in good:
        assert cases[name].accepts(grammar, call.replace("HERE", json.dumps(value))), value
    for value in bad if "type" in schema else ():
        assert not cases[name].accepts(grammar, call.replace("HERE", json.dumps(value))), value


@pytest.mark.parametrize("name", IN_TAGS)
def test_a_choice_in_tags_has_its_words_alone(cases: dict[str, Case], name: str) -> None:
    grammar = cases[name].format.tool_grammar([tool({"place": {"enum": ["a b", "é"]}}, "place")], "required")
    for value, is_good in (("a b", True), ("é", True), ("a", False), ('"a b"', False)):
        assert cases[name].accepts(grammar, cases[name].answer(("look", {"place": value}))) is is_good


@pytest.mark.parametrize("reference", ["#/$defs/no/such", "#/no", "#/properties/place/type/x", "other.json", "#"])
def test_a_reference_to_nothing_in_this_document_binds_no_text_in_tags(cases: dict[str, Case], reference: str) -> None:
    properties: dict[str, Any] = {"place": {"type": "string"}, "any": {"$ref": reference}}
    grammar = cases["coder"].format.tool_grammar([tool(properties, "place")], "required")
    assert cases["coder"].accepts(grammar, cases["coder"].answer(("look", {"place": "x", "any": "any text"})))
    assert not cases["coder"].accepts(grammar, cases["coder"].answer(("look", {"any": "any text"})))


@pytest.mark.parametrize("name", [name for name in SAME_QUOTES if name not in TAGGED])
def test_a_functions_name_stands_in_json_as_json_writes_it(cases: dict[str, Case], name: str) -> None:
    is_json = '"look"' in cases[name].answer(("look", GOOD))
    given = tool({"place": {"type": "string"}}, name='a"b\\c')
    written = 'a\\"b\\\\c' if is_json else None
    if written is not None:
        text = cases[name].answer(("look", {"place": "x"})).replace("look", written)
        assert cases[name].accepts(cases[name].format.tool_grammar([given], "required"), text)


@pytest.mark.parametrize(
    ("number", "is_good"), [("0", True), ("42", True), ("999", True), ("1000", False), ("x", False)]
)
def test_a_numbered_call_may_have_any_number_of_three_digits(
    cases: dict[str, Case], number: str, is_good: bool
) -> None:
    case = cases["kimi"]
    text = case.answer(("look", GOOD))
    assert ":0<" in text
    grammar = case.format.tool_grammar(TOOLS, "required")
    assert case.accepts(grammar, text.replace(":0<", f":{number}<")) is is_good


@pytest.mark.parametrize("name", ["mistral list", "mistral named"])
def test_the_id_of_a_call_has_nine_letters_and_digits(cases: dict[str, Case], name: str) -> None:
    text = cases[name].answer(("look", GOOD))
    grammar = cases[name].format.tool_grammar(TOOLS, "required")
    for call_id, is_good in (("aZ9aZ9aZ9", True), ("012345678", True), ("abcdefgh", False), ("abcdefg-0", False)):
        if "abcdefg00" in text:
            assert cases[name].accepts(grammar, text.replace("abcdefg00", call_id)) is is_good, call_id


@pytest.mark.parametrize("name", IN_TAGS)
def test_a_reference_to_a_deep_place_binds_a_value_in_tags(cases: dict[str, Case], name: str) -> None:
    group = {"type": "object", "properties": {"size": {"type": "integer"}}}
    schema = {
        "type": "object",
        "properties": {"place": {"type": "string"}, "size": {"$ref": "#/$defs/Group/properties/size"}},
        "required": ["place", "size"],
        "$defs": {"Group": group},
    }
    given = {"type": "function", "function": {"name": "look", "description": "", "parameters": schema}}
    grammar = cases[name].format.tool_grammar([given], "required")
    for size, is_good in ((3, True), ("x", False), ({}, False)):
        assert cases[name].accepts(grammar, cases[name].answer(("look", {"place": "a", "size": size}))) is is_good
