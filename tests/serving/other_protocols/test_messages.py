"""/v1/messages: blocks to a conversation and back, the order of events, and the schema of errors.
By Anthropic's client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal, cast

import anthropic
import pytest
from pydantic import BaseModel

from sglcore.config.server_config import ServerConfig
from sglcore.serving.apis.anthropic.body import MessagesRequest
from sglcore.serving.apis.anthropic.request import message_request
from sglcore.serving.replicas.server_errors import EngineDied, Overloaded
from tests.serving.conftest import Server
from tests.serving.scripted import CACHED, MODEL, PROMPT, Stage, call, content, reasoning, staged

TOOL: Any = {"name": "weather", "description": "Tells it", "input_schema": {"type": "object"}}
USER: Any = {"role": "user", "content": "How is it?"}
STORY: Any = {"role": "user", "content": "Tell me a story about a seed."}
ASKED: Any = {"model": MODEL, "max_tokens": 20, "messages": [USER]}


class Weather(BaseModel):
    """What the weather is like."""

    sky: Literal["clear", "cloudy"]
    is_windy: bool


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged(ServerConfig()) as stage:
        yield stage


@pytest.fixture(scope="module")
def client(stage: Stage) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stage.url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def real(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client


def test_reasoning_text_and_calls_are_blocks_in_their_order(stage: Stage, client: anthropic.Anthropic) -> None:
    stage.speak(
        reasoning("Hm, "), reasoning("rain."), content("I "), content("look."), *call("weather", '{"at"', ":1}")
    )

    message = client.messages.create(tools=[TOOL], **ASKED)

    thought, text, made = message.content
    assert thought.type == "thinking" and thought.thinking == "Hm, rain."
    assert text.type == "text" and text.text == "I look."
    assert made.type == "tool_use"
    assert (made.id, made.name, made.input) == ("call_weather", "weather", {"at": 1})
    assert message.stop_reason == "tool_use"
    assert message.usage.input_tokens == len(PROMPT) - CACHED
    assert message.usage.cache_read_input_tokens == CACHED
    assert message.usage.output_tokens == 7
    assert message.to_dict()["seed_used"] == 77


def test_the_events_of_a_stream_come_in_order(stage: Stage, client: anthropic.Anthropic) -> None:
    stage.speak(reasoning("Hm."), content("A"), content("B"), *call("f"), *call("g", '{"a":', "1}", index=1))

    events = list(client.messages.create(stream=True, tools=[TOOL], **ASKED))

    def block(*deltas: str) -> list[str]:
        return ["content_block_start", *(f"content_block_delta {kind}" for kind in deltas), "content_block_stop"]

    named = [
        f"{event.type} {event.delta.type}" if event.type == "content_block_delta" else event.type for event in events
    ]
    assert named == [
        "message_start",
        *block("thinking_delta", "signature_delta"),
        *block("text_delta", "text_delta"),
        *block(),
        *block("input_json_delta", "input_json_delta"),
        "message_delta",
        "message_stop",
    ]
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1, 2, 3]


def test_a_ping_follows_the_start_of_a_stream(stage: Stage, client: anthropic.Anthropic) -> None:
    stage.speak(content("A"))

    with client.messages.with_streaming_response.create(stream=True, **ASKED) as response:
        names = [line for line in response.iter_lines() if line.startswith("event:")]

    assert names[:2] == ["event: message_start", "event: ping"]


def test_the_client_puts_a_stream_together_as_the_answer_that_waits(stage: Stage, client: anthropic.Anthropic) -> None:
    stage.speak(reasoning("Hm."), content("All "), content("of it."), *call("weather", '{"at":', '"sea"}'))

    with client.messages.stream(tools=[TOOL], **ASKED) as stream:
        texts = list(stream.text_stream)
        streamed = stream.get_final_message()
    whole = client.messages.create(tools=[TOOL], **ASKED)

    assert texts == ["All ", "of it."]
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    assert streamed.usage.to_dict() == whole.usage.to_dict()


def test_blocks_become_the_messages_of_a_chat(stage: Stage, client: anthropic.Anthropic) -> None:
    script = stage.speak(content("ok"))
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "How"}, {"type": "text", "text": "is it?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"at": "Über"}},
                {"type": "tool_use", "id": "c2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "rain"},
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "sun"}]},
                {"type": "text", "text": "So?"},
            ],
        },
        {"role": "user", "content": "Tell me."},
    ]

    client.messages.create(
        model=MODEL,
        max_tokens=5,
        system=[{"type": "text", "text": "Be short."}],
        messages=messages,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather"},
        thinking={"type": "disabled"},
    )

    def text(*words: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": word} for word in words]

    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at": "Über"}'}},
        {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
    ]
    request = script.rendered[0]
    assert request["messages"] == [
        {"role": "system", "content": text("Be short.")},
        {"role": "user", "content": text("How", "is it?")},
        {"role": "assistant", "reasoning_content": "Look.", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": text("sun")},
        {"role": "user", "content": text("So?", "Tell me.")},
    ]
    function = {"name": "weather", "description": "Tells it", "parameters": {"type": "object"}}
    assert request["tools"] == [{"type": "function", "function": function}]
    assert request["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert request["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    assert request["add_generation_prompt"] and not request["continue_final_message"]


def test_two_turns_of_one_side_are_one(stage: Stage, client: anthropic.Anthropic) -> None:
    script = stage.speak(content("A"))
    turns: Any = [
        ("user", "One."),
        ("user", "Two."),
        ("assistant", "Three, "),
        ("assistant", "four."),
        ("user", "Five."),
    ]
    client.messages.create(
        model=MODEL, max_tokens=20, messages=[{"role": role, "content": text} for role, text in turns]
    )
    assert script.rendered[-1]["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]},
        {"role": "assistant", "content": "Three, four."},
        {"role": "user", "content": [{"type": "text", "text": "Five."}]},
    ]


def test_two_turns_of_the_model_are_one_with_all_that_it_thought_and_called(
    stage: Stage, client: anthropic.Anthropic
) -> None:
    script = stage.speak(content("ok"))

    def turn(*blocks: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": list(blocks)}

    def thought(text: str) -> dict[str, Any]:
        return {"type": "thinking", "thinking": text, "signature": ""}

    def made(name: str) -> dict[str, Any]:
        return {"type": "tool_use", "id": name, "name": "weather", "input": {}}

    results = [{"type": "tool_result", "tool_use_id": name, "content": "rain"} for name in ("c1", "c2")]
    said = {"type": "text", "text": "I look."}
    turns: Any = [
        USER,
        turn(said),
        turn(thought("Here "), made("c1")),
        turn(thought("and there."), made("c2")),
        {"role": "user", "content": results},
    ]
    client.messages.create(model=MODEL, max_tokens=5, tools=[TOOL], messages=turns)

    joined = script.rendered[-1]["messages"][1]
    assert (joined["reasoning_content"], joined["content"]) == ("Here and there.", "I look.")
    assert [call["id"] for call in joined["tool_calls"]] == ["c1", "c2"]


@pytest.mark.parametrize(("choice", "chat"), [("auto", "auto"), ("any", "required"), ("none", "none")])
def test_choices_of_tools_have_their_counterparts(
    stage: Stage, client: anthropic.Anthropic, choice: Any, chat: str
) -> None:
    script = stage.speak(content("ok"))

    client.messages.create(tools=[TOOL], tool_choice={"type": choice}, **ASKED)

    assert script.rendered[0]["tool_choice"] == chat


def test_an_answer_that_the_conversation_ends_with_is_gone_on_with(stage: Stage, client: anthropic.Anthropic) -> None:
    script = stage.speak(content(" rains."))
    begun: Any = {"role": "assistant", "content": "It"}

    client.messages.create(model=MODEL, max_tokens=5, messages=[USER, begun])

    assert script.rendered[0]["continue_final_message"] and not script.rendered[0]["add_generation_prompt"]
    assert script.rendered[0]["messages"][-1] == begun


@pytest.mark.parametrize(
    ("ending", "reason", "sequence"),
    [
        ({"stop_cause": 2}, "end_turn", None),
        ({"stop_cause": "STOP"}, "stop_sequence", "STOP"),
        ({"reason": "length"}, "max_tokens", None),
        ({"reason": "length", "tokens": 59}, "model_context_window_exceeded", None),
    ],
)
def test_the_reason_of_the_end_is_told(
    stage: Stage, client: anthropic.Anthropic, ending: Any, reason: str, sequence: str | None
) -> None:
    script = stage.speak(content("A"), **ending)

    message = client.messages.create(stop_sequences=["STOP"], **ASKED)

    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert script.params[0].stop == ("STOP",)


def test_an_empty_answer_has_no_blocks(stage: Stage, client: anthropic.Anthropic) -> None:
    stage.speak()

    assert client.messages.create(**ASKED).content == []


def test_a_call_that_was_cut_keeps_what_is_whole(stage: Stage, client: anthropic.Anthropic) -> None:
    stage.speak(*call("weather", '{"at": "sea", "day": "Mon'), reason="length")

    made: Any = client.messages.create(tools=[TOOL], **ASKED).content[0]

    assert made.input == {"at": "sea", "day": "Mon"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [('{"at": "S', "stop_sequence"), ('{"at": 1}', "tool_use"), ('{"at": ' + "[" * 100_000, "stop_sequence")],
    ids=["cut", "whole", "deep"],
)
def test_a_call_that_a_stop_string_has_cut_is_none_to_make(
    stage: Stage, client: anthropic.Anthropic, arguments: str, reason: str
) -> None:
    stage.speak(*call("weather", arguments), stop_cause="ea")

    assert client.messages.create(tools=[TOOL], **ASKED).stop_reason == reason


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        ({"reason": "error", "error": "the page pool is lost"}, "the page pool is lost"),
        ({"reason": "abort"}, "aborted"),
        ({"fault": EngineDied("the engine process ended", "ask again")}, "engine process ended"),
        ({"fault": ZeroDivisionError("a secret")}, "its log has it under err-"),
    ],
)
def test_an_answer_that_fails_says_why(stage: Stage, client: anthropic.Anthropic, ending: Any, text: str) -> None:
    stage.speak(content("Once"), **ending)

    with pytest.raises(anthropic.APIStatusError, match=text) as whole:
        client.messages.create(**ASKED)
    with pytest.raises(anthropic.APIStatusError, match=text) as streamed:
        list(client.messages.create(stream=True, **ASKED))

    assert whole.value.body == streamed.value.body or "err-" in text
    assert "secret" not in str(whole.value.body)


def test_what_is_refused_before_the_first_word_has_a_status_of_its_own(
    stage: Stage, client: anthropic.Anthropic
) -> None:
    stage.speak(fault=Overloaded("too much to do", retry_after=3))

    with pytest.raises(anthropic.RateLimitError, match="too much to do") as refused:
        client.messages.create(stream=True, **ASKED)

    assert refused.value.response.headers["retry-after"] == "3"
    body: Any = refused.value.body
    assert body["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        (
            "messages",
            [{"role": "user", "content": [{"type": "image", "source": {}}]}],
            "messages.0..content.0..*'image'",
        ),
        (
            "messages",
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}],
            "'c' that was not made",
        ),
        ("messages", [], "messages"),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}], "tools.0.*web_search"),
        ("tool_choice", {"type": "tool"}, "tool_choice"),
        ("mcp_servers", [{"name": "x"}], "mcp_servers"),
        ("max_tokens", 0, "max_tokens"),
        ("stop_sequences", [""], "stop_sequences"),
        ("max_new_tokens", 1, "use max_tokens"),
    ],
)
def test_what_can_not_be_had_is_refused_by_its_name(
    stage: Stage, client: anthropic.Anthropic, field: str, value: Any, text: str
) -> None:
    stage.speak(content("x"))
    with pytest.raises(anthropic.BadRequestError, match=text) as refused:
        client.post("/v1/messages", body={**ASKED, field: value}, cast_to=object)

    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"


def test_a_runner_of_tools_that_wants_threads_learns_to_do_without(stage: Stage, client: anthropic.Anthropic) -> None:
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """What the weather is like."""
        return f"wet in {city}"

    script = stage.converse(call("weather", '{"city": "Rome"}'), [content("It rains.")])
    said: Any = {**ASKED, "tools": [weather]}
    messages = list(client.beta.messages.tool_runner(**said))

    assert messages[-1].content[0].to_dict()["text"] == "It rains."
    assert [message["role"] for message in script.rendered[-1]["messages"]] == ["user", "assistant", "tool"]
    with pytest.raises(anthropic.BadRequestError, match="thread: this server keeps no conversations") as refused:
        client.post("/v1/messages", body={**ASKED, "thread": {"type": "create"}}, cast_to=object)
    body: Any = refused.value.body
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_max_tokens_must_be_given(stage: Stage, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.post("/v1/messages", body={"messages": [USER]}, cast_to=object)


def test_an_unknown_model_is_not_found(stage: Stage, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match=f"'other' is not served here; wanted one of {MODEL}"):
        client.messages.create(model="other", max_tokens=1, messages=[USER])


def test_fields_without_effect_are_told(stage: Stage, client: anthropic.Anthropic) -> None:
    stage.speak(content("x"))
    system: Any = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]

    raw = client.messages.with_raw_response.create(
        system=system, metadata={"user_id": "u"}, thinking={"type": "enabled", "budget_tokens": 1024}, **ASKED
    )

    told = raw.headers["x-sglcore-warnings"]
    assert told == "ignored: content.cache_control, metadata, thinking.budget_tokens"


@pytest.mark.parametrize(
    ("ignored", "told"),
    [
        (("thinking",), None),
        (("enable_thinking", "thinking"), "ignored: thinking"),
        (("enable_thinking", "reasoning_effort", "thinking"), "ignored: output_config.effort, thinking"),
    ],
)
def test_thinking_that_the_template_does_not_know_is_told(
    stage: Stage, client: anthropic.Anthropic, ignored: tuple[str, ...], told: str | None
) -> None:
    stage.speak(content("x"), ignored=ignored)

    raw = client.messages.with_raw_response.create(
        thinking={"type": "disabled"}, output_config={"effort": "low"}, **ASKED
    )

    assert raw.headers.get("x-sglcore-warnings") == told


def test_tokens_are_counted(stage: Stage, client: anthropic.Anthropic) -> None:
    assert client.messages.count_tokens(model=MODEL, messages=[USER]).input_tokens == len(PROMPT)


def test_the_embedded_model_answers_the_same_in_every_way_of_asking(server: Server, real: anthropic.Anthropic) -> None:
    request: Any = {"model": "", "max_tokens": 16, "messages": [STORY], "extra_body": {"temperature": 0}}

    async def ask_async() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, auth_token="unused", max_retries=0) as client:
            whole: Any = await client.messages.create(**request)
            async with client.messages.stream(**request) as stream:
                return whole.content[0].text, await stream.get_final_text()

    whole: Any = real.messages.create(**request)
    with real.messages.stream(**request) as stream:
        streamed = stream.get_final_text()

    text = whole.content[0].text
    assert len(text) > 16
    assert [streamed, *asyncio.run(ask_async())] == [text] * 3
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 16)
    counted = real.messages.count_tokens(model="", messages=[STORY]).input_tokens
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == counted


def test_the_embedded_model_stops_at_a_sequence(server: Server, real: anthropic.Anthropic) -> None:
    message: Any = real.messages.create(
        model="", max_tokens=50, messages=[STORY], stop_sequences=["."], extra_body={"temperature": 0}
    )

    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ".")
    assert "." not in message.content[0].text


def test_the_embedded_model_fills_a_pydantic_model(server: Server, real: anthropic.Anthropic) -> None:
    message = real.messages.parse(
        model="", max_tokens=300, messages=[USER], output_format=Weather, extra_body={"temperature": 0}
    )

    assert isinstance(message.parsed_output, Weather)


def test_the_embedded_model_has_no_tools_and_says_so(server: Server, real: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        real.messages.create(model="", max_tokens=5, messages=[USER], tools=[TOOL])


def test_the_prompt_of_a_model_with_tools_has_them_with_calls_and_results(tool_server: Server) -> None:
    thought: Any = {"type": "thinking", "thinking": "Who knows?", "signature": ""}
    made: Any = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"at": "sea"}}
    result: Any = {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}
    turns: Any = [USER, {"role": "assistant", "content": [thought, made]}, {"role": "user", "content": [result]}]
    with anthropic.Anthropic(base_url=tool_server.url, api_key="unused", max_retries=0) as client:
        counts = [
            client.messages.count_tokens(model="", messages=turns[:1]),
            client.messages.count_tokens(model="", messages=turns[:1], tools=[TOOL]),
            client.messages.count_tokens(model="", messages=turns, tools=[TOOL]),
        ]
        answer = client.messages.create(model="", max_tokens=3, messages=turns, tools=[TOOL])

    plain, with_tools, with_result = (count.input_tokens for count in counts)
    assert plain < with_tools < with_result
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == with_result


def test_what_a_body_says_of_thinking_and_of_calls_is_asked_for() -> None:
    tool = {"name": "weather", "input_schema": {"type": "object"}, "strict": True}
    body: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    plain = message_request(MessagesRequest.model_validate(body))
    assert (plain.thinking_token_budget, plain.parallel_tool_calls) == (None, True)
    body |= {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    body |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    asked = message_request(MessagesRequest.model_validate(body))
    assert (asked.thinking_token_budget, asked.parallel_tool_calls, asked.tool_choice) == (1024, False, "required")
    assert asked.tools is not None and asked.tools[0]["function"]["strict"] is True


def test_models_are_listed_and_missed_in_the_shape_of_this_api(server: Server, real: anthropic.Anthropic) -> None:
    page = real.models.list()
    (model,) = page.data
    assert (model.type, model.id, model.display_name) == ("model", "sglcore-demo", "sglcore-demo")
    assert model.created_at.year >= 2020 and (page.first_id, page.last_id, page.has_more) == (model.id, model.id, False)
    assert real.models.retrieve("sglcore-demo") == model
    with pytest.raises(anthropic.NotFoundError) as missed:
        real.models.retrieve("other")
    assert cast(Any, missed.value.body)["error"]["type"] == "not_found_error"
    assert server.get("/v1/models")["object"] == "list"
    assert "param" in server.client.get("/v1/models/other").json()["error"]


def test_answers_and_errors_have_the_id_where_this_client_looks_for_it(real: anthropic.Anthropic) -> None:
    raw = real.messages.with_raw_response.create(
        extra_headers={"x-request-id": "mine"}, **{**ASKED, "model": "sglcore-demo"}
    )
    assert raw.headers["request-id"] == "mine"
    with pytest.raises(anthropic.NotFoundError) as missed:
        real.messages.create(**{**ASKED, "model": "other"})
    assert missed.value.request_id is not None and missed.value.request_id.startswith("req_")


@pytest.mark.parametrize("stream", [False, True])
def test_no_block_has_a_field_of_null(server: Server, stream: bool) -> None:
    """The AI SDK's reader of this API accepts a list or no field for `citations`, but not null."""
    body = {"model": "sglcore-demo", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
    if stream:
        events = [json.loads(line) for line in server.events("/v1/messages", body) if line.startswith("{")]
        blocks = [each["content_block"] for each in events if each["type"] == "content_block_start"]
    else:
        blocks = server.post("/v1/messages", body)["content"]
    assert blocks and not [name for block in blocks for name, value in block.items() if value is None]
