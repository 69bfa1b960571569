"""A chat in progress without an engine: its events, how samples end, and its sampling
parameters."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest

from sglcore.engine.outputs import PromptProgress, TextDelta
from sglcore.sampling.grammar_spec import Grammar, Thinking
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_output import FinishReason, TokenLogprob
from sglcore.serving.chat.format import ChatFormat, Rendered
from sglcore.serving.chat.parsers.delta import Delta
from sglcore.serving.chat.run import (
    LONG_TALK,
    LONG_TEXT,
    ChatEvent,
    ChatRequest,
    ChatRun,
    _is_long,
    _must_call,
    _params,
    _thinking,
    _unenforced,
    collect_chat,
    tools_in_play,
)
from sglcore.serving.replicas.runs import Runs
from sglcore.serving.replicas.server_errors import InvalidRequest
from tests.serving.stubs import StubGeneration

USER = {"role": "user", "content": "Hi"}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"name": "g", "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}},
]
START, CALL = Delta("tool_start", index=0, name="f", call_id="a"), Delta("tool_start", index=1, name="g", call_id="b")


def arguments(text: str, index: int = 0) -> Delta:
    return Delta("tool_arguments", text, index)


def content(text: str) -> Delta:
    return Delta("content", text)


def score(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -1.0, 1)


class Parser:
    """Reads a piece's text as the index of its deltas; `last` come at the end."""

    def __init__(self, says: list[list[Delta]], last: list[Delta]) -> None:
        self._says, self._last = says, last

    def push(self, text: str) -> list[Delta]:
        return self._says[int(text)]

    def finish(self) -> list[Delta]:
        return self._last


def run_of(
    pieces: list[Any],
    says: list[list[Delta]],
    last: list[Delta],
    *,
    samples: int = 1,
    check: Any = None,
    **given: Any,
) -> ChatRun:
    generation: Any = StubGeneration([piece for piece in pieces if isinstance(piece, TextDelta)])
    if len(generation._deltas) < len(pieces):

        async def items(self: Any) -> Any:
            for piece in pieces:
                yield piece

        generation = type("Reporting", (StubGeneration,), {"__aiter__": items})(generation._deltas)
    runs = Runs([cast(Any, generation)], AsyncExitStack(), "", check)
    request = ChatRequest(messages=[], params=SamplingParams(), **given)
    return ChatRun(runs, request, [Parser(says, last) for _ in range(samples)])


class Looks:
    """A check that keeps what it is shown."""

    names = ()

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    async def look(self, sample: Any, field: str, text: str) -> None:
        self.seen.append((field, text))


async def events_of(run: ChatRun) -> list[ChatEvent]:
    return [event async for event in run]


@pytest.mark.parametrize(
    ("says", "reason", "stop_cause", "wanted"),
    [
        ([content("a")], "stop", None, "stop"),
        ([content("a")], "stop", "x", "stop"),
        ([content("a")], "length", None, "length"),
        ([START, arguments("{"), arguments("}")], "stop", None, "tool_calls"),
        ([START, arguments("{"), arguments("}")], "stop", "x", "tool_calls"),
        ([START, arguments('{"a"'), arguments(": 1}")], "stop", "x", "tool_calls"),
        ([START, arguments('{"a"')], "stop", "x", "stop"),
        ([START, arguments('{"a"')], "stop", 7, "tool_calls"),
        ([START], "stop", "x", "stop"),
        ([START, arguments("{}"), CALL, arguments("{", 1)], "stop", "x", "stop"),
        ([START, arguments("{"), CALL, arguments("{}", 1)], "stop", "x", "tool_calls"),
        ([START, arguments("[" * 100_000)], "stop", "x", "stop"),
        ([START, arguments("{}")], "length", None, "length"),
        ([START, arguments("{}")], "abort", None, "abort"),
    ],
    ids=lambda each: None,
)
def test_a_sample_ends_with_calls_where_its_last_call_is_whole(
    says: list[Delta], reason: FinishReason, stop_cause: int | str | None, wanted: str
) -> None:
    pieces = [TextDelta("r", 0, str(place), (place,)) for place in range(len(says))]
    run = run_of([*pieces, TextDelta("r", 0, "", (), reason)], [[each] for each in says], [])
    run.output.outputs[0].stop_cause = stop_cause
    (message,) = asyncio.run(collect_chat(run))
    assert message.finish_reason == wanted


def test_only_the_first_call_counts_where_one_is_wanted() -> None:
    says = [[START, arguments("{}"), CALL, arguments("{", 1), content(" z")]]
    for parallel, names, wanted in ((True, ["f", "g"], "stop"), (False, ["f"], "tool_calls")):
        run = run_of([TextDelta("r", 0, "0", (1,), "stop")], says, [], parallel_tool_calls=parallel)
        run.output.outputs[0].stop_cause = "x"
        (message,) = asyncio.run(collect_chat(run))
        assert [call.name for call in message.tool_calls] == names
        assert (message.finish_reason, message.content) == (wanted, " z")


def test_of_many_deltas_the_first_has_the_tokens_and_the_last_has_the_end() -> None:
    says = [[], [content("a"), START, arguments("{}")], [content("b")], []]
    pieces = [
        TextDelta("r", 0, "0", (5,)),
        TextDelta("r", 0, "1", (6, 7), None, (score(6), score(7))),
        TextDelta("r", 0, "", (8,), None, (score(8),)),
        TextDelta("r", 0, "2", (9,)),
        TextDelta("r", 0, "", (10,)),
        TextDelta("r", 0, "3", (11,), "length", (score(11),)),
    ]
    found = asyncio.run(events_of(run_of(pieces, says, [content("c"), content("d")])))
    assert found == [
        ChatEvent(0, content("a"), logprobs=(score(6), score(7)), token_ids=(5, 6, 7)),
        ChatEvent(0, START),
        ChatEvent(0, arguments("{}")),
        ChatEvent(0, None, None, (score(8),), token_ids=(8,)),
        ChatEvent(0, content("b"), token_ids=(9,)),
        ChatEvent(0, content("c"), logprobs=(score(11),), token_ids=(10, 11)),
        ChatEvent(0, content("d"), "length"),
    ]


@pytest.mark.parametrize("has_scores", [True, False])
def test_whole_messages_have_all_that_each_sample_brought(has_scores: bool) -> None:
    def piece(index: int, says: str, token: int, reason: FinishReason | None = None) -> TextDelta:
        return TextDelta("r", index, says, (token,), reason, (score(token),) if has_scores else None)

    thought = Delta("reasoning", "t")
    pieces = [
        piece(1, "0", 5),
        PromptProgress("r", 2, 0, 1),
        piece(0, "1", 6),
        piece(1, "1", 7),
        piece(1, "2", 8, "stop"),
    ]
    run = run_of([*pieces, piece(0, "2", 9, "length")], [[thought], [content("a")], [START]], [], samples=2)
    first, second = asyncio.run(collect_chat(run))
    assert (first.content, first.reasoning, first.finish_reason) == ("a", "", "length")
    assert (second.content, second.reasoning, second.finish_reason) == ("a", "t", "tool_calls")
    assert first.logprobs == ([score(6), score(9)] if has_scores else None)
    assert second.logprobs == ([score(5), score(7), score(8)] if has_scores else None)
    assert [call.call_id for call in first.tool_calls] == [call.call_id for call in second.tool_calls] == ["a"]


OTHER = [arguments("[]"), CALL, arguments("[1", 1), content("so")]


@pytest.mark.parametrize(
    ("says", "parallel", "wanted"),
    [
        ([content("a"), Delta("reasoning", "hm"), content("b")], True, [("text", "abd")]),
        ([Delta("reasoning", "hm")], True, [("text", "d")]),
        ([START, *OTHER], True, [("tools[0]", "[]"), ("tools[1]", "[1")]),
        ([START, *OTHER], False, [("tools[0]", "[]")]),
        ([Delta("tool_start", name="h"), *OTHER], False, [("tools[None]", "[]")]),
    ],
)
def test_the_arguments_of_the_calls_that_a_client_gets_are_checked_and_else_the_content(
    says: list[Delta], parallel: bool, wanted: list[tuple[str, str]]
) -> None:
    checked = Looks()
    given: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": parallel, "form": "text", "check": checked}
    pieces = [TextDelta("r", 0, "0", (1,)), TextDelta("r", 0, "", (), "stop")]
    run = run_of(pieces, [says], [content("d")], **given)

    async def play() -> None:
        async for event in run:
            assert bool(checked.seen) is (event.finish_reason is not None), "the end comes after its check"

    asyncio.run(play())
    assert checked.seen == wanted


def test_each_sample_is_checked_for_itself() -> None:
    pieces = [TextDelta("r", 1, "1", (1,), "stop"), TextDelta("r", 0, "0", (2,), "stop")]
    says, checked = [[content("zero")], [content("one")]], Looks()
    asyncio.run(events_of(run_of(pieces, says, [], samples=2, form="text", check=checked)))
    assert checked.seen == [("text", "one"), ("text", "zero")]


def asked(*messages: Any, **given: Any) -> ChatRequest:
    return ChatRequest(messages=messages or (USER,), **{"params": SamplingParams(), **given})


@pytest.mark.parametrize("spare", [0, 1])
def test_a_long_chat_is_one_of_more_messages_and_tools_or_more_text_than_the_limits(spare: int) -> None:
    half, is_long = LONG_TALK // 2, bool(spare)
    assert _is_long(asked(*[USER] * (half + spare), tools=[TOOLS[0]] * half)) is is_long
    assert _is_long(asked(*[USER] * (LONG_TALK + spare))) is is_long
    assert _is_long(asked(*[USER] * half, tools=[TOOLS[0]] * (half + spare))) is is_long
    text = "x" * (LONG_TEXT // 2)
    parts = [{"type": "text", "text": text}, {"type": "text"}, {"type": "text", "text": "x" * spare}]
    assert _is_long(asked({"role": "user", "content": text}, {"role": "user"}, {"role": "user", "content": parts})) is (
        is_long
    )
    assert _is_long(asked({"role": "user", "content": text * 2 + "x" * spare})) is is_long


def test_a_call_must_come_where_it_is_required_or_named() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    for choice, must in (("none", False), ("auto", False), ("required", True), (named, True)):
        request = asked(tools=TOOLS, tool_choice=choice)
        assert _must_call(request, tools_in_play(request)) is must
        assert tools_in_play(request) == (None if choice == "none" else TOOLS)
        for without in (asked(tool_choice=choice), asked(tools=[], tool_choice=choice)):
            assert tools_in_play(without) is None
            if must:
                with pytest.raises(InvalidRequest, match="requires a call; wanted tools; give tools") as refused:
                    _must_call(without, None)
                assert refused.value.param == "tool_choice"


def test_what_of_a_forced_calls_parameters_is_not_enforced_has_the_place_of_its_tool() -> None:
    request = asked(tools=TOOLS)
    (found,) = _unenforced(request, must_call=True)
    assert found.field == "tools[1]" and json.loads(found.part.schema) == TOOLS[1]["parameters"]
    assert found.part.names == ("#/properties/a/uniqueItems",)
    assert _unenforced(request, must_call=False) == []
    bound = SamplingParams(grammar=Grammar("json_schema", json.dumps(TOOLS[1]["parameters"])))
    fields = [each.field for each in _unenforced(asked(tools=TOOLS, params=bound, form="text"), must_call=True)]
    assert fields == ["text", "tools[1]"]


OPEN, NEXT = Rendered("x<think>\n", reasoning_open=True), Rendered("x")
GRAMMAR = Grammar("json_object")


def test_reasoning_comes_before_what_is_bound_or_has_a_budget(formats: dict[str, ChatFormat]) -> None:
    form = formats["thinking"]
    bound = SamplingParams(grammar=GRAMMAR)

    def found(rendered: Rendered, *, must_call: bool = False, **given: Any) -> Thinking | None:
        return _thinking(form, asked(**given), rendered, must_call=must_call)

    end, own = ("</think>", "</think>"), ("</think>", "</think>", "<think>")
    assert found(OPEN) is None and found(NEXT) is None
    assert found(OPEN, params=bound) == found(OPEN, must_call=True) == Thinking(*end)
    assert found(NEXT, params=bound) == found(NEXT, must_call=True) == Thinking(*own)
    assert found(OPEN, thinking_token_budget=0) == Thinking(*end, budget=0, may_stop=True)
    assert found(NEXT, thinking_token_budget=9) == Thinking(*own, 9, may_stop=True)
    assert found(OPEN, params=bound, thinking_token_budget=9) == Thinking(*end, budget=9)
    assert found(NEXT, params=bound, thinking_token_budget=9, tools=TOOLS) == Thinking(*own, 9)
    assert found(OPEN, params=bound, tools=TOOLS) == Thinking(*end)
    assert found(NEXT, params=bound, continue_final_message=True) is None
    assert found(OPEN, params=bound, continue_final_message=True) == Thinking(*end)
    assert found(Rendered("x<think>\n\n</think>\n\n"), params=bound) is None
    assert _thinking(formats["plain"], asked(params=bound), NEXT, must_call=False) is None


def test_reasoning_and_calls_come_before_the_channel_of_the_answer(formats: dict[str, ChatFormat]) -> None:
    form, bound = formats["harmony"], SamplingParams(grammar=GRAMMAR)
    final = "<|channel|>final<|message|>"
    closing = f"<|end|><|start|>assistant{final}"

    def found(rendered: Rendered, *, must_call: bool = False, **given: Any) -> Thinking | None:
        return _thinking(form, asked(**given), rendered, must_call=must_call)

    assert found(NEXT, params=bound) == Thinking(final, closing, "<|channel|>")
    assert found(OPEN, params=bound) == Thinking(final, closing)
    assert found(NEXT, params=bound, tools=TOOLS) == Thinking(final, closing, "<|channel|>", may_stop=True)
    assert found(NEXT, params=bound, tools=TOOLS, tool_choice="none") == Thinking(final, closing, "<|channel|>")
    assert found(OPEN, thinking_token_budget=0) == Thinking(final, closing, "", 0, may_stop=True)
    assert found(OPEN, must_call=True, thinking_token_budget=3) == Thinking(
        "<|end|><|start|>assistant", "<|end|><|start|>assistant", budget=3
    )


def test_a_chat_adds_its_stops_and_its_marks_to_the_parameters(formats: dict[str, ChatFormat]) -> None:
    def found(name: str, **given: Any) -> SamplingParams:
        return _params(formats[name], asked(params=SamplingParams(**given)), NEXT, None, must_call=False)

    for name, form in formats.items():
        for skips in (True, False):
            params = found(name, skip_special_tokens=skips, stop_token_ids=(7,))
            assert params.skip_special_tokens is (skips and form.skip_special_tokens), name
            assert params.stop_token_ids == (7, *form.stop_token_ids) and params.grammar is None
    assert found("harmony", ignore_eos=True, stop_token_ids=(7,)).stop_token_ids == (7,)
    assert len({form.skip_special_tokens for form in formats.values()}) == 2


def test_blanks_stand_before_forced_calls_where_reasoning_comes_first(formats: dict[str, ChatFormat]) -> None:
    request = asked(tools=TOOLS, tool_choice="required")
    for name, rendered in (("thinking", NEXT), ("hermes", NEXT)):
        params = _params(formats[name], request, rendered, TOOLS, must_call=True)
        assert params.grammar is not None and params.grammar.kind == "lark"
        assert params.grammar.text.startswith(r"start: /\s{0,4}/ calls") is (params.thinking is not None)
    one = _params(
        formats["hermes"],
        asked(tools=TOOLS, tool_choice="required", parallel_tool_calls=False),
        NEXT,
        TOOLS,
        must_call=True,
    )
    many = _params(formats["hermes"], request, NEXT, TOOLS, must_call=True)
    assert one.grammar != many.grammar
