"""/v1/chat/completions: messages, streams, response formats, tools, reasoning."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any, cast

import jsonschema
import pytest

from sglcore.engine.outputs import TextDelta
from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.openai.answers import ChatAnswer, ChatChunk
from sglcore.serving.chat.parsers.delta import Delta
from sglcore.serving.chat.run import ChatRequest, ChatRun, collect_chat
from sglcore.serving.replicas.runs import Runs
from tests.serving.conftest import SCHEMA, TOOLS, Server
from tests.serving.servers import nearly
from tests.serving.stubs import StubGeneration

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Tell me a story about a seed."}]
GREEDY: Any = {"messages": MESSAGES, "temperature": 0.0, "max_tokens": 12}


class ScriptedParser:
    """A parser that reads a piece's text as the index of its deltas."""

    def __init__(self, says: list[list[Delta]]) -> None:
        self._says = says

    def push(self, text: str) -> list[Delta]:
        return self._says[int(text)]

    def finish(self) -> list[Delta]:
        return []


def chunks_of(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The parsed chunks of a stream that ends well, each checked against the OpenAPI document."""
    events = server.events(PATH, body)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    for chunk in chunks:
        ChatChunk.model_validate(chunk)
    return chunks


def deltas_of(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    choices = (choice for chunk in chunks for choice in chunk["choices"])
    return [choice["delta"] for choice in choices if choice["index"] == index]


def joined(deltas: list[dict[str, Any]], field: str = "content") -> str:
    return "".join(delta.get(field) or "" for delta in deltas)


def choice_of(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    return server.post(PATH, body)["choices"][0]


def test_an_answer_is_what_the_document_says(server: Server) -> None:
    answer = server.post(PATH, {**GREEDY, "logprobs": True, "top_logprobs": 2, "return_token_ids": True})
    ChatAnswer.model_validate(answer, strict=True)
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12 == len(choice["token_ids"])
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == choice["message"]["content"]
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    assert all(token["logprob"] == max(top["logprob"] for top in token["top_logprobs"]) for token in content)


def test_a_stream_begins_with_the_role_and_says_what_the_whole_answer_says(server: Server) -> None:
    body = {**GREEDY, "n": 2, "seed": 5, "temperature": 1.0, "max_tokens": 24}
    whole = server.post(PATH, body)
    chunks = chunks_of(server, {**body, "stream_options": {"include_usage": True}})
    for choice in whole["choices"]:
        deltas = deltas_of(chunks, choice["index"])
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all("role" not in delta for delta in deltas[1:])
        assert joined(deltas) == choice["message"]["content"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted((end["index"], end["seed_used"]) for end in ends) == [(0, 5), (1, 5)]


def test_every_chunk_has_the_usage_so_far_for_those_who_want_it(server: Server) -> None:
    wanted = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    chunks = chunks_of(server, {**GREEDY, "stream_options": wanted})
    made = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert made == sorted(made) and made[0] < 12 and made[-2:] == [12, 12]
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
    headers = server.send(PATH, {**GREEDY, "stream": True, "stream_options": wanted}).headers
    assert headers["x-sglcore-warnings"] == "ignored: stream_options.include_obfuscation"


def test_streamed_log_probabilities_are_those_of_the_whole_answer(server: Server) -> None:
    body = {**GREEDY, "logprobs": True, "top_logprobs": 1}
    whole = choice_of(server, body)["logprobs"]["content"]
    choices = [choice for chunk in chunks_of(server, body) for choice in chunk["choices"]]
    assert nearly([item for choice in choices if choice["logprobs"] for item in choice["logprobs"]["content"]], whole)


def test_without_a_limit_the_context_is_the_limit(server: Server) -> None:
    messages = [{"role": "user", "content": "word " * 970}]
    answer = server.post(PATH, {"messages": messages, "ignore_eos": True, "temperature": 0.0})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == server.get("/server_info")["max_model_len"]


def test_a_developer_is_a_system_and_parts_of_text_are_one_text(server: Server) -> None:
    plain = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello you"}]
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " you"}]
    other = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hello you"}]},
    ]
    found = {choice_of(server, {**GREEDY, "messages": messages})["message"]["content"] for messages in (plain, other)}
    assert len(found) == 1
    assert choice_of(server, {**GREEDY, "messages": [{"role": "user", "content": parts}]})["message"]["content"]


def test_an_answer_can_be_sent_back_as_it_is_and_continued(server: Server) -> None:
    first = choice_of(server, GREEDY)["message"]
    sent = {**first, "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    follow = choice_of(server, {**GREEDY, "messages": [*MESSAGES, sent, {"role": "user", "content": "And then?"}]})
    assert follow["message"]["content"]
    more = choice_of(server, {**GREEDY, "messages": [*MESSAGES, first], "continue_final_message": True})
    longer = choice_of(server, {**GREEDY, "max_tokens": 24})["message"]["content"]
    assert longer.startswith(first["content"] + more["message"]["content"][:8])


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_binds_the_answer(server: Server, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    body = {"messages": MESSAGES, "response_format": form, "seed": 3, "max_tokens": 200}
    text = joined(deltas_of(chunks_of(server, body))) if stream else choice_of(server, body)["message"]["content"]
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
    ],
)
def test_a_schema_binds_the_answer_by_the_names_of_llama_server(server: Server, form: dict[str, Any]) -> None:
    text = choice_of(server, {"messages": MESSAGES, "seed": 3, "max_tokens": 200, **form})["message"]["content"]
    jsonschema.validate(json.loads(text), SCHEMA)


LOOSE = {"type": "object", "properties": {"path": {"type": "string", "format": "path", "maxLength": 8}}}
TEXT = {"format": {"type": "json_schema", "name": "a", "schema": LOOSE}}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (PATH, {"response_format": {"type": "json_schema", "json_schema": {"schema": LOOSE}}}, "response_format"),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": LOOSE}}},
            "output_config.format.schema",
        ),
        ("/v1/responses", {"text": TEXT}, "text.format.schema"),
    ],
)
def test_what_of_a_schema_is_not_enforced_is_named_in_every_protocol(
    server: Server, path: str, body: dict[str, Any], named: str
) -> None:
    given = (
        {"input": "a", "max_output_tokens": 40} if path == "/v1/responses" else {"messages": MESSAGES, "max_tokens": 40}
    )
    answer = server.send(path, {"model": "sglcore-demo", **given, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-sglcore-warnings"] == f"ignored: {named}#/properties/path/format 'path'"


def test_what_of_a_forced_calls_parameters_is_not_enforced_is_named(tool_server: Server) -> None:
    tool = {"type": "function", "function": {"name": "open", "parameters": {**LOOSE, "required": ["path"]}}}
    body = {"messages": MESSAGES, "tools": [tool], "max_tokens": 60, "tool_choice": "required"}
    answer = tool_server.send(PATH, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-sglcore-warnings"] == "ignored: tools[0]#/properties/path/format 'path'"
    assert "x-sglcore-warnings" not in tool_server.send(PATH, {**body, "tool_choice": "auto"}).headers


def test_text_is_a_form_that_binds_nothing(server: Server) -> None:
    bound = choice_of(server, {**GREEDY, "response_format": {"type": "text"}})
    assert bound["message"] == choice_of(server, GREEDY)["message"]


def test_a_checkpoint_without_tools_says_why_they_are_off(server: Server) -> None:
    error = server.refusal(PATH, {**GREEDY, "tools": TOOLS})
    reason = server.get("/server_info")["tool_reason"]
    assert reason and reason in error["message"]
    assert choice_of(server, {**GREEDY, "tools": TOOLS, "tool_choice": "none"})["message"]["content"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "time"}), ({"type": "function", "function": {"name": "weather"}}, {"weather"})],
)
def test_a_call_that_must_come_comes(tool_server: Server, choice: Any, names: set[str]) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": 3, "max_tokens": 200}
    found = choice_of(tool_server, body)
    assert found["finish_reason"] == "tool_calls"
    calls = found["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} <= names
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "weather":
            jsonschema.validate(arguments, SCHEMA)


def test_streamed_calls_keep_their_index_and_join_to_the_whole_ones(tool_server: Server) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "seed": 8, "max_tokens": 200}
    whole = choice_of(tool_server, body)["message"]["tool_calls"]
    chunks = chunks_of(tool_server, body)
    parts = [part for delta in deltas_of(chunks) for part in delta.get("tool_calls", ())]
    indices = [part["index"] for part in parts]
    assert indices == sorted(indices) and set(indices) == set(range(len(whole)))
    for place, call in enumerate(whole):
        own = [part for part in parts if part["index"] == place]
        assert own[0]["id"] and own[0]["type"] == "function"
        assert own[0]["function"] == {"name": call["function"]["name"], "arguments": ""}
        assert all("id" not in part and "name" not in part["function"] for part in own[1:])
        assert "".join(part["function"]["arguments"] for part in own) == call["function"]["arguments"]
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-1] == "tool_calls"


def test_without_parallel_calls_the_first_one_stands_alone() -> None:
    says = [
        [Delta("content", "so: "), Delta("tool_start", index=0, name="time", call_id="a")],
        [Delta("tool_arguments", "{}", 0), Delta("tool_start", index=1, name="weather", call_id="b")],
        [Delta("tool_arguments", "{}", 1)],
    ]
    calls: dict[bool, list[str]] = {}
    for parallel in (True, False):
        pieces = [TextDelta("r", 0, str(place), (place,), "stop" if place == 2 else None) for place in range(3)]
        request = ChatRequest(messages=[], params=SamplingParams(), parallel_tool_calls=parallel)
        runs = Runs([cast(Any, StubGeneration(pieces))], AsyncExitStack())
        run = ChatRun(runs, request, [ScriptedParser(says)])
        message = asyncio.run(collect_chat(run))[0]
        calls[parallel] = [call.name for call in message.tool_calls]
        assert (message.content, message.finish_reason) == ("so: ", "tool_calls")
    assert calls == {True: ["time", "weather"], False: ["time"]}


def test_ids_of_tokens_whose_text_is_held_back_stand_with_the_next_text() -> None:
    says = [[], [], [Delta("content", "<tool box")], []]
    pieces = [TextDelta("r", 0, str(place), (place,), "stop" if place == 3 else None) for place in range(4)]
    runs = Runs([cast(Any, StubGeneration(pieces))], AsyncExitStack())
    run = ChatRun(runs, ChatRequest(messages=[], params=SamplingParams()), [ScriptedParser(says)])

    async def ids() -> list[tuple[int, ...]]:
        return [event.token_ids async for event in run]

    assert asyncio.run(ids()) == [(0, 1, 2), (3,)]


def test_a_conversation_with_calls_and_their_results_can_go_on(tool_server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    answer = tool_server.post(PATH, {**GREEDY, "messages": messages, "tools": TOOLS})
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    shown = tool_server.post("/tokenize", {"messages": messages, "tools": TOOLS})
    assert answer["usage"]["prompt_tokens"] == shown["count"]


def test_what_is_thought_is_no_content(tool_server: Server) -> None:
    body = {**GREEDY, "chat_template_kwargs": {"enable_thinking": True}}
    found = choice_of(tool_server, body)["message"]
    assert found["reasoning_content"] and not found["content"]
    deltas = deltas_of(chunks_of(tool_server, body))
    assert joined(deltas, "reasoning_content") == found["reasoning_content"] and joined(deltas) == ""
    assert "reasoning_content" not in choice_of(tool_server, GREEDY)["message"]


FORM = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
THINKS: Any = {"messages": MESSAGES, "max_tokens": 200, "chat_template_kwargs": {"enable_thinking": True}}


@pytest.mark.parametrize("seed", [1, 2])
def test_a_bound_answer_comes_after_what_is_thought_which_has_a_budget(tool_server: Server, seed: int) -> None:
    body = {**THINKS, "response_format": FORM, "thinking_token_budget": 12, "seed": seed, "return_token_ids": True}
    found = choice_of(tool_server, body)
    jsonschema.validate(json.loads(found["message"]["content"]), SCHEMA)
    assert found["message"]["reasoning_content"] and found["finish_reason"] == "stop"
    chunks = chunks_of(tool_server, body)
    assert joined(deltas_of(chunks)) == found["message"]["content"]
    at_once = choice_of(tool_server, {**body, "thinking_token_budget": 0})["message"]
    assert "reasoning_content" not in at_once and json.loads(at_once["content"])


def test_a_budget_of_thinking_holds_without_a_form_and_is_told_where_there_is_no_thinking(
    tool_server: Server, server: Server
) -> None:
    found = choice_of(tool_server, {**THINKS, "temperature": 0.0, "max_tokens": 60, "thinking_token_budget": 8})
    assert found["message"]["reasoning_content"] and found["message"]["content"]
    given = {**GREEDY, "thinking_token_budget": 8}
    assert server.send(PATH, given).headers["x-sglcore-warnings"] == "ignored: thinking_token_budget"


def test_with_tools_and_a_form_the_answer_is_a_call_or_what_the_form_wants(tool_server: Server) -> None:
    wanted = {"messages": MESSAGES, "max_tokens": 200, "tools": TOOLS, "response_format": FORM}
    for seed in range(4):
        found = choice_of(tool_server, {**wanted, "seed": seed})
        calls = found["message"].get("tool_calls") or ()
        for call in calls:
            assert (
                call["function"]["name"] in {"weather", "time"}
                and json.loads(call["function"]["arguments"]) is not None
            )
        if not calls:
            jsonschema.validate(json.loads(found["message"]["content"]), SCHEMA)
    forced = choice_of(tool_server, {**wanted, "tool_choice": "required", "seed": 3})
    assert forced["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("most", [0, 2])
def test_a_chats_prompt_is_scored_with_so_many_alternatives(server: Server, most: int) -> None:
    answer = server.post(PATH, {**GREEDY, "max_tokens": 1, "prompt_logprobs": most, "return_token_ids": True})
    ids, scores = answer["prompt_token_ids"], answer["prompt_logprobs"]
    assert scores[0] is None and len(scores) == len(ids)
    for token, found in zip(ids[1:], scores[1:], strict=True):
        assert str(token) in found and len(found) in (max(most, 1), most + 1)


def test_what_the_template_does_not_read_is_told(server: Server, tool_server: Server) -> None:
    given = {**GREEDY, "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "mood": "gay"}}
    names = "chat_template_kwargs.enable_thinking, chat_template_kwargs.mood, reasoning_effort"
    assert server.send(PATH, given).headers["x-sglcore-warnings"] == f"ignored: {names}"
    header = tool_server.send(PATH, given).headers["x-sglcore-warnings"]
    assert "mood" in header and "enable_thinking" not in header


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "robot"),
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages[0]", "content, which"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "image_url",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]", "text"),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, "messages", "the context holds 1024"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs true"),
        ({"logprobs": True, "top_logprobs": 30}, "top_logprobs", "at most 20"),
        ({"max_completion_tokens": 7}, "max_completion_tokens", "differ"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"modalities": ["audio"]}, "modalities[0]", "audio"),
        ({"functions": [{}]}, "functions", "use tools"),
        ({"n_predict": 3}, "n_predict", "use max_tokens"),
        ({"use_beam_search": True}, "use_beam_search", "its own seed"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    ],
)
def test_what_can_not_be_run_is_refused_by_its_name(
    server: Server, change: dict[str, Any], param: str, said: str
) -> None:
    error = server.refusal(PATH, {**GREEDY, **change})
    assert error["param"] == param and said in error["message"], error


UNENFORCED: Any = {
    "tools": [
        TOOLS[1],
        {
            "type": "function",
            "function": {"name": "cook", "parameters": {"properties": {"pan": {"$ref": "https://example.org/pan"}}}},
        },
    ],
    "tool_choice": "required",
}


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "cook"}}}, "tool_choice", "cook"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "text that matches"),
        (UNENFORCED, "tools", 'the parameters of "cook" cannot be enforced'),
    ],
)
def test_tools_that_can_not_be_offered_are_refused_by_name(
    tool_server: Server, change: dict[str, Any], param: str, said: str
) -> None:
    error = tool_server.refusal(PATH, {**GREEDY, "tools": TOOLS, **change})
    assert error["param"] == param and said in error["message"], error
