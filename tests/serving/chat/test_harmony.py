"""Harmony: channels become reasoning, content and calls; no header is shown, whether whole or cut
off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llguidance
import pytest

from sglcore.sampling.grammar_spec import Grammar, Thinking
from sglcore.sampling.params import SamplingParams
from sglcore.serving.chat.format import ChatFormat, Rendered
from sglcore.serving.chat.run import ChatRequest, _params
from tests.serving.chat.checkpoints import codec_of, read

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "Hi"}
THOUGHT = "<|channel|>analysis<|message|>Hm, 東.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": [1]}<|call|>'
RECIPIENT_FIRST = ' to=functions.f<|channel|>commentary json<|message|>{"a": [1]}<|call|>'
CALLED = [("f", '{"a": [1]}')]


@pytest.fixture
def form(formats: dict[str, ChatFormat]) -> ChatFormat:
    """The format of a checkpoint with a harmony template."""
    return formats["harmony"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{THOUGHT}{NEXT}{FINAL}Yes.\n<|return|>", ("Hm, 東.", "Yes.\n", [])),
        (f"{FINAL}Yes.", ("", "Yes.", [])),
        (f"{THOUGHT}{NEXT}{CALL}", ("Hm, 東.", "", CALLED)),
        (f"{THOUGHT}{NEXT}{RECIPIENT_FIRST}", ("Hm, 東.", "", CALLED)),
        (RECIPIENT_FIRST, ("", "", CALLED)),
        (CALL, ("", "", CALLED)),
        (f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}", ("Hm, 東.", "I look.", CALLED)),
        (f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}Yes.", ("Hm, 東.\n\nHm, 東.", "Yes.", [])),
        (f"<|channel|>commentary<|message|>First.<|end|>{NEXT}{FINAL}Then.", ("", "First.\n\nThen.", [])),
        (f"{CALL}{NEXT}{CALL}", ("", "", CALLED * 2)),
        (CALL.replace("commentary", "analysis"), ("", "", CALLED)),
        (CALL.replace("functions.f", "f"), ("", "", CALLED)),
        (CALL.replace("functions.f", "functions.unknown"), ("", "", [("unknown", '{"a": [1]}')])),
        ("A continued answer.<|return|>", ("", "A continued answer.", [])),
    ],
)
def test_channels_are_reasoning_content_and_calls(form: ChatFormat, text: str, found: Any) -> None:
    assert read(form, text, TOOLS) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<|channel|>anal", ("", "", [])),
        (f"{THOUGHT}<|start|>assis", ("Hm, 東.", "", [])),
        (f"{THOUGHT}{NEXT} to=functions.f<|channel|>comm", ("Hm, 東.", "", [])),
        ("<|channel|>analysis<|message|>cut o", ("cut o", "", [])),
        (CALL[:-12], ("", "", [("f", '{"a": ')])),
        (CALL.replace("[1]", "[1,]"), ("", "]}", [("f", '{"a": [1,')])),
        (CALL.replace('{"a": [1]}', "no JSON"), ("", "no JSON", [])),
        (CALL.replace("functions.f", "python").replace("commentary", "analysis"), ('{"a": [1]}', "", [])),
        (f"{NEXT}<|end|>{NEXT}{FINAL}Yes.", ("", "Yes.", [])),
        (f"{THOUGHT}Yes.", ("Hm, 東.", "Yes.", [])),
        ("<|channel|>final " + "long " * 300 + "text", ("", "final " + "long " * 300 + "text", [])),
        (" to=functions.f is what I would write", ("", " to=functions.f is what I would write", [])),
    ],
)
def test_what_is_broken_loses_nothing_and_shows_no_header(form: ChatFormat, text: str, found: Any) -> None:
    assert read(form, text, TOOLS) == found


def test_without_tools_a_call_is_content_and_a_prompt_may_end_inside_reasoning(form: ChatFormat) -> None:
    assert read(form, f"{THOUGHT}{NEXT}{CALL}") == ("Hm, 東.", '{"a": [1]}', [])
    text = f"\nHm.<|end|>{NEXT}{FINAL}Yes."
    assert read(form, text, TOOLS, is_open=True) == ("Hm.", "Yes.", [])


def test_its_end_tokens_are_stops_and_its_markers_stay_in_the_text(form: ChatFormat, tmp_path: Path) -> None:
    codec = codec_of("harmony", tmp_path)
    assert [codec.token(number) for number in form.stop_token_ids] == ["<|call|>"]
    assert not form.skip_special_tokens
    off = ChatFormat.detect(codec, tool_parser="off")
    assert off.stop_token_ids == () and read(off, f"{THOUGHT}{NEXT}{FINAL}Yes.") == ("Hm, 東.", "Yes.", [])
    hermes = ChatFormat.detect(codec_of("hermes", tmp_path))
    assert hermes.stop_token_ids == ()


@pytest.mark.parametrize("ignores", [False, True])
def test_its_end_tokens_end_nothing_where_ends_are_ignored(form: ChatFormat, ignores: bool) -> None:
    asked = ChatRequest(messages=[USER], params=SamplingParams(ignore_eos=ignores, stop_token_ids=(7,)))
    params = _params(form, asked, Rendered(NEXT), None, must_call=False)
    assert params.stop_token_ids == ((7,) if ignores else (7, *form.stop_token_ids))


def test_what_is_bound_follows_reasoning_that_ends_by_the_text_before_it(form: ChatFormat, tmp_path: Path) -> None:
    codec = codec_of("harmony", tmp_path)
    judge = llguidance.LLTokenizer(codec.tokenizer.to_str(), eos_token=[256, *form.stop_token_ids])
    grammar = form.tool_grammar(TOOLS, "required")
    assert grammar
    matcher = llguidance.LLMatcher(judge, grammar.text, log_level=0)
    ids = codec.encode(RECIPIENT_FIRST.removesuffix("<|call|>"), special=False)
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    plain, is_open = Rendered(NEXT), Rendered(f"{NEXT}<|channel|>analysis<|message|>", reasoning_open=True)
    closing = f"<|end|>{NEXT}{FINAL}"
    assert form.thinking(plain, is_bound=True, must_call=True) is None
    assert form.thinking(is_open, is_bound=True, must_call=True) == Thinking(f"<|end|>{NEXT}", f"<|end|>{NEXT}")
    assert form.thinking(plain, is_bound=True, budget=9) == Thinking(FINAL, closing, "<|channel|>", 9)
    assert form.thinking(plain, is_bound=True, may_call=True) == Thinking(FINAL, closing, "<|channel|>", may_stop=True)
    bound = Grammar("json_object")
    assert form.tool_grammar(TOOLS, "auto", answer=bound) == bound


def called(**given: Any) -> dict[str, Any]:
    """An assistant message with a call."""
    function = {"name": "f", "arguments": "{}"}
    return {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}], **given}


def test_an_answer_is_written_as_the_template_takes_it(form: ChatFormat) -> None:
    said = form.render([USER, called(content="I look.", reasoning_content="Hm.")], tools=TOOLS).text
    assert f"<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>{NEXT} to=functions.f" in said
    assert "<|message|>I look.<|end|>" in form.render([USER, called(content="I look.")], tools=TOOLS).text
    assert form.render([USER], tools=TOOLS).text.endswith(NEXT)
