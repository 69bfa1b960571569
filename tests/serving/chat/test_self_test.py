"""The self-test of a parser on its own checkpoint: correct parsers pass, broken ones are caught and
turned off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from sglcore.core.errors import ConfigError
from sglcore.engine.start import embedded_model
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.serving.chat.conversation import MessageForm
from sglcore.serving.chat.format import ChatFormat
from sglcore.serving.chat.parsers.families import REASONING, TOOLS
from sglcore.serving.chat.parsers.harmony import harmony
from sglcore.serving.chat.parsers.json_calls import CALL, CALL_END, Tools
from sglcore.serving.chat.parsers.json_calls import HERMES as HERMES_CALLS
from sglcore.serving.chat.parsers.parser import AnswerScan
from sglcore.serving.chat.parsers.scanner import Scan, Scanner
from sglcore.serving.chat.self_test import Candidate, Failed, check_reasoning, check_tools
from tests.serving.chat.checkpoints import FAMILIES, HERMES, codec_of, make_codec

THINK = next(family for family in REASONING if family.name == "think")
HERMES_FAMILY = next(family for family in TOOLS if family.name == "hermes")


@pytest.mark.parametrize("name", FAMILIES)
def test_each_template_gets_its_parsers_without_being_named(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    found = ChatFormat.detect(codec_of(name, tmp_path))
    assert (found.tool_parser, found.reasoning_parser) == (family.tools, family.reasoning)
    assert [(row.topic, row.requested, row.effective) for row in found.rows] == [
        ("tool parser", "auto", family.tools or "off"),
        ("reasoning parser", "auto", family.reasoning or "off"),
    ]
    assert [row.reason for row in found.rows] == [found.tool_reason, found.reasoning_reason]
    assert all(found.rows[i].reason for i in range(2)) and not any(row.downgrade for row in found.rows)


def test_the_embedded_model_has_no_tools_and_says_why() -> None:
    found = ChatFormat.detect(TextCodec(embedded_model()))
    assert found.tool_parser is None and found.reasoning_parser is None
    assert found.tool_reason == "this checkpoint's chat template has no place for tools"
    assert "markers" in found.reasoning_reason


def call(s: Scanner, *, number_off: int = 0, takes_end: bool = True, says: bool = True) -> Scan[None]:
    """Parse one call as the test's template writes it, with a defect."""
    yield from s.literal('{"name": "')
    name, _ = yield from s.upto(('"',))
    yield from s.literal(', "arguments":')
    yield from s.starts("{")
    ignored: list[str] = []
    sink = s.arguments(s.start_call(name) + number_off) if says else ignored.append
    yield from s.json_object(sink)
    yield from s.literal("}")
    if takes_end:
        yield from s.take(CALL_END)


def drops_the_second_call(s: Scanner, tools: Tools) -> Scan[None]:
    number = 0
    while (yield from s.pass_until((CALL,), "content")):
        yield from s.attempt(call(s, says=number == 0))
        number += 1


def leaves_the_end_marker(s: Scanner, tools: Tools) -> Scan[None]:
    while (yield from s.pass_until((CALL,), "content")):
        yield from s.attempt(call(s, takes_end=False))


def moves_the_index(s: Scanner, tools: Tools) -> Scan[None]:
    while (yield from s.pass_until((CALL,), "content")):
        yield from s.attempt(call(s, number_off=1))


def gives_all_arguments_to_the_first(s: Scanner, tools: Tools) -> Scan[None]:
    number = 0
    while (yield from s.pass_until((CALL,), "content")):
        yield from s.attempt(call(s, number_off=-number))
        number += 1


def shows_half_a_marker(s: Scanner, tools: Tools) -> Scan[None]:
    while (yield from s.pass_until(("tool_call>",), "content")):
        yield from s.attempt(call(s))


def shows_half_the_end_marker(s: Scanner, tools: Tools) -> Scan[None]:
    while (yield from s.pass_until((CALL,), "content")):
        yield from s.attempt(call(s, takes_end=False))
        yield from s.take("</tool_")


def sees_where_the_text_was_split(s: Scanner, tools: Tools) -> Scan[None]:
    steps = HERMES_CALLS(s, tools)
    for number, _ in enumerate(steps):
        if number == 1:
            s.say("content", "?")
        yield


def speaks_between_calls(s: Scanner, tools: Tools) -> Scan[None]:
    number = 0
    while (yield from s.pass_until((CALL,), "content")):
        if number:
            s.say("content", "and")
        yield from s.attempt(call(s))
        number += 1


def reads_nothing(s: Scanner, tools: Tools) -> Scan[None]:
    yield from s.pass_until((), "content")


@pytest.mark.parametrize(
    ("mutant", "said"),
    [
        (drops_the_second_call, "probe_alpha"),
        (leaves_the_end_marker, "</tool_call>"),
        (moves_the_index, "no order"),
        (gives_all_arguments_to_the_first, "arguments"),
        (shows_half_a_marker, "'<'"),
        (shows_half_the_end_marker, "call>"),
        (sees_where_the_text_was_split, "differently"),
        (speaks_between_calls, "leaves 'and' in the content"),
        (reads_nothing, "calls of \\[\\]"),
    ],
)
def test_a_broken_parser_fails(mutant: Callable[[Scanner, Tools], Scan[None]], said: str, tmp_path: Path) -> None:
    codec = codec_of("hermes", tmp_path)
    check_tools(Candidate(codec, HERMES_FAMILY, None, True), MessageForm())
    with pytest.raises(Failed, match=said):
        check_tools(Candidate(codec, replace(HERMES_FAMILY, calls=mutant), None, True), MessageForm())


ONE_CALL = HERMES.replace(
    "{%- for c in",
    "{%- if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}{%- for c in",
)
CUT_AT = 40
"""Number of characters after which a text is cut, in the middle of a call."""


def stumbles(steps: Scan[None], s: Scanner) -> Scan[None]:
    """Parse, with a defect if the first part of the text has CUT_AT characters."""
    first = 0
    for number, _ in enumerate(steps):
        if number == 1 and first == CUT_AT:
            s.say("content", "?")
        first = first or len(s._text)
        yield


@pytest.mark.parametrize(("template", "has_two"), [(HERMES, True), (ONE_CALL, False)])
def test_a_text_is_cut_at_every_place_whether_the_template_writes_one_call_or_two(
    template: str, has_two: bool, tmp_path: Path
) -> None:
    codec = make_codec(tmp_path, template)
    assert (check_tools(Candidate(codec, HERMES_FAMILY, None, True), MessageForm()).two is not None) is has_two
    broken = replace(HERMES_FAMILY, calls=lambda s, tools: stumbles(HERMES_CALLS(s, tools), s))
    with pytest.raises(Failed, match=f"differently split after {CUT_AT} characters"):
        check_tools(Candidate(codec, broken, None, True), MessageForm())


def test_reasoning_is_cut_at_every_place(tmp_path: Path) -> None:
    def broken(s: Scanner, tools: Tools, *, reads_calls: bool, is_open: bool) -> Scan[None]:
        yield from stumbles(harmony(s, tools, reads_calls=reads_calls, is_open=is_open), s)

    family = next(family for family in REASONING if family.name == "harmony")
    with pytest.raises(Failed, match=f"split after {CUT_AT} characters"):
        check_reasoning(codec_of("harmony", tmp_path), replace(family, answer=broken), skip_special_tokens=False)


@pytest.mark.parametrize("name", ["mistral list", "mistral named", "harmony"])
def test_calls_with_marks_that_decoding_leaves_out_fail(name: str, tmp_path: Path) -> None:
    codec = codec_of(name, tmp_path)
    found = ChatFormat.detect(codec)
    assert found._tools is not None
    check_tools(Candidate(codec, found._tools, found._reasoning, False), MessageForm())
    with pytest.raises(Failed):
        check_tools(Candidate(codec, found._tools, found._reasoning, True), MessageForm())


def test_the_reason_of_a_failure_is_that_of_the_first_form(tmp_path: Path) -> None:
    refuses = "{%- for c in m.tool_calls %}{% if c.function.arguments is string %}{{ raise_exception('text') }}"
    template = wrong_template().replace("{%- for c in", f"{refuses}{{% endif %}}{{% endfor %}}{{%- for c in", 1)
    found = ChatFormat.detect(make_codec(tmp_path, template))
    assert found.tool_reason.startswith("hermes failed its test: it reads arguments")


@pytest.mark.parametrize("written", ["{{ m.content }}", "{{ m.content or '' }}", "{{ m.content if m.content }}"])
def test_a_template_that_writes_none_as_a_word_gets_an_empty_text(written: str, tmp_path: Path) -> None:
    found = ChatFormat.detect(make_codec(tmp_path, HERMES.replace("{{ m.content or '' }}", written)))
    assert (found.tool_parser, found.form.empty) == ("hermes", written == "{{ m.content }}")
    said = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert "None" not in found.render([{"role": "user", "content": "Hi"}, said]).text


def test_a_marker_left_after_the_only_call_of_a_turn_fails(tmp_path: Path) -> None:
    codec = make_codec(tmp_path, ONE_CALL)
    assert check_tools(Candidate(codec, HERMES_FAMILY, None, True), MessageForm()).two is None
    for mutant in (leaves_the_end_marker, shows_half_the_end_marker):
        with pytest.raises(Failed, match="call>"):
            check_tools(Candidate(codec, replace(HERMES_FAMILY, calls=mutant), None, True), MessageForm())


def test_markers_that_are_no_tokens_of_the_tokenizer_fail_the_test_of_reasoning(tmp_path: Path) -> None:
    codec = make_codec(tmp_path, HERMES, special=("<think>", "</think>"))
    check_reasoning(codec, THINK, skip_special_tokens=False)
    with pytest.raises(Failed, match="from its tokens"):
        check_reasoning(codec, THINK, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("checkpoint", "defect"),
    [
        ("glm", {"value": ("", "</arg_value>")}),
        ("glm", {"end": "</arg_value>"}),
        ("glm close", {"function": ("<tool_call>", "_")}),
        ("minimax", {"section": ("", "")}),
        ("minimax", {"key": ("<parameter name=", ">")}),
        ("coder", {"margin": ""}),
        ("granite", {"begin": "<|tool"}),
        ("phi", {"end": "]"}),
        ("nemotron", {"end": "</TOOL"}),
        ("lfm2", {"quotes": ('"',)}),
        ("lfm2", {"is_list": False}),
        ("gemma", {"assign": "="}),
        ("functiongemma", {"quotes": ("<esc", "ape>")}),
    ],
)
def test_a_format_with_a_wrong_mark_fails(checkpoint: str, defect: dict[str, Any], tmp_path: Path) -> None:
    codec = codec_of(checkpoint, tmp_path)
    form = ChatFormat.detect(codec).form
    family = next(family for family in TOOLS if family.name == FAMILIES[checkpoint].tools)
    check_tools(Candidate(codec, family, None, False), form)
    broken = replace(family, calls=replace(cast(Any, family.calls), **defect))
    with pytest.raises(Failed):
        check_tools(Candidate(codec, broken, None, False), form)


def keeps_the_number(s: Scanner, tools: Tools) -> Scan[None]:
    yield from s.pass_until(("<|tool_calls_section_begin|>",), "content")
    while (yield from s.take("<|tool_call_begin|>")):
        name, _ = yield from s.upto(("<|tool_call_argument_begin|>",))
        yield from s.json_object(s.arguments(s.start_call(name.removeprefix("functions."))))
        yield from s.take("<|tool_call_end|>")
    yield from s.take("<|tool_calls_section_end|>")


def test_a_name_with_its_number_fails(tmp_path: Path) -> None:
    codec = codec_of("kimi", tmp_path)
    family = next(family for family in TOOLS if family.name == "kimi")
    form = ChatFormat.detect(codec).form
    check_tools(Candidate(codec, family, THINK, True), form)
    with pytest.raises(Failed, match="probe_alpha:0"):
        check_tools(Candidate(codec, replace(family, calls=keeps_the_number), THINK, True), form)


def forgets_the_channel(s: Scanner, tools: Tools, *, reads_calls: bool, is_open: bool) -> Scan[None]:
    for _ in harmony(s, tools, reads_calls=reads_calls):
        yield


def reads_the_first_message_alone(s: Scanner, tools: Tools, *, reads_calls: bool, is_open: bool) -> Scan[None]:
    s.border()
    yield from s.pass_until(("<|message|>",), "content")
    yield from s.pass_until(("<|end|>",), "reasoning")


@pytest.mark.parametrize("mutant", [forgets_the_channel, reads_the_first_message_alone])
def test_a_broken_parser_of_channels_fails(mutant: AnswerScan, tmp_path: Path) -> None:
    codec = codec_of("harmony", tmp_path)
    family = next(family for family in REASONING if family.name == "harmony")
    check_reasoning(codec, family, skip_special_tokens=False)
    with pytest.raises(Failed, match="it reads"):
        check_reasoning(codec, replace(family, answer=mutant), skip_special_tokens=False)
    with pytest.raises(Failed, match="from its tokens"):
        check_reasoning(codec, family, skip_special_tokens=True)


WRONG = HERMES.replace('"arguments": \' ~ (c.function.arguments | tojson)', '"arguments": \' ~ c.function.arguments')


def wrong_template() -> str:
    assert WRONG != HERMES
    return WRONG.replace("c.function.arguments ~", "(c.function.arguments | string | replace('Zürich', 'Zurich')) ~")


def test_a_template_that_its_parser_can_not_read_turns_tools_off_with_the_reason(tmp_path: Path) -> None:
    codec = make_codec(tmp_path, wrong_template())
    found = ChatFormat.detect(codec)
    assert found.tool_parser is None and found.tool_reason.startswith("hermes failed its test: it reads")
    row = found.rows[0]
    assert row.downgrade and row.effective == "off" and row.reason == found.tool_reason and row.remedy
    with pytest.raises(ConfigError, match="hermes failed its test"):
        ChatFormat.detect(codec, tool_parser="hermes")


def test_a_parser_asked_for_by_name_is_tested_like_any_other(tmp_path: Path) -> None:
    codec = codec_of("hermes", tmp_path)
    assert ChatFormat.detect(codec, tool_parser="qwen25").tool_parser == "hermes"
    assert ChatFormat.detect(codec, reasoning_parser="qwen3").reasoning_parser == "think"
    for name in ("llama3", "mistral", "deepseek", "qwen3_coder"):
        with pytest.raises(ConfigError, match=f"{name} failed its test"):
            ChatFormat.detect(codec, tool_parser=name)
    with pytest.raises(ConfigError, match=r"'hermess'.*one of auto, off, .*hermes"):
        ChatFormat.detect(codec, tool_parser="hermess")
    with pytest.raises(ConfigError, match="no place for tools"):
        ChatFormat.detect(codec_of("plain", tmp_path), tool_parser="hermes")


def test_parsers_can_be_turned_off(tmp_path: Path) -> None:
    found = ChatFormat.detect(codec_of("hermes", tmp_path), tool_parser="off", reasoning_parser="none")
    assert (found.tool_parser, found.reasoning_parser) == (None, None)
    assert not any(row.downgrade for row in found.rows)


def test_a_template_that_can_not_be_read_turns_tools_off(tmp_path: Path) -> None:
    found = ChatFormat.detect(make_codec(tmp_path, "{% if tools %}"))
    assert found.tool_parser is None and "cannot be read" in found.tool_reason
