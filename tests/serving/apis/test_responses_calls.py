"""Outputs of calls that the model made together: they may come in one request or in several, in any
order, each matched to its own call."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.responses.body import ResponsesRequest
from sglcore.serving.apis.responses.request import chat_request
from sglcore.serving.replicas.server_errors import InvalidRequest

NAMES = ("one", "two", "three")


def messages(items: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The whole conversation after a request with these items, as the next request finds it."""
    body = ResponsesRequest.model_validate({"model": "m", "input": items})
    return [dict(each) for each in chat_request(body, earlier, SamplingParams()).messages]


def made(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function_call", "call_id": name, "name": "look", "arguments": "{}"} for name in names]


def output(name: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": f"of {name}"}


@pytest.mark.parametrize("order", list(permutations(NAMES)))
def test_outputs_of_parallel_calls_may_come_in_requests_of_their_own(order: tuple[str, ...]) -> None:
    said = {"role": "assistant", "content": "Wait."}
    talk = messages([{"role": "user", "content": "Q?"}, *made(*NAMES)], [])
    assert [call["id"] for call in talk[-1]["tool_calls"]] == list(NAMES)
    for name in order:
        talk = [*messages([output(name)], talk), said]
    told = [(each["tool_call_id"], each["content"]) for each in talk if each["role"] == "tool"]
    assert told == [(name, f"of {name}") for name in order]


def test_outputs_of_calls_of_two_turns_may_come_together() -> None:
    talk = messages([{"role": "user", "content": "Q?"}, *made("one")], [])
    talk = messages([{"role": "user", "content": "And?"}, *made("two")], talk)
    talk = messages([output("two"), output("one")], talk)
    assert [each["tool_call_id"] for each in talk if each["role"] == "tool"] == ["two", "one"]


@pytest.mark.parametrize("items", [[output("four")], [output("one"), output("four")], [output("five"), *made("five")]])
def test_the_output_of_a_call_that_nobody_made_is_refused(items: list[dict[str, Any]]) -> None:
    talk = messages([{"role": "user", "content": "Q?"}, *made(*NAMES)], [])
    with pytest.raises(InvalidRequest, match=r"found the output of a call 'f(our|ive)' that was not made before it"):
        messages(items, talk)
