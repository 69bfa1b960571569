"""The input of a response: pages of its items, turns of the model, the places of refused parts, and
what a stream that is left or fails keeps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai.types.responses.response_item_list import ResponseItemList

from sglcore.config.server_config import ServerConfig
from sglcore.engine.tokenizers.chat_template import TextError
from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.responses.body import ResponsesRequest
from sglcore.serving.apis.responses.events import ResponseWriter
from sglcore.serving.apis.responses.items import input_items, page_of
from sglcore.serving.apis.responses.request import chat_request, response_request
from sglcore.serving.apis.responses.response_store import ResponseStore
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.chat.run import start_chat
from sglcore.serving.replicas.server_errors import InvalidRequest
from tests.serving.scripted import Script, ScriptedFrontend, Stage, content, staged
from tests.serving.stubs import Application, make_frontend

ITEMS = [{"id": f"msg_{place}"} for place in range(5)]
TEXT: Any = {"type": "input_text", "text": "a"}
IMAGE: Any = {"type": "input_image", "image_url": "x"}
USER: Any = {"role": "user", "content": [TEXT]}
CALL: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT: Any = {"type": "function_call_output", "call_id": "c", "output": "o"}
TOOL: Any = {"type": "function", "name": "f"}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged(ServerConfig(max_stored_responses=9)) as stage:
        yield stage


def asked(**given: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "a", **given})


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 2, 4, 5, 6])
@pytest.mark.parametrize("after", [None, 0, 2, 4])
def test_a_page_is_the_next_part_of_the_list(order: str, limit: int, after: int | None) -> None:
    ordered = ITEMS if order == "asc" else ITEMS[::-1]
    begin = 0 if after is None else ordered.index(ITEMS[after]) + 1
    wanted = ordered[begin : begin + limit]
    assert page_of(ITEMS, limit, order, None if after is None else ITEMS[after]["id"]) == {
        "object": "list",
        "data": wanted,
        "first_id": wanted[0]["id"] if wanted else None,
        "last_id": wanted[-1]["id"] if wanted else None,
        "has_more": bool(ordered[begin + limit :]),
    }


@pytest.mark.parametrize(("order", "status"), [("asc", 200), ("desc", 200), ("ascending", 400), ("xdesc", 400)])
def test_items_are_listed_in_one_of_two_orders(stage: Stage, order: str, status: int) -> None:
    stage.speak(content("A"))
    made = httpx.post(f"{stage.url}/v1/responses", json={"input": "a"}, trust_env=False).json()["id"]
    address = f"{stage.url}/v1/responses/{made}/input_items"
    found = httpx.get(address, params={"order": order}, trust_env=False)
    assert found.status_code == status and (status == 200 or found.json()["error"]["param"] == "order")


def test_listed_items_are_those_of_the_client_and_have_no_empty_fields() -> None:
    said = {"type": "output_text", "text": "b", "annotations": []}
    answer = {"type": "message", "role": "assistant", "content": [said], "phase": None}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": None}
    body = asked(input=[USER, answer, thought, {**CALL, "id": None}, OUTPUT, {**OUTPUT, "output": [TEXT]}])
    items = input_items(body.input or ())
    listed = ResponseItemList.model_validate(page_of(items, 9, "asc", None), strict=True)
    assert [item.type for item in listed.data] == [item["type"] for item in items]
    assert [item["id"].partition("_")[0] for item in items] == ["msg", "msg", "rs", "fc", "fco", "fco"]
    assert len({item["id"] for item in items}) == 6
    values = [value for item in items for part in (item, *parts_of(item)) for value in part.values()]
    assert None not in values


def parts_of(item: dict[str, Any]) -> list[dict[str, Any]]:
    parts = item.get("content", item.get("output"))
    return parts if isinstance(parts, list) else []


def test_a_response_that_was_deleted_is_told_as_openai_tells_it(stage: Stage) -> None:
    stage.speak(content("A"))
    made = httpx.post(f"{stage.url}/v1/responses", json={"input": "a"}, trust_env=False).json()["id"]
    gone = httpx.delete(f"{stage.url}/v1/responses/{made}", trust_env=False).json()
    assert gone == {"id": made, "object": "response", "deleted": True}


KINDS: dict[str, Any] = {
    "reasoning_content": {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
    "content": {"role": "assistant", "content": "a"},
    "tool_calls": CALL,
}
"""Items of the model, in the order in which one turn has them."""


@pytest.mark.parametrize(("first", "second"), list(product(KINDS, KINDS)))
def test_an_item_joins_the_turn_before_it_only_if_it_comes_after_all_of_its_parts(first: str, second: str) -> None:
    later = {**CALL, "call_id": "d"} if second == "tool_calls" else KINDS[second]
    found = chat_request(asked(input=[KINDS[first], later]), [], SamplingParams()).messages
    order = list(KINDS)
    is_joined = order.index(first) < order.index(second) or first == second == "tool_calls"
    assert len(found) == (1 if is_joined else 2)
    assert [set(each) - {"role"} for each in found] == ([{first, second}] if is_joined else [{first}, {second}])


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"input": [USER, {"role": "user", "content": [TEXT, IMAGE]}]}, "input[1].content[1]"),
        ({"input": [{"role": "system", "content": [TEXT, TEXT, IMAGE]}]}, "input[0].content[2]"),
        ({"input": [{"role": "assistant", "content": [TEXT, IMAGE]}]}, "input[0].content[1]"),
        ({"input": [USER, {"type": "reasoning", "content": [TEXT, IMAGE]}]}, "input[1].content[1]"),
        ({"input": [CALL, {**OUTPUT, "output": [TEXT, IMAGE]}]}, "input[1].output[1]"),
        ({"input": [CALL, {**OUTPUT, "call_id": "d"}]}, "input[1].call_id"),
        ({"input": [USER, USER, {"type": "computer_call"}]}, "input[2]"),
        ({"tools": [TOOL, TOOL, {"type": "web_search"}]}, "tools[2]"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"input": ""}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
    ],
)
def test_what_can_not_be_read_is_refused_at_its_place(given: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat_request(asked(**given), [], SamplingParams())
    assert refused.value.param == param


@pytest.mark.parametrize("kind", ["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"])
def test_a_part_of_each_kind_of_text_is_read_wherever_parts_are(kind: str) -> None:
    part = {"type": kind, "refusal" if kind == "refusal" else "text": "a"}
    items = [
        {"role": "user", "content": [part]},
        {"type": "reasoning", "summary": [part]},
        {"role": "assistant", "content": [part, part]},
        CALL,
        {**OUTPUT, "output": [part]},
    ]
    user, model, result = chat_request(asked(input=items), [], SamplingParams()).messages
    assert user["content"] == result["content"] == [{"type": "text", "text": "a"}]
    assert (model["reasoning_content"], model["content"]) == ("a", "aa")


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, "json_object"),
        ({"type": "json_schema", "schema": {"enum": ["Köln"]}}, "json_schema"),
    ],
)
def test_each_format_constrains_the_answer_by_its_own_grammar(form: Any, kind: str | None) -> None:
    grammar = response_request(asked(text={"format": form}), [], 0).params.grammar
    assert (None if grammar is None else grammar.kind) == kind
    assert kind != "json_schema" or (grammar is not None and grammar.text == '{"enum": ["Köln"]}')


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
def test_what_the_template_refuses_is_an_error_about_the_input(path: str) -> None:
    def render(*given: Any, **named: Any) -> Any:
        raise TextError("planted")

    frontend: Any = make_frontend()
    frontend.format = SimpleNamespace(render=render)
    error = Application(frontend).send("POST", path, {"input": "a"}).json()["error"]
    assert (error["message"], error["param"]) == ("planted", "input")


def test_a_response_that_fails_before_its_first_text_has_no_items(stage: Stage) -> None:
    stage.speak(reason="error", error="planted")
    answer = httpx.post(f"{stage.url}/v1/responses", json={"input": "a", "stream": True}, trust_env=False)
    sent = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [each["type"].partition(".")[2] for each in sent] == ["created", "in_progress", "failed"]
    assert sent[-1]["response"]["output"] == [] and "planted" in sent[-1]["response"]["error"]["message"]


@pytest.mark.parametrize("told", [1, 2])
def test_a_stream_that_its_client_leaves_stores_nothing_and_ends_at_once(told: int) -> None:
    frontend: Any = ScriptedFrontend(Script(says=[content("A"), content("B")]), ServerConfig())
    store, body = ResponseStore(9), asked(stream=True)

    async def play() -> None:
        writer = ResponseWriter(frontend, TokenTexts(frontend.codec), body, store)
        run = await start_chat(frontend, response_request(body, [], 0))
        async with run:
            events = writer.events(run)
            for _ in range(told):
                await anext(events)
            await events.aclose()

    asyncio.run(play())
    assert len(store) == 0
