"""/v1/responses: items to a conversation and back, the order of events, and stored responses. By
OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import openai
import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.serving.replicas.server_errors import EngineDied, Overloaded
from tests.serving.scripted import CACHED, DEMO, MODEL, PROMPT, Stage, call, content, reasoning, staged

KEPT = 3
TOOL: Any = {"type": "function", "name": "weather", "description": "Tells it", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged(ServerConfig(max_stored_responses=KEPT)) as stage:
        yield stage


@pytest.fixture(scope="module")
def client(stage: Stage) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stage.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_reasoning_text_and_calls_are_items_in_their_order(stage: Stage, client: openai.OpenAI) -> None:
    stage.speak(
        reasoning("Hm, "), reasoning("rain."), content("Let me "), content("look."), *call("weather", '{"at"', ":1}")
    )

    response = client.responses.create(model=MODEL, input="And now?", tools=[TOOL])

    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output_text == "Let me look."
    thought: Any = response.output[0]
    assert thought.content[0].text == "Hm, rain."
    made: Any = response.output[2]
    assert (made.call_id, made.name, made.arguments) == ("call_weather", "weather", '{"at":1}')
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.input_tokens == len(PROMPT)
    assert response.usage.input_tokens_details.cached_tokens == CACHED
    assert response.usage.output_tokens == 7
    assert (
        response.usage.output_tokens_details.reasoning_tokens
        == len(TextCodec(DEMO).encode("Hm, rain.", special=False))
        == 6
    )
    assert response.to_dict()["seed_used"] == 77
    assert response.to_dict()["system_fingerprint"] == "fp_0123456789ab"


def test_the_events_of_a_stream_come_in_order_and_add_up_to_the_response(stage: Stage, client: openai.OpenAI) -> None:
    stage.speak(reasoning("Hm."), content("A"), content("B"), *call("f", "{}"), *call("g", '{"a":', "1}", index=1))

    events = list(client.responses.create(model=MODEL, input="x", stream=True, tools=[TOOL]))

    text = ["response.output_item.added", "response.content_part.added"]
    text_end = ["response.content_part.done", "response.output_item.done"]
    arguments = "response.function_call_arguments"
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        *text,
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        *text_end,
        *text,
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        *text_end,
        "response.output_item.added",
        f"{arguments}.delta",
        f"{arguments}.done",
        "response.output_item.done",
        "response.output_item.added",
        f"{arguments}.delta",
        f"{arguments}.delta",
        f"{arguments}.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in last.response.output]
    added = [event.item.to_dict() for event in events if event.type == "response.output_item.added"]
    assert [item.get("arguments", item.get("content")) for item in added] == [[], [], "", ""]


def test_the_client_puts_a_stream_together_as_the_answer_that_waits(stage: Stage, client: openai.OpenAI) -> None:
    stage.speak(content("All "), content("of it."), *call("weather", '{"at":', '"sea"}'))

    with client.responses.stream(model=MODEL, input="x", tools=[TOOL]) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        streamed = stream.get_final_response()
    whole = client.responses.create(model=MODEL, input="x", tools=[TOOL])

    assert deltas == ["All ", "of it."]
    assert streamed.output_text == whole.output_text == "All of it."
    assert streamed.output[1].to_dict()["arguments"] == whole.output[1].to_dict()["arguments"] == '{"at":"sea"}'


def test_items_become_the_messages_of_a_chat(stage: Stage, client: openai.OpenAI) -> None:
    script = stage.speak(content("ok"))
    items: Any = [
        {"role": "developer", "content": "Be short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How is it?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"at":1}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"role": "assistant", "content": "Rain."},
        {"role": "assistant", "content": "And sun."},
    ]

    client.responses.create(
        model=MODEL,
        instructions="You know.",
        input=items,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "weather"},
        reasoning={"effort": "low"},
    )

    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at":1}'}},
        {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
    ]
    rendered = script.rendered[0]
    assert rendered["messages"] == [
        {"role": "system", "content": "You know."},
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "How is it?"}]},
        {"role": "assistant", "reasoning_content": "Look.", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "sun"}]},
        {"role": "assistant", "content": "Rain."},
        {"role": "assistant", "content": "And sun."},
    ]
    function = {"name": "weather", "description": "Tells it", "parameters": {"type": "object"}}
    assert rendered["tools"] == [{"type": "function", "function": function}]
    assert rendered["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert rendered["chat_template_kwargs"] == {"reasoning_effort": "low"}


def test_a_response_goes_on_from_the_one_that_it_names(stage: Stage, client: openai.OpenAI) -> None:
    stage.speak(*call("weather", "{}"))
    first = client.responses.create(model=MODEL, input="How is it?", instructions="Once only.", tools=[TOOL])
    output: Any = [{"type": "function_call_output", "call_id": "call_weather", "output": "rain"}]
    script = stage.speak(content("It rains."))

    client.responses.create(model=MODEL, input=output, previous_response_id=first.id)

    function = {"name": "weather", "arguments": "{}"}
    assert script.rendered[0]["messages"] == [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "tool_calls": [{"id": "call_weather", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_weather", "content": "rain"},
    ]


SAID: dict[str, list[Any]] = {
    "thought": [reasoning("Hm, "), reasoning("rain.")],
    "text": [content("I "), content("look.")],
    "calls": [*call("weather", '{"at"', ":1}"), *call("time", "{}", index=1)],
}


@pytest.mark.parametrize("kinds", [each for size in (1, 2, 3) for each in combinations(SAID, size)], ids="-".join)
def test_what_goes_on_from_a_response_is_what_goes_on_from_all_that_was_said(
    stage: Stage, client: openai.OpenAI, kinds: tuple[str, ...]
) -> None:
    asked: Any = {"role": "user", "content": "How is it?"}
    stage.speak(*(token for kind in kinds for token in SAID[kind]))
    first = client.responses.create(model=MODEL, input=[asked], tools=[TOOL])
    then: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"of {item.name}"}
        for item in first.output
        if item.type == "function_call"
    ]
    then.append({"role": "user", "content": "And now?"})
    script = stage.speak(content("It rains."))
    sent: Any = [item.to_dict() for item in first.output]

    client.responses.create(model=MODEL, input=then, previous_response_id=first.id)
    client.responses.create(model=MODEL, input=[asked, *sent, *then])

    kept, whole = (each["messages"] for each in script.rendered)
    assert kept == whole
    said = kept[1]
    assert [name in said for name in ("reasoning_content", "content", "tool_calls")] == [kind in kinds for kind in SAID]


def test_a_kept_response_can_be_read_listed_and_forgotten(stage: Stage, client: openai.OpenAI) -> None:
    stage.speak(content("Yes."))
    made = client.responses.create(model=MODEL, input="one", metadata={"a": "b"})

    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    items: Any = client.responses.input_items.list(made.id).data
    assert [(item.role, item.content[0].text) for item in items] == [("user", "one")]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match=f"no response '{made.id}'.*newest {KEPT}"):
        client.responses.retrieve(made.id)


def test_input_items_come_in_pages(stage: Stage, client: openai.OpenAI) -> None:
    stage.speak(content("Yes."))
    words = ["one", "two", "three"]
    given: Any = [{"role": "user", "content": word} for word in words]
    made = client.responses.create(model=MODEL, input=given)

    listed: Any = list(client.responses.input_items.list(made.id, limit=2, order="asc"))

    assert [item.content[0].text for item in listed] == words
    newest: Any = client.responses.input_items.list(made.id, limit=1).data
    assert newest[0].content[0].text == "three"
    with pytest.raises(openai.BadRequestError, match="no item 'msg_0'"):
        client.responses.input_items.list(made.id, after="msg_0")
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.input_items.list(made.id, limit=101)
    assert refused.value.param == "limit"


def test_what_is_not_to_be_stored_is_not(stage: Stage, client: openai.OpenAI) -> None:
    stage.speak(content("Yes."))
    made = client.responses.create(model=MODEL, input="x", store=False)

    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model=MODEL, input="y", previous_response_id=made.id)

    assert refused.value.param == "previous_response_id"


def test_an_answer_that_is_cut_is_incomplete_and_says_by_what(stage: Stage, client: openai.OpenAI) -> None:
    stage.speak(content("Once"), reason="length")

    whole = client.responses.create(model=MODEL, input="x", max_output_tokens=1)
    events = list(client.responses.create(model=MODEL, input="x", max_output_tokens=1, stream=True))

    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output[0].to_dict()["status"] == "incomplete"
    assert events[-1].type == "response.incomplete"


def test_an_empty_answer_is_an_empty_message(stage: Stage, client: openai.OpenAI) -> None:
    stage.speak()

    response = client.responses.create(model=MODEL, input="x")

    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == ""


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        ({"reason": "error", "error": "the page pool is lost"}, "the page pool is lost"),
        ({"reason": "abort"}, "aborted"),
        ({"fault": EngineDied("the engine process ended", "ask again")}, "engine process ended"),
        ({"fault": ZeroDivisionError("a secret")}, "its log has it under err-"),
    ],
)
def test_an_answer_that_fails_says_why(stage: Stage, client: openai.OpenAI, ending: Any, text: str) -> None:
    stage.speak(content("Once"), **ending)

    events: Any = list(client.responses.create(model=MODEL, input="x", stream=True))
    with pytest.raises(openai.InternalServerError, match=text):
        client.responses.create(model=MODEL, input="x")

    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert text in events[-1].response.error.message
    assert "secret" not in str(events)


def test_what_is_refused_before_the_first_word_has_a_status_of_its_own(stage: Stage, client: openai.OpenAI) -> None:
    stage.speak(fault=Overloaded("too much to do", retry_after=3))

    with pytest.raises(openai.RateLimitError, match="too much to do") as refused:
        client.responses.create(model=MODEL, input="x", stream=True)

    assert refused.value.response.headers["retry-after"] == "3"


def test_log_probabilities_stand_with_the_text(stage: Stage, client: openai.OpenAI) -> None:
    script = stage.speak(reasoning("Hm."), content("A"), content("B"))

    response: Any = client.responses.create(model=MODEL, input="x", top_logprobs=2)

    found = response.output[1].content[0].logprobs
    assert [item.logprob for item in found] == [-0.5, -0.5]
    assert [each.logprob for each in found[0].top_logprobs] == [-0.5, -1.5]
    assert script.params[0].logprobs == 2
    client.responses.create(model=MODEL, input="x", include=["message.output_text.logprobs"])
    client.responses.create(model=MODEL, input="x")
    assert [params.logprobs for params in script.params] == [2, 0, None]


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("background", True, "background"),
        ("conversation", "conv_1", "conversation"),
        ("prompt", {"id": "p"}, "prompt"),
        ("tools", [{"type": "web_search"}], "tools[0]"),
        ("tool_choice", {"type": "mcp", "server_label": "x"}, "tool_choice"),
        ("tool_choice", "required", "tool_choice"),
        ("input", [{"type": "computer_call", "id": "x"}], "input[0]"),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0]"),
        ("input", [{"type": "function_call_output", "call_id": "c", "output": "x"}], "input[0].call_id"),
        ("input", [], "input"),
        ("max_output_tokens", 0, "max_output_tokens"),
        ("temperature", -1, "temperature"),
        ("top_logprobs", 21, "top_logprobs"),
        ("metadata", {"a": 1}, "metadata.a"),
        ("system", "x", "system"),
        ("n", 2, "n"),
    ],
)
def test_what_can_not_be_had_is_refused_by_its_name(
    stage: Stage, client: openai.OpenAI, field: str, value: Any, param: str
) -> None:
    stage.speak(content("x"))
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/responses", body={"model": MODEL, "input": "x", field: value}, cast_to=object)

    assert refused.value.param == param


def test_fields_without_effect_are_told(stage: Stage, client: openai.OpenAI) -> None:
    stage.speak(content("x"))
    ignored: Any = {"user": "u", "text": {"verbosity": "low"}, "include": ["reasoning.encrypted_content"]}

    raw = client.responses.with_raw_response.create(model=MODEL, input="x", **ignored)
    quiet = client.responses.with_raw_response.create(model=MODEL, input="x", user=openai.omit)

    assert raw.headers["x-sglcore-warnings"] == "ignored: include 'reasoning.encrypted_content', text.verbosity, user"
    assert "x-sglcore-warnings" not in quiet.headers


def test_an_effort_that_the_template_does_not_know_is_told(stage: Stage, client: openai.OpenAI) -> None:
    stage.speak(content("x"), ignored=("mood", "reasoning_effort"))
    extra = {"chat_template_kwargs": {"mood": "good"}}

    raw = client.responses.with_raw_response.create(input="x", reasoning={"effort": "low"}, extra_body=extra)

    assert raw.headers["x-sglcore-warnings"] == "ignored: chat_template_kwargs.mood, reasoning.effort"


def test_a_response_can_not_be_cancelled_after_its_request(stage: Stage, client: openai.OpenAI) -> None:
    stage.speak(content("x"))
    made = client.responses.create(model=MODEL, input="x")

    with pytest.raises(openai.BadRequestError, match="not in the background"):
        client.responses.cancel(made.id)


def test_input_tokens_are_counted(stage: Stage, client: openai.OpenAI) -> None:
    assert client.responses.input_tokens.count(model=MODEL, input="How many?").input_tokens == len(PROMPT)


def test_a_budget_of_thinking_is_told_where_nothing_thinks(stage: Stage, client: openai.OpenAI) -> None:
    stage.speak(content("x"))
    raw = client.responses.with_raw_response.create(model=MODEL, input="x", extra_body={"thinking_token_budget": 8})
    assert raw.headers["x-sglcore-warnings"] == "ignored: thinking_token_budget"
