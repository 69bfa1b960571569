"""Which parsers a checkpoint gets: by each of their names, by evidence, and why there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sglcore.core.errors import ConfigError
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.serving.chat.conversation import MessageForm
from sglcore.serving.chat.format import ChatFormat
from sglcore.serving.chat.parser_choice import choose_reasoning, choose_tools, content_form, special_texts
from sglcore.serving.chat.parsers.delta import calls_of, text_of
from sglcore.serving.chat.parsers.families import REASONING, TOOLS
from tests.serving.chat.checkpoints import HERMES, PLAIN, THINKING, codec_of, make_codec

THOUGHTS = ("<think>", "</think>")
ANSWERS = ("<response>", "</response>")
CALL = ("<tool_call>", "</tool_call>")


@pytest.mark.parametrize("family", TOOLS, ids=lambda family: family.name)
def test_each_name_of_a_tool_parser_is_known(family: object, codecs: dict[str, TextCodec]) -> None:
    assert family in TOOLS
    (known,) = (each for each in TOOLS if each is family)
    for name in (known.name, *known.aliases):
        with pytest.raises(ConfigError, match=f"the tool parser {known.name} cannot be used: .*no place for tools"):
            choose_tools(codecs["plain"], name, None, MessageForm())


@pytest.mark.parametrize("family", REASONING, ids=lambda family: family.name)
def test_each_name_of_a_reasoning_parser_is_known(family: object, codecs: dict[str, TextCodec]) -> None:
    (known,) = (each for each in REASONING if each is family)
    for name in (known.name, *known.aliases):
        chosen = choose_reasoning(codecs["plain"], name)
        assert (chosen.family, chosen.reason, chosen.is_failure) == (known, "requested; its test passed", False)


def test_each_name_belongs_to_one_parser() -> None:
    for families in (TOOLS, REASONING):
        names = [name for family in families for name in (family.name, *family.aliases)]
        assert len(names) == len(set(names)) and not {"auto", "off", "none"} & set(names)


@pytest.mark.parametrize("name", ["off", "none"])
def test_a_parser_that_is_turned_off_is_no_failure(name: str, codecs: dict[str, TextCodec]) -> None:
    for chosen in (choose_tools(codecs["hermes"], name, None, MessageForm()), choose_reasoning(codecs["hermes"], name)):
        assert (chosen.family, chosen.reason, chosen.sample, chosen.is_failure) == (None, "turned off", None, False)


@pytest.mark.parametrize("name", ["hermes", "Think", ""])
def test_an_unknown_reasoning_parser_is_refused_with_the_known_names(name: str, codecs: dict[str, TextCodec]) -> None:
    with pytest.raises(ConfigError, match=f"no reasoning parser '{name}'; wanted one of auto, off, granite, think,"):
        choose_reasoning(codecs["hermes"], name)


def test_reasoning_that_its_parser_can_not_read_is_a_failure_with_the_reason(tmp_path: Path) -> None:
    codec = make_codec(tmp_path, HERMES, special=("think",))
    found = ChatFormat.detect(codec)
    assert found.reasoning_parser is None and found.reasoning_reason.startswith("think failed its test: it reads ")
    row = found.rows[1]
    assert (row.topic, row.requested, row.effective, row.downgrade) == ("reasoning parser", "auto", "off", True)
    assert row.reason == found.reasoning_reason and row.remedy == "--reasoning-parser NAME tests one by name"
    with pytest.raises(ConfigError, match="the reasoning parser think failed its test: it reads"):
        choose_reasoning(codec, "qwen3")


@pytest.mark.parametrize(
    ("written", "added", "name", "source"),
    [
        (THOUGHTS, (), "think", "the chat template"),
        ((), THOUGHTS, "think", "the tokenizer"),
        (("<think>",), ("</think>",), None, ""),
        ((), ("<think>",), None, ""),
        ((*THOUGHTS, "<response></response>"), (), "granite", "the chat template"),
        ((*THOUGHTS, *ANSWERS), (), "think", "the chat template"),
        ((), (*THOUGHTS, *ANSWERS), "granite", "the tokenizer"),
        ((), (*THOUGHTS, "<response>"), "think", "the tokenizer"),
        (("[THINK]", "[/THINK]"), (), "mistral", "the chat template"),
    ],
)
def test_reasoning_is_chosen_by_all_its_marks_in_one_place(
    written: tuple[str, ...], added: tuple[str, ...], name: str | None, source: str, tmp_path: Path
) -> None:
    template = PLAIN + "".join("{% if never %}" + mark + "{% endif %}" for mark in written)
    chosen = choose_reasoning(make_codec(tmp_path, template, added=added), "auto")
    assert (chosen.family and chosen.family.name) == name and not chosen.is_failure
    begin = f"{source} has {' and '.join(chosen.family.marks)};" if chosen.family else "neither the chat template nor"
    assert chosen.reason.startswith(begin)


def test_a_template_that_can_not_be_read_leaves_the_evidence_of_the_tokenizer(tmp_path: Path) -> None:
    chosen = choose_reasoning(make_codec(tmp_path, "{% if %}", added=THOUGHTS), "auto")
    assert chosen.family and chosen.family.name == "think" and chosen.reason.startswith("the tokenizer has")


@pytest.mark.parametrize(
    ("checkpoint", "name", "family"),
    [("granite", "granite", "granite"), ("granite", "phi4_mini_json", "granite"), ("lfm2 silent", "pythonic", "lfm2")],
)
def test_a_parser_that_writes_calls_itself_needs_no_template_that_does(
    checkpoint: str, name: str, family: str, codecs: dict[str, TextCodec]
) -> None:
    form = content_form(codecs[checkpoint].template)
    for asked in (name, "auto"):
        chosen = choose_tools(codecs[checkpoint], asked, None, form)
        assert chosen.family and chosen.family.name == family
        assert chosen.sample and chosen.sample.form == replace(form, write=chosen.family.write)


@pytest.mark.parametrize("has_mark", [True, False])
def test_a_template_that_writes_no_calls_needs_a_mark_of_theirs_in_the_tokenizer(
    has_mark: bool, tmp_path: Path
) -> None:
    template = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    codec = make_codec(tmp_path, template, added=("<|tool_call|>",) * has_mark)
    chosen = choose_tools(codec, "auto", None, MessageForm())
    assert (chosen.family and chosen.family.name) == ("granite" if has_mark else None) and not chosen.is_failure
    writes = "this server writes <|tool_call|>" if has_mark else "this checkpoint's chat template writes no tool calls"
    assert chosen.reason.startswith(writes)


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("{{ messages[0].content }}", False),
        ("{{ messages[0].content is string }} {{ messages[0].content[0].text }}", True),
        ("{% if messages[0].content is string %}{{ raise_exception('parts') }}{% endif %}{{ messages }}", True),
        ("{{ messages[0].role }}", False),
        ("{{ raise_exception('nothing') }}", False),
    ],
)
def test_content_is_text_unless_the_template_reads_parts_alone(template: str, parts: bool, tmp_path: Path) -> None:
    assert content_form(make_codec(tmp_path, template).template) == MessageForm(parts=parts)


def test_special_tokens_are_texts_that_decoding_may_leave_out(tmp_path: Path) -> None:
    assert special_texts(make_codec(tmp_path, PLAIN, special=("<a>",), added=("<b>",))) == {"<s>", "<a>"}


def test_marks_of_a_call_that_is_none_are_shown_and_other_special_tokens_are_not(tmp_path: Path) -> None:
    found = ChatFormat.detect(codec_of("mistral named", tmp_path))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for text in ("see [ARGS] and [TOOL_CALLS]", "see [ARGS] and [TOOL_CALLS] no call"):
        deltas = found.stream(tools=tools, reasoning_open=False).whole(f"{text}[INST]</s>")
        assert text_of(deltas, "content") == text


@pytest.mark.parametrize(
    ("default", "for_tools", "parser"),
    [(PLAIN, HERMES, "hermes"), (HERMES, PLAIN, None), (HERMES, HERMES, "hermes"), (None, HERMES, "hermes")],
)
def test_calls_are_those_of_the_template_for_tools(
    default: str | None, for_tools: str, parser: str | None, tmp_path: Path
) -> None:
    both = [{"name": "default", "template": default}, {"name": "tool_use", "template": for_tools}]
    codec = make_codec(tmp_path, None, settings={"chat_template": both if default else both[1:]})
    found = ChatFormat.detect(codec)
    assert found.tool_parser == parser
    if parser is None:
        assert found.tool_reason == "this checkpoint's chat template has no place for tools"
        with pytest.raises(ConfigError, match="hermes cannot be used: .* no place for tools"):
            choose_tools(codec, "hermes", None, MessageForm())
        return
    assert choose_tools(codec, "hermes", None, MessageForm()).family is not None
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    made = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "look", "arguments": "{}"}}]}
    text = found.render([{"role": "user", "content": "Hi"}, made], tools=tools, add_generation_prompt=False).text
    assert "Tools: " in text and '<tool_call>\n{"name": "look"' in text


def two_templates(folder: Path, default: str, with_tools: str) -> TextCodec:
    """A codec of a checkpoint with a template of its own for requests with tools."""
    both = [{"name": "default", "template": default}, {"name": "tool_use", "template": with_tools}]
    return make_codec(folder, None, settings={"chat_template": both})


def test_calls_are_those_of_the_template_for_tools_and_reasoning_is_that_of_the_other(tmp_path: Path) -> None:
    marks = "{% if never %}<think></think>{% endif %}"
    plain_calls = HERMES.replace("<think>\n\n</think>\n\n", "")
    found = ChatFormat.detect(two_templates(tmp_path / "calls", PLAIN, plain_calls + marks))
    assert (found.tool_parser, found.reasoning_parser) == ("hermes", None)
    found = ChatFormat.detect(two_templates(tmp_path / "thoughts", PLAIN + marks, plain_calls))
    assert (found.tool_parser, found.reasoning_parser) == ("hermes", "think")
    said = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}
    assert found.render([{"role": "user", "content": "Hi"}, said]).text, "the template for tools writes calls"


@pytest.mark.parametrize("special", [(), THOUGHTS, CALL, (*THOUGHTS, *CALL)], ids=len)
def test_special_tokens_are_decoded_if_one_of_them_is_a_mark(special: tuple[str, ...], tmp_path: Path) -> None:
    """Whether it is a mark of calls or of reasoning; all others are then hidden."""
    added = tuple(mark for mark in (*THOUGHTS, *CALL) if mark not in special)
    found = ChatFormat.detect(make_codec(tmp_path, THINKING, (*special, "<|im_end|>"), added))
    assert (found.tool_parser, found.reasoning_parser) == ("hermes", "think")
    assert found.skip_special_tokens is not bool(special)
    text = "<think>hm</think>So</s><|im_end|>" + '<tool_call>{"name": "f", "arguments": {}}</tool_call><|im_end|>.'
    deltas = found.stream(tools=[{"name": "f"}], reasoning_open=False).whole(text)
    shown = "So</s>." if special else "So</s><|im_end|><|im_end|>."
    assert (text_of(deltas, "reasoning"), text_of(deltas, "content")) == ("hm", shown)
    assert [call.name for call in calls_of(deltas)] == ["f"]


def test_special_tokens_of_reasoning_alone_are_decoded(tmp_path: Path) -> None:
    found = ChatFormat.detect(make_codec(tmp_path, PLAIN, (*THOUGHTS, "<|im_end|>")))
    assert (found.tool_parser, found.reasoning_parser, found.skip_special_tokens) == (None, "think", False)
    deltas = found.stream(tools=None, reasoning_open=True).whole("hm</think>So<|im_end|><s>.")
    assert (text_of(deltas, "reasoning"), text_of(deltas, "content")) == ("hm", "So.")
