"""Every error has OpenAI's schema, names its subject, and reveals no internals."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from jsonschema import Draft202012Validator

from sglcore.engine.outputs import TextDelta
from sglcore.schedule.request_errors import ContextError, RequestError
from sglcore.serving.apis.answer import ErrorAnswer
from sglcore.serving.http.http_app import make_app
from sglcore.serving.replicas.metrics.health import Health
from sglcore.serving.replicas.server_errors import EngineDied, Overloaded, failure, told
from tests.serving.conftest import Server
from tests.serving.stubs import Generate, StubGeneration, call, gives, make_frontend, raises

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/embeddings": {"input": "a"},
}
GENERATING = tuple(BODIES)[:2]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    ErrorAnswer.model_validate(answer.json(), strict=True)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.json()["error"]


def data_of(answer: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line]


@pytest.mark.parametrize(
    ("content", "kind", "status", "said"),
    [
        (b"", "application/json", 400, "empty"),
        (b"{", "application/json", 400, "not JSON"),
        (b'{"prompt": "a"} x', "application/json", 400, "not JSON"),
        (b'{"prompt": NaN}', "application/json", 400, "not JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "application/json", 400, "not JSON"),
        (b'{"prompt": "\\ud800 alone"}', "application/json", 400, "not JSON"),
        (b'{"prompt": "\xff"}', "application/json", 400, "not JSON"),
        (b'{"prompt": ' + b"[" * 100_000, "application/json", 400, "nests too deep"),
        (b"[]", "application/json", 400, "an object"),
        (b'"text"', "application/json", 400, "an object"),
        (b"null", "application/json", 400, "an object"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "application/json", 400, ""),
        (b'{"prompt": "a"}', "text/plain", 415, "application/json"),
        (b"prompt=a", "application/x-www-form-urlencoded", 415, "application/json"),
    ],
)
def test_a_body_that_is_no_request_is_refused(
    server: Server, content: bytes, kind: str, status: int, said: str
) -> None:
    for path in BODIES:
        answer = server.client.post(path, content=content, headers={"content-type": kind})
        assert said in error_of(answer, status)["message"], answer.text


@pytest.mark.parametrize(
    ("path", "change", "param", "said"),
    [
        ("/v1/chat/completions", {"messages": None}, "messages", "found null; wanted a list"),
        ("/v1/chat/completions", {"messages": []}, "messages", "at least 1 of them"),
        ("/v1/chat/completions", {"stream": "yes"}, "stream", 'found "yes"; wanted true or false'),
        ("/v1/chat/completions", {"top_p": True}, "top_p", "found true; wanted a number"),
        ("/v1/chat/completions", {"temperature": -1}, "temperature", "wanted at least 0"),
        ("/v1/chat/completions", {"stop": ["a"] * 65}, "stop", "wanted text or at most 64 of them"),
        ("/v1/chat/completions", {"logit_bias": {"1": None}}, "logit_bias.1", "found null; wanted a number"),
        ("/v1/chat/completions", {"response_format": {"type": "x"}}, "response_format.type", 'wanted "text", "json'),
        ("/v1/chat/completions", {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "sets messages"),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt", 'found {"a":1}; wanted text'),
        (
            "/v1/responses",
            {"input": [{"role": "tool", "content": "x"}]},
            "input[0].role",
            'found "tool"; wanted "user"',
        ),
        ("/v1/responses", {"min_tokens": 5, "max_output_tokens": 3}, "min_tokens", "or raise max_output_tokens"),
        ("/v1/responses", {"tools": [{"type": "function", "name": "f"}]}, "tools", "tools are off"),
    ],
)
def test_an_error_has_the_words_of_json_and_names_a_field_of_its_protocol(
    server: Server, path: str, change: dict[str, Any], param: str, said: str
) -> None:
    body = BODIES.get(path, {"input": "a"})
    error = error_of(server.send(path, {**body, **change}), 400)
    assert error["param"] == param and said in error["message"], error
    assert not {"None", "True", "False", "List", "dictionary"} & set(error["message"].split())


def test_the_list_of_models_has_no_empty_name(server: Server) -> None:
    assert server.get("/v1/models/") == server.get("/v1/models")


def test_a_null_byte_is_text(server: Server) -> None:
    assert server.post("/v1/completions", {"prompt": "a\x00b", "max_tokens": 1})["choices"]


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_model_is_not_found_and_the_known_ones_are_named(server: Server, path: str) -> None:
    error = error_of(server.send(path, {**BODIES[path], "model": "gpt\x00"}), 404)
    assert error["param"] == "model" and error["code"] == "model_not_found"
    assert server.get("/v1/models")["data"][0]["id"] in error["message"]


TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
NAMING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": TALK,
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {**TALK, "max_tokens": 2},
    "/v1/messages/count_tokens": TALK,
    "/completion": {"prompt": "a"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/embeddings": {"input": "a"},
    "/v1/classify": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/api/chat": TALK,
    "/api/generate": {"prompt": "a"},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/api/show": {},
}
"""A request to each endpoint with a body that may name a model."""


def test_no_endpoint_that_is_told_a_model_answers_for_another() -> None:
    frontend = make_frontend(gives(TextDelta("r", 0, "fine", (5,), "stop")))
    frontend.codec.tokenizer.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    app, asked = make_app(frontend), set[str]()
    schemas = app.openapi()["components"]["schemas"]

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            for path, operations in app.openapi()["paths"].items():
                sent = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
                body = sent.get("schema", {}).get("$ref", "").rpartition("/")[2]
                if "model" in schemas.get(body, {}).get("properties", {}):
                    known = next(each for each in (path, f"/v1{path}", path.replace("/v2/", "/v1/")) if each in NAMING)
                    answer = await client.post(path, json={**NAMING[known], "model": "another"})
                    assert answer.status_code == 404 and "another" in answer.text, (path, answer.text)
                    asked.add(known)

    asyncio.run(ask())
    assert asked == set(NAMING)


def test_the_model_may_be_left_empty(server: Server) -> None:
    for name in ("", None, server.get("/v1/models")["data"][0]["id"]):
        assert server.post("/v1/completions", {**BODIES["/v1/completions"], "model": name})["choices"]


def test_unknown_paths_and_methods_are_errors_like_all_others(server: Server) -> None:
    assert error_of(server.client.get("/v2/nothing"), 404)["code"] == "not_found"
    wrong = server.client.get("/v1/completions")
    assert error_of(wrong, 405)["code"] == "method_not_allowed" and wrong.headers["allow"] == "POST"
    assert server.client.put("/v1/responses/resp_1").headers["allow"] == "DELETE, GET"
    assert server.client.post("/").headers["allow"] == "GET, HEAD"
    assert error_of(server.client.get("/v1/models/none"), 404)["code"] == "model_not_found"


def test_before_the_model_is_there_the_phase_is_told_and_nothing_is_run() -> None:
    health = Health()
    health.begin("loading weights", 3, 12)
    frontend = make_frontend(raises(AssertionError("nothing may run")), health=health)
    for path, body in BODIES.items():
        answer = call(frontend, "POST", path, body)
        error = error_of(answer, 503)
        assert "loading weights" in error["message"] and int(answer.headers["retry-after"]) >= 1
    for path, status in (("/livez", 200), ("/readyz", 503), ("/startupz", 503), ("/health", 503)):
        answer = call(frontend, "GET", path)
        assert answer.status_code == status
        told_of = answer.json()
        assert (told_of["phase"], told_of["done"], told_of["total"]) == ("loading weights", 3, 12)
        assert told_of["elapsed_s"] >= 0
    assert call(frontend, "POST", "/tokenize", {"prompt": "Hello"}).json()["count"] > 0
    info = call(frontend, "GET", "/server_info").json()
    assert info["phase"] == "loading weights" and info["device"] is None and info["served_model_names"] == ["demo"]
    assert call(frontend, "GET", "/v1/models").json()["data"][0]["max_model_len"] is None


def test_a_server_that_drains_has_started_but_is_not_ready() -> None:
    health = Health()
    health.become_ready()
    health.drain()
    frontend = make_frontend(health=health)
    found = {path: call(frontend, "GET", path).status_code for path in ("/livez", "/readyz", "/startupz")}
    assert found == {"/livez": 200, "/readyz": 503, "/startupz": 200}


def test_what_has_begun_to_end_does_not_go_back_and_a_start_takes_its_time_once() -> None:
    health = Health()
    health.become_ready()
    began = health.snapshot()
    time.sleep(0.002)
    assert health.snapshot() == began
    health.drain()
    health.begin("restarting")
    health.become_ready()
    assert health.phase == "draining" and not health.ready
    health.die("its device is gone")
    health.drain()
    assert not health.live and health.snapshot()["reason"] == "its device is gone"


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [False, True])
def test_too_much_to_do_is_told_with_a_time(path: str, stream: bool) -> None:
    frontend = make_frontend(raises(Overloaded("too many wait", retry_after=3.2)))
    answer = call(frontend, "POST", path, {**BODIES[path], "stream": stream})
    assert error_of(answer, 429)["code"] == "overloaded" and answer.headers["retry-after"] == "4"


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_before_the_first_output_has_its_status(path: str, stream: bool) -> None:
    generation = StubGeneration([], EngineDied("the engine process ended", "ask again"))

    async def generate(*given: Any, **named: Any) -> StubGeneration:
        return generation

    answer = call(make_frontend(generate), "POST", path, {**BODIES[path], "stream": stream})
    assert error_of(answer, 503)["code"] == "engine_died"
    assert generation.aborted


@pytest.mark.parametrize("path", GENERATING)
def test_what_fails_in_a_stream_is_its_last_event(path: str) -> None:
    frontend = make_frontend(
        gives(TextDelta("r", 0, "begun", (5,)), fault=EngineDied("the engine process ended", "ask again"))
    )
    events = data_of(call(frontend, "POST", path, {**BODIES[path], "stream": True}))
    assert "begun" in "".join(events[:-1])
    assert json.loads(events[-1])["error"]["code"] == "engine_died"


@pytest.mark.parametrize("path", GENERATING)
def test_a_defect_is_told_by_an_id_that_the_log_has(path: str, caplog: pytest.LogCaptureFixture) -> None:
    frontend = make_frontend(raises(RuntimeError("a secret detail")))
    with caplog.at_level(logging.ERROR, "sglcore.serving"):
        error = error_of(call(frontend, "POST", path, BODIES[path]), 500)
    error_id = next(word for word in error["message"].split() if word.startswith("err-"))
    assert "secret" not in json.dumps(error)
    assert error_id in caplog.text and "a secret detail" in caplog.text


@pytest.mark.parametrize("path", GENERATING)
def test_a_defect_in_a_stream_is_told_the_same_way(path: str, caplog: pytest.LogCaptureFixture) -> None:
    frontend = make_frontend(gives(TextDelta("r", 0, "begun", (5,)), fault=RuntimeError("a secret detail")))
    events = data_of(call(frontend, "POST", path, {**BODIES[path], "stream": True}))
    assert "err-" in json.loads(events[-1])["error"]["message"]
    assert "secret" not in "".join(events) and "a secret detail" in caplog.text


def one_of_two_fails() -> Generate:
    bad = TextDelta("r", 0, "", (), "error", error="its logits were not finite")
    return gives(TextDelta("r", 1, "fine", (5,)), bad, TextDelta("r", 1, "!", (6,), "stop"))


@pytest.mark.parametrize("path", GENERATING)
def test_one_failed_sample_is_told_and_the_other_is_not_lost(path: str) -> None:
    choices = call(make_frontend(one_of_two_fails()), "POST", path, {**BODIES[path], "n": 2}).json()["choices"]
    assert choices[0]["finish_reason"] == "error" and "not finite" in choices[0]["error"]["message"]
    assert choices[1]["finish_reason"] == "stop" and "error" not in choices[1]
    assert "fine!" in (choices[1].get("text", ""), choices[1].get("message", {}).get("content"))


@pytest.mark.parametrize("path", GENERATING)
def test_one_failed_sample_of_a_stream_is_told_and_the_other_is_not_lost(path: str) -> None:
    events = data_of(call(make_frontend(one_of_two_fails()), "POST", path, {**BODIES[path], "n": 2, "stream": True}))
    assert events[-1] == "[DONE]"
    ends = [choice for event in events[:-1] for choice in json.loads(event)["choices"] if choice["finish_reason"]]
    assert {end["index"]: end["finish_reason"] for end in ends} == {0: "error", 1: "stop"}
    assert "not finite" in ends[0]["error"]["message"]


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(("reason", "status", "code"), [("error", 500, "engine_error"), ("abort", 503, "aborted")])
def test_a_request_whose_samples_all_fail_is_an_error(path: str, reason: Any, status: int, code: str) -> None:
    frontend = make_frontend(gives(TextDelta("r", 0, "", (), reason, error="why it failed")))
    assert error_of(call(frontend, "POST", path, BODIES[path]), status)["code"] == code
    events = data_of(call(frontend, "POST", path, {**BODIES[path], "stream": True}))
    assert json.loads(events[-1])["error"]["code"] == code and "[DONE]" not in events


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((path, BODIES[path]) for path in GENERATING),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "a"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_an_operator_ends_before_its_first_word_is_told_so(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    generation = StubGeneration([])
    generation.output.outputs[0].finish_reason = "abort"

    async def generate(*given: Any, **named: Any) -> StubGeneration:
        return generation

    answer = call(make_frontend(generate), "POST", path, {**body, "stream": stream})
    assert answer.status_code == 503 and "aborted" in answer.text


def test_only_what_may_be_told_is_told() -> None:
    assert failure(RuntimeError("secret")) is None
    too_long, too_odd = failure(ContextError("too long")), failure(RequestError("odd"))
    assert too_long is not None and (too_long.status, too_long.code) == (400, "context_length_exceeded")
    assert too_odd is not None and (too_odd.status, too_odd.code) == (400, None)
    assert "secret" not in told(RuntimeError("secret")).message


def test_errors_below_v1_messages_are_in_anthropics_schema() -> None:
    health = Health()
    body = {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
    answer = call(make_frontend(health=health), "POST", "/v1/messages", body)
    assert answer.status_code == 503 and answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "overloaded_error"
    counted = call(make_frontend(), "POST", "/v1/messages/count_tokens", {"messages": []})
    assert counted.status_code == 400 and counted.json()["type"] == "error"


def test_every_endpoint_refuses_in_the_schema_that_the_document_says() -> None:
    client = TestClient(make_app(make_frontend()))
    document = client.get("/openapi.json").json()
    schemas = {"components": document["components"]}
    paths = [path for path, operations in document["paths"].items() if "post" in operations and "{" not in path]
    answers = [(path, client.post(path, json=[])) for path in paths]
    refusals = [(path, answer) for path, answer in answers if 400 <= answer.status_code < 500]
    assert len(refusals) > 20
    for path, answer in refusals:
        responses = document["paths"][path]["post"]["responses"]
        said = responses[str(answer.status_code)]["content"]["application/json"]["schema"]
        Draft202012Validator({**schemas, **said}).validate(answer.json())


def test_the_document_holds_what_it_refers_to_and_says_what_errors_are() -> None:
    document = call(make_frontend(), "GET", "/openapi.json").json()
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    referred = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert referred <= set(schemas) and {"ChatChunk", "CompletionChunk", "ErrorAnswer"} <= set(schemas)
    assert "HTTPValidationError" not in schemas
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"] and "500" in operation["responses"], path
            assert operation["summary"], path
    for path in BODIES:
        assert {"400", "404", "413", "415", "429", "503"} <= set(document["paths"][path]["post"]["responses"])
    assert schemas["CompletionBody"]["required"] == ["prompt"]
