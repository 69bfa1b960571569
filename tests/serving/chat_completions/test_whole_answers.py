"""Every field of every protocol's answers, whole and streamed: a client may read any of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from sglcore.config.server_config import ServerConfig
from tests.serving.scripted import Stage, staged
from tests.serving.whole_answers import ASKS, FOLDER, answer, cases, steady

CASES = [(protocol, name, script, body) for protocol in ASKS for name, script, body in cases(protocol)]


@cache
def written(protocol: str) -> dict[str, Any]:
    """The stored answers."""
    return json.loads((FOLDER / f"{protocol}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged(ServerConfig()) as stage:
        yield stage


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("protocol", "name", "script", "body"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_an_answer_is_in_each_field_what_clients_know(
    stage: Stage, protocol: str, name: str, script: dict[str, Any], body: dict[str, Any], streams: bool
) -> None:
    found = answer(stage, protocol, script, body, streams)
    remedy = "if the change is meant: python -m tests.serving.whole_answers, and read the difference"
    assert found == written(protocol)[name]["stream" if streams else "whole"], remedy


@pytest.mark.parametrize("protocol", ASKS)
def test_no_answer_is_kept_for_a_question_that_nobody_asks(protocol: str) -> None:
    assert set(written(protocol)) == {name for name, _, _ in cases(protocol)}


def test_ids_keep_who_they_name_and_times_do_not_count() -> None:
    first, second = "msg_0123456789abcdef", "msg_fedcba9876543210"
    found = steady({"id": first, "of": [second, first], "created": 1764000000, "total_duration": 5, "eval_count": 3})
    assert found == {
        "id": "msg_<0>",
        "of": ["msg_<1>", "msg_<0>"],
        "created": "<int of time>",
        "total_duration": "<int of time>",
        "eval_count": 3,
    }
    assert steady({"created": 0})["created"] == 0, "no time at all is a fault that shows"
