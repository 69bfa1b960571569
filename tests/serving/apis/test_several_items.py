"""Responses with several items of a kind: each has its own events, and all of them are kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.engine.tokenizers.text_codec import TextCodec
from tests.serving.scripted import DEMO, Stage, call, content, reasoning, staged

TOOLS = [{"type": "function", "name": name} for name in "fg"]
SAID = [
    *(reasoning("Hm, "), reasoning("rain.")),
    *(content("A"), content("B")),
    *call("f", '{"a"', ":1}"),
    reasoning(" Or sun."),
    *(content("C"), content("D")),
    *call("g", "{}", index=1),
]
"""Two items of each kind."""
ITEMS = [("reasoning", "Hm, rain."), ("message", "AB"), ("function_call", '{"a":1}')]
ITEMS += [("reasoning", " Or sun."), ("message", "CD"), ("function_call", "{}")]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged(ServerConfig()) as stage:
        yield stage


def ask(stage: Stage, **body: Any) -> Any:
    answer = httpx.post(f"{stage.url}/v1/responses", json={"input": "a", "tools": TOOLS, **body}, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer


def events(stage: Stage, **body: Any) -> list[Any]:
    lines = ask(stage, stream=True, **body).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def text(item: Any) -> str:
    return item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]


def test_each_item_has_its_own_text_whole_and_in_its_events(stage: Stage) -> None:
    stage.speak(*SAID)
    whole = ask(stage, top_logprobs=0).json()
    assert [(item["type"], text(item)) for item in whole["output"]] == ITEMS
    assert len({item["id"] for item in whole["output"]}) == len(ITEMS)
    sent = events(stage, top_logprobs=0)
    assert [each["sequence_number"] for each in sent] == list(range(len(sent)))
    last = sent[-1]["response"]
    for index, (kind, said) in enumerate(ITEMS):
        own = [each for each in sent if each.get("output_index") == index]
        item = last["output"][index]
        assert {each.get("item_id", each.get("item", {}).get("id")) for each in own} == {item["id"]}
        assert "".join(each["delta"] for each in own if each["type"].endswith(".delta")) == said
        (done,) = [each for each in own if each["type"].endswith(("text.done", "arguments.done"))]
        assert done.get("text", done.get("arguments")) == said == text(item)
        assert (own[0]["type"], own[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        assert own[-1]["item"] == item and item["status"] == "completed"
        if kind == "message":
            scores = [found for each in own if each["type"].endswith(".delta") for found in each["logprobs"]]
            assert len(scores) == 2 and scores == done["logprobs"] == item["content"][0]["logprobs"]


def test_what_is_kept_of_an_answer_has_all_of_its_reasoning_text_and_calls(stage: Stage) -> None:
    stage.speak(*SAID)
    made = ask(stage).json()
    assert made["usage"]["output_tokens_details"]["reasoning_tokens"] == len(
        TextCodec(DEMO).encode("Hm, rain. Or sun.", special=False)
    )
    script = stage.speak(content("x"))
    ask(stage, previous_response_id=made["id"])
    _, said, _ = script.rendered[0]["messages"]
    assert (said["reasoning_content"], said["content"]) == ("Hm, rain. Or sun.", "ABCD")
    calls = [(each["id"], each["function"]["name"], each["function"]["arguments"]) for each in said["tool_calls"]]
    assert calls == [("call_f", "f", '{"a":1}'), ("call_g", "g", "{}")]


@pytest.mark.parametrize("tokens", [0, 1, 6, 7, 50])
def test_reasoning_is_counted_by_its_text_and_is_at_most_the_whole_answer(stage: Stage, tokens: int) -> None:
    thought = len(TextCodec(DEMO).encode("Hm, rain.", special=False))
    stage.speak(reasoning("Hm, rain."), content("A"), tokens=tokens)
    usage = ask(stage).json()["usage"]
    assert (usage["output_tokens"], usage["total_tokens"]) == (tokens, usage["input_tokens"] + tokens)
    assert usage["output_tokens_details"]["reasoning_tokens"] == min(thought, tokens)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("known", ["", "fp_run"])
def test_a_response_names_the_engine_that_ran_it_and_else_the_one_at_its_arrival(
    stage: Stage, known: str, stream: bool
) -> None:
    stage.speak(content("A"), fingerprint=known)
    if stream:
        found = {each["response"]["system_fingerprint"] for each in events(stage) if "response" in each}
    else:
        found = {ask(stage).json()["system_fingerprint"]}
    assert found == {known or "fp_0123456789ab"}


def test_instructions_are_of_one_response_and_the_conversation_before_them_is_kept(stage: Stage) -> None:
    stage.speak(content("A"))
    first = ask(stage, input="one", instructions="First.").json()["id"]
    second = ask(stage, input="two", instructions="Second.", previous_response_id=first).json()["id"]
    script = stage.speak(content("A"))
    ask(stage, input="three", previous_response_id=second)
    ask(stage, input="three", instructions="Third.", previous_response_id=second)
    talk = [("user", "one"), ("assistant", "A"), ("user", "two"), ("assistant", "A"), ("user", "three")]
    plain, told = ([(each["role"], each["content"]) for each in made["messages"]] for made in script.rendered)
    assert plain == talk and told == [("system", "Third."), *talk]


@pytest.mark.parametrize("place", range(1, len(SAID) + 1))
def test_of_an_answer_that_fails_all_items_before_the_last_are_complete(stage: Stage, place: int) -> None:
    stage.speak(*SAID[:place], reason="error", error="planted")
    last = events(stage)[-1]
    found = last["response"]["output"]
    assert last["type"] == "response.failed" and found
    assert [item["status"] for item in found] == [*["completed"] * (len(found) - 1), "incomplete"]
    assert [item["type"] for item in found] == [kind for kind, _ in ITEMS[: len(found)]]
