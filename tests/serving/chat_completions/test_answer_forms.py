"""The forms of all answers: JSON, events and headers, and how the OpenAPI document describes
them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai._streaming import SSEDecoder
from starlette.datastructures import MutableHeaders

from sglcore.engine.outputs import RequestOutput
from sglcore.serving.apis.answer import (
    CUT,
    MOST_WARNED,
    WARNINGS,
    WITH_BODY,
    Answer,
    ErrorAnswer,
    ErrorDetail,
    add_unknown,
    as_json,
    cut_of,
    documented,
    documented_errors,
    error_body,
    event,
    events_of,
    named_events,
    shown,
    warned,
)
from sglcore.serving.replicas.server_errors import Failure


def output(limit: int | None) -> RequestOutput:
    return RequestOutput("r", None, [5], [], max_tokens=limit)


@pytest.mark.parametrize(
    ("limits", "cut"), [((), None), ((None,), None), ((0,), 0), ((7, 0), 0), ((None, 7, 9), 7), ((9, None, 7), 7)]
)
def test_the_limit_of_the_context_is_the_smallest_of_those_that_were_set(limits: Any, cut: int | None) -> None:
    outputs = [output(limit) for limit in limits]
    assert cut_of(outputs) == cut
    assert warned((), outputs) == ({} if cut is None else {"x-sglcore-max-tokens": str(cut)})
    both = {} if cut is None else {CUT: str(cut)}
    assert warned(("b", "a"), outputs) == {"x-sglcore-warnings": "ignored: b, a", **both}
    assert dict(as_json({}, ("b", "a"), outputs).headers).items() >= warned(("b", "a"), outputs).items()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain_1", "plain_1"),
        ("ä", "\\xe4"),
        ("日", "\\u65e5"),
        ("😀", "\\U0001f600"),
        ("a\r\nb\x00", "a??b?"),
        ("\x7f", "?"),
        ("~ ", "~ "),
        ("x" * MOST_WARNED, "x" * 1000),
        ("x" * (MOST_WARNED + 1), "x" * 1000),
    ],
)
def test_a_name_is_shown_in_letters_that_a_header_may_have(name: str, text: str) -> None:
    assert shown([name]) == text
    headers = MutableHeaders({WARNINGS: "ignored: a"})
    add_unknown(headers, [name])
    assert headers[WARNINGS] == f"unknown: {text}; ignored: a"
    alone = MutableHeaders()
    add_unknown(alone, [name, "b"])
    assert alone[WARNINGS] == f"unknown: {shown([name, 'b'])}"


VALUES: tuple[Any, ...] = ("a\nb", "\u2028é😀", {"type": "x", "text": "data: a\r\n\r\n"}, [1, None, 0.5], 5)


@pytest.mark.parametrize("value", VALUES)
def test_an_event_is_what_a_client_reads_from_it(value: Any) -> None:
    first, second = SSEDecoder().iter_bytes(iter([event(value), event("next")]))
    assert (first.event, json.loads(first.data), json.loads(second.data)) == (None, value, "next")


def test_events_with_names_are_read_by_the_type_of_their_values() -> None:
    values = [{"type": "a.b", "text": "x\n"}, {"type": "c"}]
    found = list(SSEDecoder().iter_bytes(iter([named_events(values)])))
    assert [(each.event, json.loads(each.data)) for each in found] == [(each["type"], each) for each in values]
    assert named_events([]) == b""


class Small(Answer):
    """An answer with a field that may be left out."""

    first: int | None = None
    second: int | None = None


def test_an_answer_has_the_fields_that_were_set_though_they_are_null() -> None:
    assert json.loads(Small(first=None).json_bytes()) == {"first": None}
    made = as_json(Small(second=5))
    assert (made.status_code, made.body, made.headers["content-type"]) == (200, b'{"second":5}', "application/json")
    assert as_json({"a": "ä", "b": None}).body == '{"a":"ä","b":null}'.encode()
    assert as_json([1, 2]).body == b"[1,2]"


def test_an_error_has_its_four_facts_under_their_names() -> None:
    failure = Failure(404, "a message", "a_type", "a_param", "a_code")
    found = error_body(failure)
    assert found == {"error": {"message": "a message", "type": "a_type", "param": "a_param", "code": "a_code"}}
    assert ErrorAnswer.model_validate(found, strict=True).error == ErrorDetail(**found["error"])


@pytest.mark.parametrize("model", [None, Small])
@pytest.mark.parametrize("events", [None, "", "Chunk"])
@pytest.mark.parametrize("lines", [False, True])
def test_the_document_has_each_form_in_which_an_endpoint_answers(
    model: type[Answer] | None, events: str | None, lines: bool
) -> None:
    found = documented(model, said="words", events=events, lines=lines, form="array")
    success: Any = found.pop(200)
    assert success.get("model") == model and success["description"] == "words"
    kinds = {"application/json": model is None, "text/event-stream": events is not None, "application/x-ndjson": lines}
    assert success.get("content", {}).keys() == {kind for kind, has in kinds.items() if has}
    if model is None:
        assert success["content"]["application/json"] == {"schema": {"type": "array"}}
    if events is not None:
        assert success["content"]["text/event-stream"] == events_of(events)
    assert found == documented_errors(WITH_BODY)


def test_an_endpoint_without_words_or_other_forms_has_none_of_them() -> None:
    assert documented(Small, statuses=()) == {200: {"model": Small}}
    errors = documented(Small, statuses=(404, 507), error=Small)
    assert [(status, errors[status]["model"]) for status in (404, 507)] == [(404, Small), (507, Small)]
    assert "no such model" in errors[404]["description"].lower() and "disk" in errors[507]["description"]
    assert set(WITH_BODY) == {400, 401, 403, 404, 408, 413, 415, 429, 500, 503}


def test_events_have_data_and_may_have_a_name() -> None:
    for name in ("", "Chunk"):
        item = events_of(name)["itemSchema"]
        assert item["required"] == ["data"] and item["properties"]["event"] == {"type": "string"}
        schema = item["properties"]["data"].get("contentSchema")
        assert schema == ({"$ref": "#/components/schemas/Chunk"} if name else None)
        assert item["properties"]["data"]["type"] == "string"
