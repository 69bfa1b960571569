"""Schema keywords that grammars do not enforce are checked when an answer has ended: in every
protocol, whole and streamed. No answer fails, or waits for another's check."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.engine.structured_output.answer_check import LIMITS, AnswerChecks
from sglcore.engine.structured_output.killable_checks import CheckLimits, OnVerdict
from tests.serving.scripted import MODEL, Stage, call, staged

PATIENCE = 300.0
TAGS: dict[str, Any] = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}
EVIL: dict[str, Any] = {"type": "string", "not": {"pattern": "^(a+)+$"}}
ENDLESS = '"' + "a" * 40 + '!"'
BROKEN = " (the answer does not keep to it)"
LATE = "response_format (not checked in time)"
MESSAGES = [{"role": "user", "content": "Which tags?"}]
CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"


def form(schema: Any) -> dict[str, Any]:
    """The response format as in OpenAI's API."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


ENDPOINTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (CHAT, {"messages": MESSAGES, **form(TAGS)}, "response_format"),
    "completions": (TEXTS, {"prompt": "a", **form(TAGS)}, "response_format"),
    "responses": (
        "/v1/responses",
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": TAGS}}},
        "text.format.schema",
    ),
    "messages": (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": TAGS}}},
        "output_config.format.schema",
    ),
    "ollama chat": ("/api/chat", {"messages": MESSAGES, "format": TAGS}, "format"),
    "ollama text": ("/api/generate", {"prompt": "a", "format": TAGS}, "format"),
    "ollama raw text": ("/api/generate", {"prompt": "a", "raw": True, "format": TAGS}, "format"),
    "llama-server": ("/completion", {"prompt": "a", "json_schema": TAGS}, "json_schema"),
    "sglang": ("/generate", {"text": "a", "sampling_params": {"json_schema": TAGS}}, "sampling_params.json_schema"),
}


@pytest.fixture(scope="module")
def checks() -> AnswerChecks:
    return AnswerChecks(msgspec.structs.replace(LIMITS, seconds=0.2, young_seconds=PATIENCE, most_seconds=PATIENCE))


@pytest.fixture(scope="module")
def stage(checks: AnswerChecks) -> Iterator[Stage]:
    with staged(ServerConfig(), checks=checks) as stage:
        yield stage


def ask(stage: Stage, path: str, body: Any, *, streams: bool = False) -> tuple[str, list[Any]]:
    """The header of ignored fields, and every field `warnings` in the body or the events, in
    order."""
    own = {} if path == "/generate" else {"model": MODEL}
    answer = httpx.post(stage.url + path, json={**own, **body, "stream": streams}, trust_env=False, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()] if streams else [answer.text]
    values = [json.loads(line) for line in lines if line.startswith(("{", "[")) and line != "[DONE]"]
    header = answer.headers.get("x-sglcore-warnings", "")
    return header.removeprefix("ignored: "), list(told(values))


def told(value: Any) -> Iterator[Any]:
    """All values under the key `warnings`."""
    if isinstance(value, dict):
        yield from (each for name, each in value.items() if name == "warnings")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from told(each)


@pytest.mark.parametrize("name", ENDPOINTS)
def test_an_answer_that_does_not_keep_to_its_schema_is_named_in_the_header_and_beside_the_answer(
    stage: Stage, name: str
) -> None:
    path, body, field = ENDPOINTS[name]
    stage.speak('["a", ', '"a"]')
    part = f"{field}#/uniqueItems"
    assert ask(stage, path, body) == (part + BROKEN, [[part + BROKEN]])


@pytest.mark.parametrize("name", ENDPOINTS)
def test_a_stream_that_does_not_keep_to_its_schema_says_so_at_its_end(stage: Stage, name: str) -> None:
    path, body, field = ENDPOINTS[name]
    stage.speak('["a", ', '"a"]')
    part = f"{field}#/uniqueItems"
    assert ask(stage, path, body, streams=True) == (part, [[part + BROKEN]])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", ENDPOINTS)
def test_of_an_answer_that_keeps_to_its_schema_nothing_more_is_said(stage: Stage, name: str, streams: bool) -> None:
    path, body, field = ENDPOINTS[name]
    stage.speak('["a", ', '"b"]')
    assert ask(stage, path, body, streams=streams) == (f"{field}#/uniqueItems", [])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", ["chat", "completions"])
def test_fields_without_effect_stand_before_what_is_not_enforced(stage: Stage, name: str, streams: bool) -> None:
    path, body, field = ENDPOINTS[name]
    stage.speak('["a", ', '"b"]')
    told = f"store, user, {field}#/uniqueItems"
    assert ask(stage, path, {**body, "user": "u", "store": True}, streams=streams) == (told, [])


@pytest.mark.parametrize("ending", [{"reason": "length"}, {"stop_cause": "]"}])
@pytest.mark.parametrize("path", [CHAT, TEXTS])
def test_an_answer_that_was_cut_is_not_looked_at(stage: Stage, path: str, ending: dict[str, Any]) -> None:
    stage.speak('["a", "a"]', **ending)
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
    assert ask(stage, path, {**body, **form(TAGS)}) == ("response_format#/uniqueItems", [])


def test_each_choice_says_it_of_itself_and_the_header_of_all(stage: Stage) -> None:
    part = "response_format#/uniqueItems"
    for streams in (False, True):
        stage.converse(['["a"]'], ['["b", "b"]'])
        body = {"prompt": ["a", "b"], **form(TAGS)}
        assert ask(stage, TEXTS, body, streams=streams) == (part + ("" if streams else BROKEN), [[part + BROKEN]])
    stage.converse(['["a"]'], ['["b", "b"]'])
    answer = httpx.post(stage.url + TEXTS, json=body, trust_env=False, timeout=PATIENCE).json()
    assert ["warnings" in choice for choice in answer["choices"]] == [False, True]


def test_the_arguments_of_each_forced_call_are_looked_at(stage: Stage) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"properties": {"tags": TAGS}}}}
        for name in ("plain", "tag")
    ]
    parts = [f"tools[{place}]#/properties/tags/uniqueItems" for place in range(2)]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}
    stage.speak(*call("tag", '{"tags": ["a", ', '"a"]}'))
    assert ask(stage, CHAT, body) == (f"{parts[1]}{BROKEN}, {parts[0]}", [[parts[1] + BROKEN]])
    twice = [*call("tag", '{"tags": ["a", "a"]}'), *call("tag", '{"tags": ["b", "b"]}', index=1)]
    stage.speak(*twice)
    assert ask(stage, CHAT, body)[1] == [[parts[1] + BROKEN]]
    stage.speak(*call("plain", '{"tags": ["a"]}'), *call("tag", '{"tags": []}', index=1))
    assert ask(stage, CHAT, body) == (", ".join(parts), [])
    stage.speak(*call("tag", '{"tags": ["a", "a"]}'))
    assert ask(stage, CHAT, {**body, "tool_choice": "auto"}) == ("", [])


def test_values_inside_of_structural_tags_are_looked_at(stage: Stage) -> None:
    tag = {"begin": "<t>", "schema": TAGS, "end": "</t>"}
    body = {"prompt": "a", "response_format": {"type": "structural_tag", "structures": [tag], "triggers": ["<t"]}}
    part = "response_format#/uniqueItems"
    stage.speak('so <t>["a"]</t> and <t>["b", "b"]</t>')
    assert ask(stage, TEXTS, body) == (part + BROKEN, [[part + BROKEN]])


def test_the_values_of_each_structural_tag_are_held_to_its_own_schema(stage: Stage) -> None:
    tags = {"<t>": TAGS, "<u>": {"type": "array", "items": {"enum": ["a", "b"]}, "contains": {"const": "a"}}}
    structures = [{"begin": begin, "schema": schema, "end": "</>"} for begin, schema in tags.items()]
    body = {"prompt": "a", "response_format": {"type": "structural_tag", "structures": structures, "triggers": ["<"]}}
    unique, contains = "response_format#/uniqueItems", "response_format#/contains"
    stage.speak('<t>["b"]</> and <u>["b", "b"]</>')
    assert ask(stage, TEXTS, body) == (f"{contains}{BROKEN}, {unique}", [[contains + BROKEN]])
    stage.speak('<t>["b", "b"]</> and <u>["a", "a"]</>')
    assert ask(stage, TEXTS, body) == (f"{unique}{BROKEN}, {contains}", [[unique + BROKEN]])


class Noted(AnswerChecks):
    """Records for each call whether an event loop runs in its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.in_loop: list[bool] = []

    def _note(self) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.in_loop.append(False)
        else:
            self.in_loop.append(True)

    def open(self) -> None:
        self._note()
        super().open()

    def submit(self, work: Any, told: OnVerdict) -> None:
        self._note()
        super().submit(work, told)


def test_the_process_that_checks_is_started_and_asked_outside_of_the_event_loop() -> None:
    checks = Noted()
    with staged(ServerConfig(), checks=checks) as stage:
        stage.speak('["a", "a"]')
        assert ask(stage, TEXTS, {"prompt": "a", **form(TAGS)})[1]
    assert checks.in_loop == [False, False]


class Silent(AnswerChecks):
    """Takes questions and never answers."""

    def submit(self, work: Any, told: OnVerdict) -> None:
        """Take the question."""


def test_an_answer_waits_for_its_check_as_long_as_one_may_take_and_no_longer() -> None:
    checks = Silent(msgspec.structs.replace(LIMITS, most_seconds=0.2))
    with staged(ServerConfig(), checks=checks) as stage:
        stage.speak('["a", "a"]')
        begin = time.monotonic()
        assert ask(stage, TEXTS, {"prompt": "a", **form(TAGS)})[1] == [[LATE]]
        assert 0.2 <= time.monotonic() - begin < PATIENCE / 2


@pytest.mark.parametrize("text", ['["a"', "[" * 100_000, ""], ids=["broken off", "too deep", "empty"])
def test_an_answer_that_is_no_value_is_told_with_the_reason(stage: Stage, text: str) -> None:
    stage.speak(text)
    said = "response_format (not checked: the answer is no JSON)"
    assert ask(stage, TEXTS, {"prompt": "a", **form(TAGS)}) == (f"{said}, response_format#/uniqueItems", [[said]])


def test_a_check_that_takes_for_ever_is_ended_and_takes_its_time_only_once(stage: Stage) -> None:
    body = {"prompt": ["a", "b", "c"], **form(EVIL)}
    for streams in (False, True):
        stage.speak(ENDLESS)
        header = "response_format#/not" if streams else f"{LATE}, response_format#/not"
        assert ask(stage, TEXTS, body, streams=streams) == (header, [[LATE]])


def test_no_answer_waits_for_the_check_of_another_and_none_fails_with_the_process_that_checks() -> None:
    checks = AnswerChecks(CheckLimits(seconds=PATIENCE, most_seconds=PATIENCE, young_seconds=0.05))
    with staged(ServerConfig(), checks=checks) as stage, ThreadPoolExecutor(1) as pool:
        stage.speak(ENDLESS)
        endless = pool.submit(ask, stage, TEXTS, {"prompt": "a", **form(EVIL)})
        while checks._process is None or not checks._process._told:
            time.sleep(0.01)
        stage.speak('["a", "a"]')
        for body in ({"prompt": "a"}, {"prompt": "a", **form(TAGS)}):
            assert len(ask(stage, TEXTS, body)[1]) == (len(body) > 1)
        assert not endless.done()
        os.killpg(checks._process._process.pid, signal.SIGKILL)
        said = "response_format (not checked: the process that checks answers ended with code -9)"
        assert endless.result(PATIENCE) == (f"{said}, response_format#/not", [[said]])
        assert ask(stage, TEXTS, body)[0] == "response_format#/uniqueItems" + BROKEN


def test_a_request_whose_schema_is_enforced_wholly_starts_no_process() -> None:
    checks = AnswerChecks()
    with staged(ServerConfig(), checks=checks) as stage:
        stage.speak('["a", "a"]')
        for schema in ({"type": "array"}, {"type": "object", "properties": {"uniqueItems": {"type": "integer"}}}):
            assert ask(stage, TEXTS, {"prompt": "a", **form(schema)}) == ("", [])
        assert ask(stage, TEXTS, {"prompt": "a"}) == ("", [])
        assert checks._process is None


@pytest.mark.parametrize("streams", [False, True])
def test_without_the_library_the_header_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    checks = AnswerChecks()
    with staged(ServerConfig(), checks=checks) as stage:
        stage.speak('["a", "a"]')
        said = "response_format (not checked: pip install 'sglcore[schema-checks]'), response_format#/uniqueItems"
        assert ask(stage, CHAT, {"messages": MESSAGES, **form(TAGS)}, streams=streams) == (said, [])
        assert checks._process is None
