"""What a response says of its request, how its items end, and which fields are reported as without
effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types.responses import Response
from pydantic import ValidationError

from sglcore.config.server_config import ServerConfig
from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.responses.body import ResponsesRequest
from sglcore.serving.apis.responses.events import draft
from sglcore.serving.apis.responses.items import input_items
from sglcore.serving.apis.responses.request import chat_request, response_request, unread, unused
from sglcore.serving.apis.responses.response_store import ResponseStore, Stored
from sglcore.serving.replicas.server_errors import InvalidRequest
from tests.serving.scripted import MODEL, Stage, call, content, reasoning, staged

TOOL: Any = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}


def asked(**given: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "a", **given})


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged(ServerConfig(max_stored_responses=2)) as stage:
        yield stage


def drafted(**given: Any) -> dict[str, Any]:
    return draft(asked(**given), SamplingParams(temperature=0.25, top_p=0.5), "m", "fp_1")


def test_a_response_says_what_was_asked_for() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    same: dict[str, Any] = {
        "instructions": "Be short.",
        "max_output_tokens": 7,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "previous_response_id": "resp_1",
        "store": False,
        "text": {"format": form, "verbosity": "low"},
        "tool_choice": {"type": "function", "name": "f"},
        "top_logprobs": 3,
        "user": "u",
    }
    full = {"type": "function", "name": "g", "description": "d", "parameters": schema, "strict": True}
    found = drafted(**same, tools=[TOOL, full], reasoning={"effort": "low"})
    assert {name: found[name] for name in same} == same
    assert found["tools"] == [{**TOOL, "description": None, "parameters": None, "strict": None}, full]
    assert found["reasoning"] == {"effort": "low", "summary": None}
    assert (found["model"], found["system_fingerprint"]) == ("m", "fp_1")
    assert (found["temperature"], found["top_p"]) == (0.25, 0.5)
    Response.model_validate(found)


def test_a_response_has_the_defaults_of_what_was_left_out() -> None:
    found = drafted()
    assert found["id"].startswith("resp_") and found["id"] != drafted()["id"]
    wanted: dict[str, Any] = {
        "object": "response",
        "status": "in_progress",
        "parallel_tool_calls": True,
        "store": True,
        "background": False,
        "metadata": {},
        "output": [],
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        **dict.fromkeys(("instructions", "max_output_tokens", "previous_response_id", "user", "usage", "error")),
    }
    assert {name: found[name] for name in wanted} == wanted
    assert drafted(text={"verbosity": "low"})["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert drafted(tool_choice="none")["tool_choice"] == "none"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, []),
        ({"include": ["message.output_text.logprobs"]}, []),
        ({"include": ["a", "message.output_text.logprobs", "b"]}, ["include 'a'", "include 'b'"]),
        ({"text": {"verbosity": "low"}}, ["text.verbosity"]),
        ({"text": {"format": {"type": "text"}}}, []),
        ({"truncation": "auto"}, ["truncation"]),
        ({"truncation": "disabled"}, []),
        ({"reasoning": {"effort": "low"}}, []),
        ({"reasoning": {"summary": "auto", "mode": "x"}}, ["reasoning.mode", "reasoning.summary"]),
        ({"stream_options": {"include_obfuscation": True}}, ["stream_options.include_obfuscation"]),
        ({"stream_options": {"include_obfuscation": False}}, []),
        ({"tools": [{**TOOL, "strict": False}]}, []),
        ({"tools": [{**TOOL, "strict": True}]}, ["tools.strict"]),
        ({"tools": [TOOL, {**TOOL, "strict": True}], "tool_choice": "auto"}, ["tools.strict"]),
        ({"tools": [{**TOOL, "strict": True}], "tool_choice": "none"}, ["tools.strict"]),
        ({"tools": [{**TOOL, "strict": True}], "tool_choice": "required"}, []),
        ({"tools": [{**TOOL, "strict": True}], "tool_choice": TOOL}, []),
        ({"tools": [{**TOOL, "defer_loading": False}]}, ["tools.defer_loading"]),
        ({"input": [{**THOUGHT, "encrypted_content": "x"}]}, ["input.encrypted_content"]),
        ({"input": [THOUGHT]}, []),
        ({"user": "u", "max_tool_calls": 3, "prompt_cache_key": "k"}, ["max_tool_calls", "prompt_cache_key", "user"]),
    ],
)
def test_a_field_without_effect_is_told(given: Any, told: list[str]) -> None:
    assert unused(asked(**given)) == told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"reasoning": {"effort": "low"}}, ["reasoning.effort"]),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, ["chat_template_kwargs.reasoning_effort"]),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_told_by_the_field_that_sets_it(given: Any, told: Any) -> None:
    assert unread(asked(**given), ["reasoning_effort"]) == told


@pytest.mark.parametrize(
    ("given", "logprobs"),
    [
        ({}, None),
        ({"include": []}, None),
        ({"top_logprobs": 0}, 0),
        ({"top_logprobs": 3}, 3),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, 2),
    ],
)
def test_log_probabilities_are_shown_if_either_field_asks_for_them(given: Any, logprobs: int | None) -> None:
    assert response_request(asked(**given), [], 3).params.logprobs == logprobs


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"top_logprobs": 4}, "top_logprobs"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"context_management": [{}]}, "context_management"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"moderation": {"model": "m"}}, "moderation"),
    ],
)
def test_what_a_response_can_not_have_is_refused_by_its_field(given: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        response_request(asked(**given), [], 3)
    assert refused.value.param == param


def test_a_response_asks_for_what_its_body_says() -> None:
    system, earlier = {"role": "system", "content": "Be short."}, [{"role": "user", "content": "q"}]
    tool = {**TOOL, "description": "d", "parameters": {}, "strict": True}
    kwargs = {"reasoning_effort": "high", "a": 1}
    given = {"instructions": "Be short.", "tools": [tool], "parallel_tool_calls": False, "thinking_token_budget": 0}
    given |= {"reasoning": {"effort": "low"}, "chat_template_kwargs": kwargs, "max_output_tokens": 3, "stop": ["x"]}
    made = response_request(asked(**given), earlier, 3)
    assert made.messages == [system, *earlier, {"role": "user", "content": "a"}]
    function = {"name": "f", "description": "d", "parameters": {}, "strict": True}
    assert made.tools == [{"type": "function", "function": function}]
    assert (made.parallel_tool_calls, made.thinking_token_budget, made.chat_template_kwargs) == (False, 0, kwargs)
    assert (made.params.max_tokens, made.params.stop, made.form) == (3, ("x",), "text.format.schema")
    plain = response_request(asked(reasoning={"effort": "low"}), [], 3)
    assert (plain.parallel_tool_calls, plain.tools, plain.tool_choice) == (True, None, "auto")
    assert (plain.chat_template_kwargs, plain.params.max_tokens) == ({"reasoning_effort": "low"}, None)


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([said("developer", "a"), said("system", "b")], [said("system", "a"), said("system", "b")]),
        (
            [said("assistant", "a"), THOUGHT],
            [said("assistant", "a"), {"role": "assistant", "reasoning_content": "Hm."}],
        ),
        ([THOUGHT, THOUGHT], [{"role": "assistant", "reasoning_content": "Hm."}] * 2),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "S."}]}],
            [{"role": "assistant", "reasoning_content": "S."}],
        ),
        (
            [{**THOUGHT, "summary": [{"type": "summary_text", "text": "S."}]}],
            [{"role": "assistant", "reasoning_content": "Hm."}],
        ),
        ([{"type": "reasoning", "summary": []}], []),
        (
            [
                {
                    "role": "assistant",
                    "content": [{"type": "refusal", "refusal": "N"}, {"type": "output_text", "text": "o"}],
                }
            ],
            [said("assistant", "No")],
        ),
    ],
)
def test_each_turn_of_the_model_has_its_parts_in_the_order_of_their_making(items: Any, messages: Any) -> None:
    assert chat_request(asked(input=items), [], SamplingParams()).messages == messages


def test_a_call_after_another_turn_of_the_model_begins_a_turn_of_its_own() -> None:
    items = [CALL, {"type": "function_call_output", "call_id": "c", "output": "o"}, {**CALL, "call_id": "d"}]
    found = chat_request(asked(input=items), [], SamplingParams()).messages
    assert [each["role"] for each in found] == ["assistant", "tool", "assistant"]
    assert [[each["id"] for each in message.get("tool_calls", ())] for message in found] == [["c"], [], ["d"]]


def test_items_of_a_stored_input_have_ids_states_and_parts() -> None:
    given = asked(input=[said("user", "q"), said("assistant", "a"), CALL, {**THOUGHT, "id": "mine", "status": "x"}])
    user, answer, made, thought = input_items(given.input or ())
    assert user["content"] == [{"type": "input_text", "text": "q"}]
    assert answer["content"] == [{"type": "output_text", "text": "a", "annotations": []}]
    assert [each["id"].partition("_")[0] for each in (user, answer, made)] == ["msg", "msg", "fc"]
    assert {each["status"] for each in (user, answer, made)} == {"completed"}
    assert (thought["id"], thought["status"], thought["summary"]) == ("mine", "x", [])
    assert [each["type"] for each in input_items("q")] == ["message"]


@pytest.mark.parametrize(
    ("says", "statuses"),
    [
        ([content("A")], ["incomplete"]),
        ([reasoning("Hm."), content("A")], ["completed", "incomplete"]),
        ([content("A"), *call("f", "{}")], ["completed", "incomplete"]),
        (
            [reasoning("Hm."), content("A"), *call("f", "{}"), *call("g", "{}", index=1)],
            ["completed"] * 3 + ["incomplete"],
        ),
    ],
)
def test_of_a_response_that_was_cut_the_last_item_alone_is_incomplete(stage: Stage, says: Any, statuses: Any) -> None:
    for reason, wanted in (("length", statuses), ("stop", ["completed"] * len(statuses))):
        stage.speak(*says, reason=reason)
        body = {"input": "a", "tools": [{**TOOL, "name": name} for name in "fg"]}
        found = httpx.post(f"{stage.url}/v1/responses", json=body, trust_env=False).json()
        assert [each["status"] for each in found["output"]] == wanted
        assert (found["completed_at"] is None) == (reason == "length")
        assert found["incomplete_details"] == ({"reason": "max_output_tokens"} if reason == "length" else None)


def test_a_failed_response_is_no_cut_one_and_is_kept(stage: Stage) -> None:
    stage.speak(content("A"), reason="error", error="planted")
    answer = httpx.post(f"{stage.url}/v1/responses", json={"input": "a", "stream": True}, trust_env=False)
    name = answer.text.partition('"id":"resp_')[2].partition('"')[0]
    found = httpx.get(f"{stage.url}/v1/responses/resp_{name}", trust_env=False).json()
    assert (found["status"], found["incomplete_details"], found["completed_at"]) == ("failed", None, None)
    assert "planted" in found["error"]["message"] and found["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("method", "path", "param"),
    [
        ("GET", "", "stream"),
        ("GET", "", "include_obfuscation"),
        ("GET", "/input_items", "before"),
        ("GET", "/input_items", "limits[]"),
    ],
)
def test_a_parameter_of_an_address_that_has_no_effect_is_refused(
    stage: Stage, method: str, path: str, param: str
) -> None:
    stage.speak(content("A"))
    made = httpx.post(f"{stage.url}/v1/responses", json={"input": "a"}, trust_env=False).json()["id"]
    address = f"{stage.url}/v1/responses/{made}{path}"
    for known in ({}, {"include[]": "a"}, {"include": "a"}):
        assert httpx.request(method, address, params=known, trust_env=False).status_code == 200
    refused = httpx.request(method, address, params={param: "1"}, trust_env=False)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_items_come_twenty_at_a_time_the_newest_first(stage: Stage) -> None:
    stage.speak(content("A"))
    items = [said("user", str(place)) for place in range(22)]
    made = httpx.post(f"{stage.url}/v1/responses", json={"input": items}, trust_env=False).json()["id"]
    page = httpx.get(f"{stage.url}/v1/responses/{made}/input_items", trust_env=False).json()
    assert [each["content"][0]["text"] for each in page["data"]] == [str(21 - place) for place in range(20)]
    assert page["has_more"] is True
    for limit, status in ((1, 200), (100, 200), (0, 400), (101, 400)):
        address = f"{stage.url}/v1/responses/{made}/input_items?limit={limit}"
        assert httpx.get(address, trust_env=False).status_code == status, limit


def test_so_many_responses_are_kept_as_the_server_was_told(stage: Stage) -> None:
    stage.speak(content("A"))
    made = [
        httpx.post(f"{stage.url}/v1/responses", json={"input": "a"}, trust_env=False).json()["id"] for _ in range(3)
    ]
    found = [httpx.get(f"{stage.url}/v1/responses/{name}", trust_env=False).status_code for name in made]
    assert found == [404, 200, 200]
    for method, path in (("POST", "/cancel"), ("DELETE", ""), ("GET", "/input_items")):
        missed = httpx.request(method, f"{stage.url}/v1/responses/{made[0]}{path}", trust_env=False)
        assert (missed.status_code, missed.json()["error"]["param"]) == (404, "response_id")


def test_a_count_of_tokens_goes_on_from_a_response_and_tells_what_has_no_effect(stage: Stage) -> None:
    stage.speak(content("A"))
    made = httpx.post(f"{stage.url}/v1/responses", json={"input": "a"}, trust_env=False).json()["id"]
    script = stage.speak(content("A"))
    body = {"input": "b", "model": MODEL, "personality": "kind", "previous_response_id": made}
    found = httpx.post(f"{stage.url}/v1/responses/input_tokens", json=body, trust_env=False)
    assert found.json()["object"] == "response.input_tokens"
    assert found.headers["x-sglcore-warnings"] == "ignored: personality"
    assert [each["content"] for each in script.rendered[-1]["messages"]] == ["a", "A", "b"]


@pytest.mark.parametrize(
    ("name", "fits", "over"),
    [
        ("metadata", {str(place): "" for place in range(16)}, {str(place): "" for place in range(17)}),
        ("metadata", {"k" * 64: "v" * 512}, {"k" * 65: ""}),
        ("metadata", {}, {"k": "v" * 513}),
        ("previous_response_id", "r" * 256, "r" * 257),
        ("previous_response_id", "r", ""),
        ("max_output_tokens", 1, 0),
        ("truncation", "auto", "off"),
    ],
)
def test_a_field_takes_as_much_as_its_limit_and_no_more(name: str, fits: Any, over: Any) -> None:
    asked(**{name: fits})
    with pytest.raises(ValidationError):
        asked(**{name: over})


def test_a_store_that_is_full_to_the_byte_keeps_all_and_what_is_dropped_makes_room() -> None:
    one = len(b'[{"id":"r0"},[],[]]')
    exact = ResponseStore(9, most_bytes=2 * one)
    for number in range(2):
        exact.put(Stored({"id": f"r{number}"}, [], []))
    assert len(exact) == 2
    exact.drop("r0", "id")
    exact.put(Stored({"id": "r2"}, [], []))
    assert len(exact) == 2
    exact.put(Stored({"id": "r3"}, [], []))
    assert len(exact) == 2 and exact.get("r3", "id").response == {"id": "r3"}
