"""Any request that our OpenAPI document allows, or nearly allows, is answered as the document
says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serving.servers import Server

CHAT = [{"role": "user", "content": "Tell me of a cat."}]
GOOD: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "/v1/completions": {"prompt": "Once upon", "max_tokens": 2},
        "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
        "/v1/responses": {"input": "Tell me of a cat.", "max_output_tokens": 16},
        "/v1/messages": {"messages": CHAT, "max_tokens": 2, "model": ""},
        "/api/chat": {"messages": CHAT, "options": {"num_predict": 2}},
        "/api/generate": {"prompt": "Once upon", "options": {"num_predict": 2}, "stream": False},
        "/tokenize": {"prompt": "Once"},
        "/detokenize": {"tokens": [5, 6]},
    }
)
"""A valid request of each kind."""
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n")
NASTY = (
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"{}",
    b"\xff\xfe{}",
    b'{"model": NaN}',
    b'{"model": 1e999}',
    b'{"max_tokens": 1' + b"0" * 400 + b"}",
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a\\u0000b", "max_tokens": 1}',
    b'{"a":' * 3000 + b"1" + b"}" * 3000,
    b"[" * 100_000,
    b'{"prompt": "a", "prompt": 5}',
    b'{"' + b"k" * 100_000 + b'": 1}',
)
"""Bodies that no document describes."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def document(server: Server) -> Any:
    """The server's OpenAPI document, read by schemathesis."""
    return schemathesis.openapi.from_dict(server.get("/openapi.json"))


def operations(document: Any) -> Iterator[Any]:
    """Every endpoint and method, except those that pause or abort requests of others."""
    for found in document.get_all_operations():
        if not found.ok().path.startswith(("/pause", "/abort_request")):
            yield found.ok()


def tried(strategy: Any, examples: int, check: Callable[[Any], None]) -> None:
    """Run `check` on examples of the strategy, the same ones in every run."""
    quiet = settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=tuple(HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    quiet(given(strategy)(check))()


def shortened(body: Any, path: str) -> Any:
    """The body, with limits on parameters that would make a long answer."""
    if not isinstance(body, dict):
        return body
    long = (name for name in LENGTHS if isinstance(body.get(name), int) and body[name] > 16)
    found = {**body, **dict.fromkeys(long, 16)}
    if isinstance(options := body.get("options", {}), dict) and path.startswith("/api/"):
        most = options.get("num_predict")
        found |= {"options": {**options, "num_predict": 16}} if most is None or isinstance(most, int) else {}
    return found


def check_answer(server: Server, case: Case, statuses: list[int] | None = None) -> None:
    """Send it and record the status; check that the document has this answer, and that an error has
    the schema of the endpoint's protocol."""
    case.body = shortened(case.body, case.path)
    answer = case.call(base_url=server.url, timeout=60)
    kind = answer.headers["content-type"][0].partition(";")[0]
    case.validate_response(answer, checks=CHECKS[:-1] if kind in STREAMS else CHECKS)
    if kind in STREAMS:
        STREAMS[kind](answer.content.decode())
    if answer.status_code >= 400:
        check_error(case.path, answer.content)
    if statuses is not None:
        statuses.append(answer.status_code)


def check_events(text: str) -> None:
    """Check that events are JSON or the end mark; the document says only that a stream is text."""
    assert text.endswith("\n\n")
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data and all(each == "[DONE]" or isinstance(json.loads(each), dict) for each in data)


def check_lines(text: str) -> None:
    """Check that lines are objects, and that the last one is the end or an error."""
    found = [json.loads(each) for each in text.splitlines()]
    assert text.endswith("\n") and (found[-1].get("done") or "error" in found[-1])
    assert not any(each["done"] for each in found[:-1])


STREAMS = MappingProxyType({"text/event-stream": check_events, "application/x-ndjson": check_lines})


def check_error(path: str, content: bytes) -> None:
    body = json.loads(content)
    if path.startswith("/v1/messages"):
        assert body["type"] == "error" and set(body["error"]) - {"details"} == {"type", "message"}, body
    elif path.startswith("/api/"):
        assert set(body) == {"error"} and isinstance(body["error"], str) and body["error"], body
        return
    else:
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    assert body["error"]["message"]


def test_what_the_document_allows_is_answered_as_it_says(server: Server, document: Any) -> None:
    for operation in operations(document):
        has_choice = operation.body or operation.path_parameters or operation.query
        tried(operation.as_strategy(), 4 if has_choice else 1, lambda case: check_answer(server, case))


def test_what_the_document_forbids_is_refused_in_the_errors_schema(server: Server, document: Any) -> None:
    for operation in operations(document):
        if operation.body:
            strategy = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
            tried(strategy, 4, lambda case: check_answer(server, case))


@pytest.mark.parametrize("path", list(GOOD))
def test_a_good_request_with_any_other_value_in_a_field_or_two(server: Server, document: Any, path: str) -> None:
    statuses: list[int] = []
    operation = document[path]["POST"]

    def check(drawn: tuple[Case, list[int]]) -> None:
        case, places = drawn
        body = case.body if isinstance(case.body, dict) else {}
        names = {sorted(body)[place % len(body)] for place in places if body}
        case.body = {**GOOD[path], **{name: body[name] for name in names}}
        check_answer(server, case, statuses)

    places = st.lists(st.integers(0, 99), min_size=1, max_size=2)
    tried(st.tuples(operation.as_strategy(), places), 12, check)
    assert 200 in statuses


@pytest.mark.parametrize("path", [*GOOD, "/v1/embeddings", "/v1/messages/count_tokens"])
def test_a_body_that_is_no_request_is_refused_in_the_errors_schema(server: Server, path: str) -> None:
    for body in NASTY:
        answer = server.client.post(path, content=body, headers={"content-type": "application/json"})
        asks_for_nothing = path.startswith("/api/") and b'"done_reason":"load"' in answer.content
        is_good = b'"prompt": "a' in body or asks_for_nothing
        assert answer.status_code == 400 or (answer.status_code == 200 and is_good), (body[:80], answer)
        if answer.status_code == 400:
            check_error(path, answer.content)


@pytest.mark.parametrize(
    "target", ["/", "/nowhere", "/v1/completions/", "//v1/models", "/v1/models/%00", "/v1/models/..%2f", "/%ff"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "OPTIONS", "TRACE", "NONSENSE"])
def test_any_method_at_any_path_is_answered(server: Server, method: str, target: str) -> None:
    answer = server.client.request(method, target)
    assert answer.status_code in (200, 400, 404, 405)
    if answer.status_code >= 400 and answer.content:
        check_error(target, answer.content)
