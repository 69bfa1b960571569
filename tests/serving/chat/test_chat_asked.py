"""How a chat is started: what the frontend is asked for, which field an error names, and how the
text of each sample is read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from sglcore.engine.outputs import TextDelta
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.sampling.grammar_spec import Grammar
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_errors import ContextError
from sglcore.serving.chat.format import ChatFormat
from sglcore.serving.chat.run import ChatRequest, ChatRun, collect_chat, count_prompt, start_chat
from sglcore.serving.replicas.server_errors import InvalidRequest, NotReady, failure
from tests.serving.stubs import StubGeneration

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
BOUND = SamplingParams(grammar=Grammar("json_object"))
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


class Asked:
    """A frontend that notes what it is asked for, and whose samples say `texts`, letter by letter,
    in turns."""

    answer_checks = None

    def __init__(self, codec: TextCodec, form: ChatFormat, texts: Sequence[str] = ("",)) -> None:
        self.codec, self.format, self.texts = codec, form, texts
        self.given: list[tuple[Any, SamplingParams, dict[str, Any]]] = []
        self.fault: Exception | None = None

    async def generate(self, prompt: Any, params: SamplingParams, **named: Any) -> StubGeneration:
        self.given.append((prompt, params, named))
        if self.fault is not None:
            raise self.fault
        length = max(map(len, self.texts))
        parts = [
            TextDelta("r", index, text[at : at + 1], (at,))
            for at in range(length)
            for index, text in enumerate(self.texts)
        ]
        return StubGeneration([*parts, *(TextDelta("r", index, "", (), "stop") for index in range(len(self.texts)))])

    async def tokenize(self, prompt: str, *, special: bool = True) -> list[int]:
        return self.codec.encode(prompt, special=special)


Make = Any


@pytest.fixture
def make(codecs: dict[str, TextCodec], formats: dict[str, ChatFormat]) -> Make:
    """A function that returns a frontend for a family."""
    return lambda name, *texts: Asked(codecs[name], formats[name], texts or ("",))


def asked(**given: Any) -> ChatRequest:
    return ChatRequest(**{"messages": [USER], "params": SamplingParams(), **given})


def started(frontend: Any, **given: Any) -> ChatRun:
    return asyncio.run(start_chat(frontend, asked(**given)))


def read(frontend: Any, **given: Any) -> list[tuple[str, str, list[str]]]:
    """Reasoning, content and names of the calls of each sample."""

    async def play() -> Any:
        return await collect_chat(await start_chat(frontend, asked(**given)))

    messages = asyncio.run(play())
    return [(each.reasoning, each.content, [call.name for call in each.tool_calls]) for each in messages]


@pytest.mark.parametrize("name", ["hermes", "thinking", "harmony", "llama"])
def test_a_chats_prompt_has_the_templates_own_special_tokens_and_no_others(make: Make, name: str) -> None:
    frontend = make(name)
    started(frontend, progress=True, request_id="chatcmpl-1", params=SamplingParams(seed=3))
    ((prompt, params, named),) = frontend.given
    assert prompt == frontend.format.render([USER]).text and params.seed == 3
    assert named == {"special": False, "progress": True, "request_id": "chatcmpl-1", "answer_id": "", "prompts": 1}
    count = asyncio.run(count_prompt(frontend, asked(), "messages"))
    assert count == len(frontend.codec.encode(prompt, special=False))


@pytest.mark.parametrize(
    ("name", "given", "param", "said"),
    [
        ("hermes", {"messages": [{"content": "x"}]}, "messages", "has no role"),
        ("plain", {"tools": [TOOL]}, "tools", "tools are off"),
        ("hermes", {"continue_final_message": True}, "add_generation_prompt", "both true"),
        ("hermes", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ("hermes", {"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "tool_choice", "names 'g'"),
        ("hermes", {"tool_choice": "required"}, "tool_choice", "requires a call"),
        (
            "hermes",
            {"tools": [{"name": "f", "parameters": {"type": "string"}}], "tool_choice": "required"},
            "tools",
            "the parameters of 'f'",
        ),
        ("llama", {"tools": [TOOL], "params": BOUND}, "tools", "calls look like JSON too"),
    ],
)
def test_what_can_not_be_started_names_the_field_at_fault(
    make: Make, name: str, given: dict[str, Any], param: str, said: str
) -> None:
    frontend = make(name)
    with pytest.raises(InvalidRequest, match=said) as refused:
        started(frontend, **given)
    assert refused.value.param == param and not frontend.given


def test_a_chat_that_is_too_long_is_the_fault_of_its_messages_and_a_server_that_is_not_ready_of_none(
    make: Make,
) -> None:
    frontend = make("hermes")
    frontend.fault = ContextError("too long")
    with pytest.raises(InvalidRequest) as refused:
        started(frontend, params=BOUND)
    assert (refused.value.param, refused.value.code) == ("messages", "context_length_exceeded")
    frontend.fault = NotReady("loading")
    with pytest.raises(NotReady) as waiting:
        started(frontend)
    assert waiting.value is frontend.fault
    with pytest.raises(InvalidRequest) as counted:
        asyncio.run(count_prompt(frontend, asked(messages=[{"content": "x"}]), "input"))
    found = failure(counted.value)
    assert found is not None and (found.status, found.param) == (400, "input")


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({}, ""),
        ({"tools": [TOOL]}, ""),
        ({"params": BOUND}, "text.format"),
        ({"params": BOUND, "tools": [TOOL]}, "text.format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required", "params": BOUND}, "tools"),
        ({"tools": [TOOL], "tool_choice": "none", "params": BOUND}, "text.format"),
    ],
)
def test_what_binds_an_answer_is_at_fault_if_an_engine_refuses_it(make: Make, given: dict[str, Any], form: str) -> None:
    assert started(make("hermes"), form="text.format", **given).form == form


@pytest.mark.parametrize(
    ("name", "text", "given", "found"),
    [
        ("hermes", "<think>hm</think> so", {}, ("hm", "so", [])),
        ("hermes", "<think>hm</think> so", {"params": BOUND}, ("", "<think>hm</think> so", [])),
        ("thinking", "hm</think>\n so", {"params": BOUND}, ("hm", "so", [])),
        ("hermes", f"so {CALL}", {"params": BOUND, "tools": [TOOL]}, ("", "so", ["f"])),
        ("hermes", f"so {CALL}", {"params": BOUND}, ("", f"so {CALL}", [])),
        ("hermes", CALL, {"tools": [TOOL], "tool_choice": "required"}, ("", "", ["f"])),
        ("hermes", CALL, {"tools": [TOOL], "tool_choice": "none"}, ("", CALL, [])),
        ("hermes", CALL * 2, {"tools": [TOOL], "parallel_tool_calls": False}, ("", "", ["f"])),
    ],
)
def test_a_text_is_read_by_what_the_request_allows_in_it(
    make: Make, name: str, text: str, given: dict[str, Any], found: Any
) -> None:
    assert read(make(name, text), **given) == [found]


def test_each_sample_is_read_for_itself(make: Make) -> None:
    texts = ("hm</think>one", f"oh</think>{CALL}two", "never ends")
    wanted = [("hm", "one", []), ("oh", "two", ["f"]), ("never ends", "", [])]
    assert read(make("thinking", *texts), params=SamplingParams(n=3), tools=[TOOL]) == wanted


@pytest.mark.parametrize("budget", [None, 0, 5])
@pytest.mark.parametrize("own", [{}, {"speed": 1, "enable_thinking": False}])
def test_a_budget_of_reasoning_without_use_is_told_with_the_templates_unread_variables(
    make: Make, budget: int | None, own: dict[str, Any]
) -> None:
    unread = ("speed",) if own else ()
    for name, has_use in (("hermes", False), ("plain", False), ("thinking", True)):
        run = started(make(name), thinking_token_budget=budget, chat_template_kwargs=own)
        more = ("thinking_token_budget",) if budget is not None and not has_use else ()
        own_unread = ("enable_thinking", "speed") if own and name != "hermes" else unread
        assert run.ignored == (*own_unread, *more), name
