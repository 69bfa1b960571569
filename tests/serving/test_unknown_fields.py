"""Unknown fields break no client; fields with a meaning in other servers are refused by name."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from sglcore.engine.outputs import TextDelta
from sglcore.serving.apis.unknown import NEUTRAL, REASONS
from sglcore.serving.chat.chat_frontend import ChatFrontend
from tests.serving.stubs import call, gives, make_frontend

MESSAGE = {"role": "user", "content": "a", "mood": "gay"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [MESSAGE, MESSAGE]},
    "/v1/messages": {"messages": [MESSAGE, MESSAGE], "max_tokens": 5},
    "/v1/responses": {"input": [MESSAGE, MESSAGE]},
}


def speaks(*, strict: bool = False) -> ChatFrontend:
    frontend = make_frontend(gives(TextDelta("r", 0, "fine", (5,), "stop")))
    frontend.config = replace(frontend.config, strict_fields=strict)
    return frontend


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_what_nobody_knows_is_told_in_a_header_a_counter_and_the_log(
    path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    frontend, body = speaks(), {**BODIES[path], "temprature": 1, "user_profile\x00": 2, "stream": stream}
    with caplog.at_level(logging.INFO, "sglcore.serving"):
        answer = call(frontend, "POST", path, body)
    listed = next((name for name in ("messages", "input") if name in body), None)
    names = ["temprature", "user_profile?", *([f"{listed}[0].mood"] if listed else [])]
    assert answer.status_code == 200 and "fine" in answer.text
    assert answer.headers["x-sglcore-warnings"] == f"unknown: {', '.join(names)}"
    assert f'sglcore_unknown_fields_total{{endpoint="{path}"}} {len(names)}.0' in frontend.metrics.page().decode()
    assert [record.message for record in caplog.records] == [f"id=- {path} has unknown fields: {', '.join(names)}"]


def test_unknown_fields_stand_before_those_without_effect_and_reach_no_template() -> None:
    body = {**BODIES["/v1/chat/completions"], "user": "u"}
    assert (
        call(speaks(), "POST", "/v1/chat/completions", body).headers["x-sglcore-warnings"]
        == "unknown: messages[0].mood; ignored: user"
    )
    plain = {"messages": [{"role": "user", "content": "a"}]}
    counts = [call(speaks(), "POST", "/tokenize", {"messages": found["messages"]}).json() for found in (body, plain)]
    assert counts[0]["count"] > counts[1]["count"] and "gay" not in str(counts)


@pytest.mark.parametrize("path", BODIES)
def test_strict_fields_refuses_them_with_the_name_that_was_meant(path: str) -> None:
    frontend = speaks(strict=True)
    known = {**BODIES[path], **({"messages": [{"role": "user", "content": "a"}]} if "messages" in BODIES[path] else {})}
    known |= {"input": "a"} if "input" in known else {}
    assert call(frontend, "POST", path, known).status_code == 200
    refused = call(frontend, "POST", path, {**known, "temprature": 1})
    assert refused.status_code == 400 and "temprature; did you mean temperature?" in refused.text
    far = call(frontend, "POST", path, {**known, "mood": 1})
    assert "unknown field mood; leave it out" in far.text


@pytest.mark.parametrize(
    ("path", "field", "value", "said"),
    [
        ("/v1/completions", "n_predict", 3, "use max_tokens"),
        ("/v1/completions", "messages", [MESSAGE], "use prompt"),
        ("/v1/chat/completions", "max_output_tokens", 3, "use max_tokens"),
        ("/v1/chat/completions", "enable_thinking", True, "use chat_template_kwargs"),
        ("/v1/responses", "grammar", "root ::= x", "would change the text"),
        ("/v1/messages", "stop", ["a"], "use stop_sequences"),
        ("/v1/responses", "max_tokens", 3, "use max_output_tokens"),
        ("/v1/responses", "response_format", {"type": "json_object"}, "use text"),
        ("/v1/responses", "stop_token_ids", [5], "would change the text"),
        ("/v1/chat/completions", "typical_p", 0.5, "would change the text"),
        ("/v1/chat/completions", "use_beam_search", True, REASONS["use_beam_search"]),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_what_would_change_the_text_elsewhere_is_refused(
    path: str, field: str, value: Any, said: str, strict: bool
) -> None:
    answer = call(speaks(strict=strict), "POST", path, {**BODIES[path], field: value})
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
    assert answer.json()["error"].get("param", field) == field


@pytest.mark.parametrize("path", BODIES)
def test_values_that_change_nothing_are_let_through(path: str) -> None:
    neutral = {name: value for name, value in NEUTRAL.items() if name != "tool_choice"} | {"mirostat": 0, "lora": []}
    answer = call(speaks(), "POST", path, {**BODIES[path], **neutral})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("field", "off", "on"),
    [
        ("num_beams", 1, 4),
        ("beam_width", 1, 2),
        ("length_penalty", 1.0, 0.6),
        ("typical_p", 1.0, 0.9),
        ("tfs_z", 1, 0.95),
        ("top_n_sigma", -1, 1.5),
        ("repeat_last_n", -1, 64),
        ("adaptive_target", -1.0, 0.4),
        ("mirostat", 0, 2),
    ],
)
def test_what_is_lacking_is_let_through_where_it_is_off_and_nowhere_else(field: str, off: Any, on: Any) -> None:
    statuses = [
        call(speaks(), "POST", "/v1/completions", {"prompt": "a", field: value}).status_code
        for value in (off, None, on)
    ]
    assert statuses == [200, 200, 400]


@pytest.mark.parametrize(
    ("field", "off", "on"),
    [("temperature", 1.0, 0.5), ("use_beam_search", False, True), ("lora_path", None, "a"), ("image_data", [], ["a"])],
)
def test_beside_the_object_that_has_the_sampling_it_is_the_same(field: str, off: Any, on: Any) -> None:
    kept, refused = (call(speaks(), "POST", "/generate", {"text": "a", field: value}) for value in (off, on))
    assert kept.status_code == 200, kept.text
    assert refused.status_code == 400 and refused.json()["error"]["param"] == field, refused.text


def test_so_many_unknown_fields_are_named_and_no_more() -> None:
    body = {**BODIES["/v1/completions"], **{f"field_{place}": 1 for place in range(5000)}}
    answer = call(speaks(), "POST", "/v1/completions", body)
    assert answer.status_code == 200 and len(answer.headers["x-sglcore-warnings"]) < 1100
