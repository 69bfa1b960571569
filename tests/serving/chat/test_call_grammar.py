"""Grammars that force calls: the template's own text for a call is accepted token by token,
everything else is refused."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from sglcore.engine.tokenizers.chat_template import TextError
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.sampling.grammar_spec import Grammar, GrammarError, Thinking
from sglcore.serving.chat.format import ChatFormat, Rendered
from tests.serving.chat.checkpoints import FAMILIES

SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "count": {"$ref": "#/$defs/Count"},
        "unit": {"type": "string", "enum": ["km", "mile"]},
    },
    "required": ["place", "count"],
    "additionalProperties": False,
    "$defs": {"Count": {"type": "integer"}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
    for name, schema in (("look", SCHEMA), ("look_up", {"type": "object"}), ("say-é", SCHEMA))
]
TAGGED = ("coder", "glm", "glm close", "minimax", "lfm2", "lfm2 silent", "gemma", "functiongemma")
"""Families with grammars that accept declared parameters only."""
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.tools]


class Case:
    """A checkpoint, its chat format, and an llguidance matcher."""

    def __init__(self, name: str, codec: TextCodec, form: ChatFormat) -> None:
        self.codec, self.format = codec, form
        self.special = FAMILIES[name].special
        self.judge = llguidance.LLTokenizer(self.codec.tokenizer.to_str(), eos_token=256)

    def answer(self, *calls: tuple[str, Any]) -> str:
        """The template's text for calls, without the end of the turn."""
        given = [
            {
                "id": f"abcdefg{n:02}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for n, (name, arguments) in enumerate(calls)
        ]
        talk = [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": None, "tool_calls": given}]
        text = self.format.render(talk, tools=TOOLS, add_generation_prompt=False).text
        text = text[text.rindex("Q?") :]
        family = self.format._tools
        assert family
        begin = min(place for mark in family.opening if (place := text.find(mark)) >= 0)
        end = max(text.rfind(token) for token in self.special)
        return text[begin : end if end > begin else None].rstrip("\n")

    def accepts(self, grammar: Grammar | None, text: str) -> bool:
        """Whether the tokens of the text are allowed one after another and the text may end
        there."""
        assert grammar and grammar.kind == "lark"
        matcher = llguidance.LLMatcher(self.judge, grammar.text, log_level=0)
        assert not matcher.get_error(), matcher.get_error()
        ids = self.codec.encode(text, special=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def cases(codecs: dict[str, TextCodec], formats: dict[str, ChatFormat]) -> dict[str, Case]:
    """The case of each family with tools."""
    return {name: Case(name, codecs[name], formats[name]) for name in WITH_TOOLS}


GOOD = {"place": 'a "b" é\nc', "count": 3}


SAME_QUOTES = [name for name in WITH_TOOLS if name != "lfm2"]
"""Families with the same quotes in forced text as in the template's text."""


@pytest.mark.parametrize("name", SAME_QUOTES)
def test_what_the_template_writes_is_accepted(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    required = case.format.tool_grammar(TOOLS, "required")
    assert case.accepts(required, case.answer(("look", GOOD)))
    assert case.accepts(required, case.answer(("look", {**GOOD, "unit": "mile"})))
    if name not in TAGGED:
        assert case.accepts(required, case.answer(("look_up", {"any": [1]})))
    assert case.accepts(required, case.answer(("say-é", GOOD)))
    named = case.format.tool_grammar(TOOLS, {"type": "function", "function": {"name": "look"}})
    assert case.accepts(named, case.answer(("look", GOOD)))


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_anything_else_is_refused(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    required = case.format.tool_grammar(TOOLS, "required")
    named = case.format.tool_grammar(TOOLS, {"type": "function", "function": {"name": "look"}})
    good = case.answer(("look", GOOD))
    assert not case.accepts(required, "I would rather talk.")
    assert not case.accepts(required, "")
    assert not case.accepts(required, good[:-2])
    assert not case.accepts(required, good + " and more")
    assert not case.accepts(required, case.answer(("other", GOOD)))
    assert not case.accepts(required, case.answer(("look", {**GOOD, "unit": "inch"})))
    assert not case.accepts(required, case.answer(("look", {"place": "a"})))
    assert not case.accepts(required, case.answer(("look", {"place": "a", "count": "three"})))
    assert not case.accepts(named, case.answer(("say-é", GOOD)))


@pytest.mark.parametrize("name", [name for name in SAME_QUOTES if name not in ("llama", "harmony")])
def test_several_calls_are_allowed_when_any_may_be_made(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    two = case.answer(("look", GOOD), ("say-é", GOOD))
    assert case.accepts(case.format.tool_grammar(TOOLS, "required"), two)
    assert not case.accepts(case.format.tool_grammar(TOOLS, "required", parallel=False), two)
    assert not case.accepts(case.format.tool_grammar(TOOLS, {"function": {"name": "look"}}), two)


def test_blanks_stand_before_calls_only_where_reasoning_has_ended(cases: dict[str, Case]) -> None:
    case = cases["hermes"]
    call = case.answer(("look", GOOD))
    assert not case.accepts(case.format.tool_grammar(TOOLS, "required"), f"\n\n{call}")
    after = case.format.tool_grammar(TOOLS, "required", follows_reasoning=True)
    assert case.accepts(after, f"\n\n{call}") and case.accepts(after, call)


ANSWERS = (
    (Grammar("json_schema", json.dumps(SCHEMA)), '{"place":"x","count":1}', '{"place":"x"}'),
    (Grammar("regex", "a/b|a\\/c"), "a/c", "a/d"),
    (Grammar("json_object"), "{}", "[]"),
)


@pytest.mark.parametrize("name", ["hermes", "coder", "gemma", "glm"])
@pytest.mark.parametrize(("answer", "good", "bad"), ANSWERS)
def test_where_no_call_is_forced_there_are_calls_or_the_bound_answer(
    cases: dict[str, Case], name: str, answer: Grammar, good: str, bad: str
) -> None:
    case = cases[name]
    either = case.format.tool_grammar(TOOLS, "auto", answer=answer)
    call = case.answer(("look", GOOD))
    assert case.accepts(either, call) and case.accepts(either, good)
    assert not case.accepts(either, bad) and not case.accepts(either, good + call)
    assert not case.accepts(case.format.tool_grammar(TOOLS, "required", answer=answer), good)


def test_an_answer_that_leaves_no_place_for_calls_is_refused(cases: dict[str, Case]) -> None:
    with pytest.raises(GrammarError, match="this model's calls look like JSON too"):
        cases["llama"].format.tool_grammar(TOOLS, "auto", answer=ANSWERS[0][0])
    with pytest.raises(GrammarError, match="found tools and an answer that is constrained by lark"):
        cases["hermes"].format.tool_grammar(TOOLS, "auto", answer=Grammar("lark", 'start: "a"'))


def test_reasoning_may_begin_by_its_own_token_unless_the_prompt_has_ended_it(formats: dict[str, ChatFormat]) -> None:
    own, is_open = Thinking("</think>", "</think>", "<think>"), Thinking("</think>", "</think>")
    form = formats["thinking"]
    assert form.thinking(Rendered("x<think>\n", reasoning_open=True), is_bound=True) == is_open
    for name, form in formats.items():
        known = {"<think>", "</think>"} <= form._added.keys()
        if form.reasoning_parser == "think":
            assert form.thinking(Rendered("x"), is_bound=True) == (own if known else None), name
            assert form.thinking(Rendered("x<think>\n\n</think>\n\n"), is_bound=True) is None
            assert form.thinking(Rendered("x"), is_bound=False) is None
    assert any("<think>" in form._added for form in formats.values())


@pytest.mark.parametrize("name", ["hermes", "llama"])
def test_blanks_between_the_arguments_are_bounded(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    grammar = case.format.tool_grammar(TOOLS, "required")
    call = case.answer(("look", GOOD))
    assert case.accepts(grammar, call.replace(', "count"', ',\n    "count"'))
    assert not case.accepts(grammar, call.replace(', "count"', ',   "count"'))
    assert not case.accepts(grammar, call.replace(', "count"', ',\n\n"count"'))


@pytest.mark.parametrize("name", ["hermes", "coder", "lfm2", "gemma"])
@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer", "x-guidance": {"lenient": True}}}}, "x-guidance"),
        ({"type": "object", "properties": {"a": {"type": "integer", "$anchor": "here"}}}, r"\$anchor"),
        ({"type": "object", "$defs": {"B": {"type": "integer", "$anchor": "here"}}}, r"\$anchor"),
        ({"type": "object", "properties": {"a": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}}}, "number"),
        ({"type": "string"}, 'type: "string"'),
        ({"type": None}, "type: null"),
        ({"properties": [1]}, "properties"),
        ({"required": 5}, "required"),
    ],
)
def test_parameters_that_no_call_could_be_held_to_are_refused_by_name(
    cases: dict[str, Case], name: str, parameters: dict[str, Any], found: str
) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    with pytest.raises(GrammarError, match=found):
        cases[name].format.tool_grammar([tool], "required")


NOTATED = ("lfm2", "lfm2 silent", "gemma", "functiongemma")
"""Families with templates that write lists and objects in their own notation; their forced text has
JSON."""


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("names", ["$defs", "definitions"])
def test_a_parameter_may_refer_to_definitions_from_anywhere_in_it(
    cases: dict[str, Case], name: str, names: str
) -> None:
    case, city = cases[name], {"$ref": f"#/{names}/City"}
    inside = {"zip": {"type": "integer"}, "of": city}
    schema = {
        "type": "object",
        "properties": {"place": {"type": "string"}, "near": {"type": "array", "items": city}, "first": city},
        "required": ["place", "near"],
        names: {"City": {"type": "object", "properties": inside, "required": ["zip"]}},
    }
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": schema}}
    grammar = case.format.tool_grammar([tool], "required")
    good = case.answer(("look", {"place": "a", "near": [{"zip": 1}, {"zip": 2, "of": {"zip": 3}}]}))
    assert case.accepts(grammar, good) == (name not in NOTATED)
    assert not case.accepts(grammar, case.answer(("look", {"place": "a", "near": [{"zip": "one"}]})))


@pytest.mark.parametrize("name", ["hermes", "llama"])
def test_arguments_without_a_type_are_an_object(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"place": {}}}}}
    grammar = case.format.tool_grammar([tool], "required")
    call = case.answer(("look", {"place": "a"}))
    assert case.accepts(grammar, call)
    assert not case.accepts(grammar, call.replace('{"place": "a"}', "5"))


def test_other_choices_force_nothing_and_unknown_names_are_refused(cases: dict[str, Case]) -> None:
    found = cases["hermes"].format
    assert found.tool_grammar(TOOLS, "auto") is None and found.tool_grammar(TOOLS, "none") is None
    with pytest.raises(TextError, match=r"names 'fly'; wanted one of look, look_up, say-é$"):
        found.tool_grammar(TOOLS, {"type": "function", "function": {"name": "fly"}})


@pytest.mark.parametrize(
    ("name", "begin", "end", "near", "far"),
    [
        ("lfm2", "<|tool_call_start|>[f(", ")]<|tool_call_end|>", 'near="é\\"\\n"', "far=True"),
        (
            "functiongemma",
            "<start_function_call>call:f{",
            "}<end_function_call>",
            "near:<escape>é\n<escape>",
            "far:true",
        ),
    ],
)
def test_parameters_in_a_notation_may_be_left_out_and_keep_their_order(
    cases: dict[str, Case], name: str, begin: str, end: str, near: str, far: str
) -> None:
    schema = {"type": "object", "properties": {"near": {"type": "string"}, "far": {"type": "boolean"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    optional = cases[name].format.tool_grammar([tool], "required")
    first, second, joint = (near, far, ", ") if name == "lfm2" else (far, near, ",")
    for given in ("", near, far, first + joint + second):
        assert cases[name].accepts(optional, begin + given + end), given
    for given in (second + joint + first, joint + near, near + joint, near + far, "near"):
        assert not cases[name].accepts(optional, begin + given + end), given
    schema["required"] = ["far"]
    required = cases[name].format.tool_grammar([tool], "required")
    assert cases[name].accepts(required, begin + far + end)
    assert cases[name].accepts(required, begin + first + joint + second + end)
    assert not cases[name].accepts(required, begin + near + end)
    assert not cases[name].accepts(required, begin + end)
