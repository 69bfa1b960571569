"""Ollama's protocol under /api: by its own client, by the shapes in its documentation, and against
equivalent endpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import httpx
import numpy as np
import ollama
import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.engine.outputs import TextDelta
from sglcore.serving.apis.answer import Answer
from sglcore.serving.apis.ollama import answers
from sglcore.serving.apis.unknown import NEUTRAL
from sglcore.serving.http.http_app import make_app
from sglcore.serving.http.middleware import with_middleware
from sglcore.serving.replicas.metrics.health import Health
from sglcore.serving.replicas.server_errors import EngineDied, Overloaded
from tests.serving import wrapped
from tests.serving.conftest import SCHEMA, TOOLS, Server
from tests.serving.scripted import MODEL, PROMPT, Stage, call, content, reasoning, staged
from tests.serving.stubs import DEMO, StubGeneration, make_frontend

USER: Any = {"role": "user", "content": "How is it?"}
ASKED: Any = {"model": MODEL, "messages": [USER]}
STORY = "Once upon a time"
SEEDED = {"seed": 5, "temperature": 0.8, "num_predict": 9}
COUNTS = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}
"""Fields of the last object of every answer, by the documentation: integers, times in
nanoseconds."""
OURS = {"seed_used", "system_fingerprint"}
"""Fields that this server adds in every protocol."""


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged(ServerConfig(), repetition_penalty=1.25, top_k=7) as stage:
        yield stage


@pytest.fixture(scope="module")
def client(stage: Stage) -> Iterator[ollama.Client]:
    with ollama.Client(stage.url, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def real(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(server.url, trust_env=False) as client:
        yield client


def post(stage: Stage | Server, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{stage.url}/api/{path}", json=body, trust_env=False, timeout=60)


def lines(stage: Stage | Server, path: str, body: Any) -> list[Any]:
    """The objects of a streamed answer (the default)."""
    answer = post(stage, path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson" and answer.text.endswith("\n")
    return [json.loads(text) for text in answer.text.splitlines()]


def test_a_chat_streams_reasoning_text_and_whole_calls(stage: Stage, client: ollama.Client) -> None:
    said = [reasoning("Hm, "), reasoning("rain."), content("I "), content("look."), *call("weather", '{"at"', ":[1]}")]
    stage.speak(*said, *call("time", "{}", index=1))

    parts = list(client.chat(tools=TOOLS, stream=True, **ASKED))
    whole = client.chat(tools=TOOLS, **ASKED)

    assert "".join(part.message.thinking or "" for part in parts) == whole.message.thinking == "Hm, rain."
    assert "".join(part.message.content or "" for part in parts) == whole.message.content == "I look."
    for made in ([each for part in parts for each in part.message.tool_calls or ()], whole.message.tool_calls or ()):
        assert [each.function.name for each in made] == ["weather", "time"]
        assert [each.function.arguments for each in made] == [{"at": [1]}, {}]
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].done_reason == whole.done_reason == "stop"
    assert parts[-1].eval_count == whole.eval_count == 9 and whole.prompt_eval_count == len(PROMPT)
    assert {part.message.role for part in parts} == {"assistant"}


@pytest.mark.parametrize(
    ("path", "body", "said"), [("chat", ASKED, "message"), ("generate", {"prompt": "a"}, "response")]
)
def test_objects_have_the_fields_of_the_documentation(stage: Stage, path: str, body: Any, said: str) -> None:
    stage.speak(content("Rain"), content("."), reason="length")

    *parts, last = lines(stage, path, {"model": MODEL, **body})
    whole = post(stage, path, {"model": MODEL, "stream": False, **body}).json()

    assert parts and all(part.keys() == {"model", "created_at", said, "done"} for part in parts)
    for end in (last, whole):
        assert end.keys() == {"model", "created_at", said, "done", "done_reason", *COUNTS, *OURS}
        assert end["done"] is True and end["done_reason"] == "length" and end["created_at"].endswith("Z")
        assert all(type(end[name]) is int for name in COUNTS)
        assert end["total_duration"] >= end["prompt_eval_duration"] > 0 and end["eval_duration"] > 0
    empty: Any = {"role": "assistant", "content": ""} if path == "chat" else ""
    assert last[said] == empty and whole[said] == ({**empty, "content": "Rain."} if path == "chat" else "Rain.")
    model: type[Answer] = answers.OllamaChat if path == "chat" else answers.OllamaText
    for value in (*parts, last, whole):
        model.model_validate(value, strict=True)


def test_a_text_is_answered_as_a_conversation_of_system_and_user(stage: Stage, client: ollama.Client) -> None:
    script = stage.speak(reasoning("Hm."), content("Rain."))

    answer = client.generate(MODEL, "How is it?", system="Be short.", think=False)

    assert (answer.response, answer.thinking) == ("Rain.", "Hm.")
    asked = script.rendered[0]
    assert asked["messages"] == [{"role": "system", "content": "Be short."}, USER]
    assert asked["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    assert "".join(part.response or "" for part in client.generate(MODEL, "How?", stream=True)) == "Rain."


def test_fields_that_the_go_client_always_sends_are_no_wishes(stage: Stage) -> None:
    """api.GenerateRequest of Ollama's own client leaves these fields out of no request."""
    stage.speak(content("Rain."))
    body = {"model": MODEL, "prompt": "How?", "suffix": "", "system": "", "template": "", "options": None}
    assert "".join(part["response"] for part in lines(stage, "generate", body)) == "Rain."


def test_options_are_parameters_and_the_rest_is_the_checkpoints(stage: Stage, client: ollama.Client) -> None:
    script = stage.speak(content("A"))
    options = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "num_predict": 7, "stop": ["x", "y"]}
    more = {"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repeat_last_n": -1}

    client.chat(options={**options, **more}, **ASKED)
    client.chat(options={"num_predict": -1, "top_k": 5, "stop": "z", "seed": -1}, **ASKED)
    client.chat(**ASKED)

    first, second, plain = script.params
    assert (first.temperature, first.top_p, first.min_p, first.seed) == (0.5, 0.9, 0.1, 3)
    assert (first.max_tokens, first.stop, first.repetition_penalty) == (7, ("x", "y"), 1.5)
    assert (first.presence_penalty, first.frequency_penalty, first.top_k) == (0.5, 0.25, 7)
    assert (second.max_tokens, second.top_k, second.stop, second.seed) == (None, 5, ("z",), None)
    assert (plain.max_tokens, plain.top_k, plain.repetition_penalty) == (None, 7, 1.25)


@pytest.mark.parametrize("number", [-1, -2])
def test_a_number_of_tokens_below_zero_is_as_many_as_the_context_holds(stage: Stage, number: int) -> None:
    script = stage.speak(content("A"))
    for path, body in (("chat", ASKED), ("generate", {"prompt": "a"}), ("generate", {"prompt": "a", "raw": True})):
        answer = post(stage, path, {"model": MODEL, **body, "options": {"num_predict": number}})
        assert answer.status_code == 200, answer.text
    assert [params.max_tokens for params in script.params] == [None] * 3


@pytest.mark.parametrize(("form", "kind"), [("json", "json_object"), (SCHEMA, "json_schema"), ("", None), (None, None)])
def test_a_format_binds_the_answer(stage: Stage, client: ollama.Client, form: Any, kind: str | None) -> None:
    script = stage.speak("{}")

    client.generate(MODEL, "a", raw=True, format=form)

    grammar = script.params[0].grammar
    assert (grammar.kind if grammar is not None else None) == kind
    assert grammar is None or grammar.text == (json.dumps(form) if kind == "json_schema" else "")


@pytest.mark.parametrize(
    ("think", "values", "ignored", "named"),
    [
        (None, None, (), False),
        (True, {"enable_thinking": True, "thinking": True}, ("thinking",), False),
        (True, {"enable_thinking": True, "thinking": True}, ("enable_thinking", "thinking"), True),
        ("low", {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}, ("thinking",), False),
        ("low", {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}, ("reasoning_effort",), True),
    ],
)
def test_think_goes_to_the_template_and_is_named_where_that_does_not_read_it(
    stage: Stage, think: Any, values: Any, ignored: tuple[str, ...], named: bool
) -> None:
    script = stage.speak(content("A"), ignored=ignored)

    answer = post(stage, "chat", {**ASKED, "think": think})

    assert script.rendered[0]["chat_template_kwargs"] == values
    assert ("think" in answer.headers.get("x-sglcore-warnings", "")) == named


def test_results_of_tools_find_their_calls_though_nothing_has_an_id(stage: Stage, client: ollama.Client) -> None:
    script = stage.speak(content("Rain."))
    made = [{"function": {"name": name, "arguments": {"at": place}}} for name, place in (("a", 1), ("b", 2), ("a", 3))]
    results = [{"role": "tool", "content": text, "tool_name": name} for name, text in (("b", "B"), ("a", "A"))]
    turns = [USER, {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": made}, *results]

    client.chat(MODEL, [*turns, {"role": "tool", "content": "last"}], tools=TOOLS)

    _, asked, *answered = script.rendered[0]["messages"]
    ids = [each["id"] for each in asked["tool_calls"]]
    assert len(set(ids)) == 3 and all(len(name) == 9 and name.isalnum() for name in ids)
    assert [json.loads(each["function"]["arguments"])["at"] for each in asked["tool_calls"]] == [1, 2, 3]
    assert asked["reasoning_content"] == "Hm."
    assert [(each["tool_call_id"], each["name"]) for each in answered] == [(ids[1], "b"), (ids[0], "a"), (ids[2], "a")]
    assert script.rendered[0]["tools"] and script.rendered[0]["tool_choice"] == "auto"


def test_ids_that_are_given_are_kept(stage: Stage) -> None:
    script = stage.speak(content("Rain."))
    made = [{"id": "mine", "function": {"name": "a", "arguments": {}}}]
    turns = [USER, {"role": "assistant", "tool_calls": made}, {"role": "tool", "content": "A", "tool_call_id": "mine"}]

    post(stage, "chat", {"messages": turns})

    _, asked, answered = script.rendered[0]["messages"]
    assert asked["tool_calls"][0]["id"] == answered["tool_call_id"] == "mine"


def test_an_answer_that_the_conversation_ends_with_is_gone_on_with(stage: Stage, client: ollama.Client) -> None:
    script = stage.speak(content(" rains."))

    client.chat(MODEL, [USER, {"role": "assistant", "content": "It"}])

    assert script.rendered[0]["continue_final_message"] and not script.rendered[0]["add_generation_prompt"]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_reason_of_the_end_is_told(stage: Stage, client: ollama.Client, reason: Any) -> None:
    stage.speak(*call("weather", '{"at": "sea", "day": "Mon'), reason=reason)

    answer = client.chat(tools=TOOLS, **ASKED)

    assert answer.done_reason == reason
    assert answer.message.tool_calls and answer.message.tool_calls[0].function.arguments["at"] == "sea"


def test_log_probabilities_stand_beside_their_text(stage: Stage, client: ollama.Client) -> None:
    stage.speak(reasoning("Hm."), content("Rain"), *call("weather", "{}"))

    whole = client.chat(tools=TOOLS, logprobs=True, top_logprobs=2, **ASKED)
    parts = list(client.chat(tools=TOOLS, logprobs=True, top_logprobs=2, stream=True, **ASKED))

    found = [each for part in parts for each in part.logprobs or ()]
    assert found == list(whole.logprobs or ()) and len(found) == whole.eval_count == 4
    assert all(each.logprob == -0.5 and len(each.top_logprobs or ()) == 2 for each in found)
    assert parts[1].message.content == "Rain" and len(parts[1].logprobs or ()) == 1


def test_a_token_that_ends_a_call_and_goes_on_with_text_is_scored_once(stage: Stage, client: ollama.Client) -> None:
    stage.speak(*call("weather", "{}"), content("So."), content(" Rain"))

    parts = list(client.chat(tools=TOOLS, logprobs=True, stream=True, **ASKED))

    assert [part.message.content for part in parts if part.message.content] == ["So.", " Rain"]
    assert sum(len(part.logprobs or ()) for part in parts) == parts[-1].eval_count == 4


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest", None])
def test_the_tag_of_a_name_may_be_left_out(stage: Stage, name: str | None) -> None:
    stage.speak(content("A"))
    assert post(stage, "chat", {**ASKED, "model": name, "stream": False}).json()["model"] == (name or MODEL)


@pytest.mark.parametrize("keep_alive", [0, "5m", -1.5])
def test_a_request_that_asks_for_nothing_is_told_that_the_model_is_there(stage: Stage, keep_alive: Any) -> None:
    chat = post(stage, "chat", {"model": MODEL, "messages": [], "keep_alive": keep_alive})
    text = post(stage, "generate", {"model": MODEL, "keep_alive": keep_alive})

    assert chat.json() == {
        "model": MODEL,
        "created_at": chat.json()["created_at"],
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "load",
    }
    assert (text.json()["response"], text.json()["done_reason"]) == ("", "load")
    assert [each.headers["x-sglcore-warnings"] for each in (chat, text)] == ["ignored: keep_alive"] * 2


def test_what_has_no_effect_and_what_nobody_knows_is_named(stage: Stage) -> None:
    stage.speak(content("A"))
    options = {"num_ctx": 4096, "num_gpu": -1, "use_mmap": True, "repeat_last_n": 64, "mood": 1}
    body = {**ASKED, "options": options, "keep_alive": "5m", "truncate": True, "colour": 1}

    said = post(stage, "chat", body).headers["x-sglcore-warnings"]

    unknown, ignored = said.split("; ")
    assert unknown == "unknown: colour, options.mood"
    names = [f"options.{name}" for name in ("num_ctx", "num_gpu", "repeat_last_n", "use_mmap")]
    assert ignored == f"ignored: {', '.join(['keep_alive', 'truncate', *names])}"


def test_options_that_change_nothing_are_let_through(stage: Stage) -> None:
    stage.speak(content("A"))
    same = {"n", "best_of", "skip_special_tokens", "add_generation_prompt", "tool_choice"}
    options = {name: value for name, value in NEUTRAL.items() if name not in same} | {"mirostat": 0}
    assert post(stage, "chat", {**ASKED, "options": options}).status_code == 200


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [
        ("chat", {"messages": [{**USER, "images": ["aGk="]}]}, "messages[0].images: this server reads only text"),
        ("chat", {"messages": [{"role": "user"}]}, "content, which a message of role user has"),
        ("chat", {"messages": [{"role": "judge", "content": "a"}]}, 'found "judge"; wanted "system"'),
        ("chat", {"format": "xml"}, 'format: found "xml"'),
        ("chat", {"options": {"temperature": -1}}, "options.temperature: found -1; wanted at least 0"),
        ("chat", {"options": {"num_predict": 0}}, "options.num_predict: found 0"),
        ("chat", {"options": {"min_tokens": 5, "num_predict": 3}}, "or raise options.num_predict"),
        ("chat", {"options": {"mirostat": 2}}, "would change the text"),
        ("chat", {"options": {"repeat_penalty": 1.2, "repeat_last_n": 64}}, "repeat_last_n is 64 with"),
        ("chat", {"options": {"n_predict": 2}}, "use num_predict"),
        ("chat", {"temperature": 0.5}, "would change the text"),
        ("chat", {"response_format": {"type": "json_object"}}, "use format"),
        ("chat", {"tool_choice": "required"}, "would change the text"),
        ("chat", {"top_logprobs": 2}, "logprobs true"),
        ("chat", {"logprobs": True, "top_logprobs": 2000}, "at most"),
        ("chat", {"stream": "yes"}, "true or false"),
        ("chat", {"model": "other"}, "model 'other' not found; wanted one of scripted:latest"),
        ("generate", {"images": ["aGk="]}, "images: this server reads only text"),
        ("generate", {"template": "{{ .Prompt }}"}, "template: "),
        ("generate", {"context": [1, 2]}, "by /api/chat"),
        ("generate", {"raw": True, "system": "a"}, "found raw and system"),
        ("generate", {"suffix": "b"}, "no tokens to fill in"),
        ("embed", {"input": "a"}, "has no embeddings"),
        ("embeddings", {"prompt": "a"}, "has no embeddings"),
        ("show", {}, "model is missing"),
        ("show", {"model": "other"}, "not found"),
        ("pull", {"model": "other"}, "/api/pull: not found"),
    ],
)
def test_what_can_not_be_had_is_refused_in_one_text(stage: Stage, path: str, change: Any, said: str) -> None:
    stage.speak(content("A"))
    known = {"chat": ASKED, "generate": {"model": MODEL, "prompt": "a"}}.get(path, {})

    answer = post(stage, path, {**known, **change})

    assert answer.status_code == (404 if "not found" in said else 400)
    assert answer.json().keys() == {"error"} and said in answer.json()["error"], answer.text


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        ({"reason": "error", "error": "the page pool is lost"}, "the page pool is lost"),
        ({"reason": "abort"}, "aborted"),
        ({"fault": EngineDied("the engine process ended", "ask again")}, "engine process ended"),
        ({"fault": ZeroDivisionError("a secret")}, "its log has it under err-"),
    ],
)
def test_an_answer_that_fails_says_why(stage: Stage, client: ollama.Client, ending: Any, text: str) -> None:
    stage.speak(content("Once"), **ending)

    with pytest.raises(ollama.ResponseError, match=text) as whole:
        client.chat(**ASKED)
    with pytest.raises(ollama.ResponseError, match=text) as streamed:
        list(client.chat(stream=True, **ASKED))

    assert whole.value.status_code >= 500 and "secret" not in whole.value.error + streamed.value.error


def test_what_is_refused_before_the_first_word_has_a_status_of_its_own(stage: Stage, client: ollama.Client) -> None:
    stage.speak(fault=Overloaded("too much to do", retry_after=3))

    with pytest.raises(ollama.ResponseError, match="too much to do") as refused:
        list(client.chat(stream=True, **ASKED))

    assert refused.value.status_code == 429


class Endless(StubGeneration):
    """Sends one delta, then nothing for ever."""

    async def __aiter__(self) -> Any:
        yield TextDelta("r", 0, "Once", (5,))
        await asyncio.Event().wait()

    async def ended(self) -> None:
        await asyncio.Event().wait()


def test_who_leaves_ends_the_request_and_silence_is_a_line_that_says_nothing() -> None:
    made, started = list[Endless](), asyncio.Event()

    async def generate(*given: Any, **named: Any) -> Any:
        made.append(Endless([]))
        started.set()
        return made[-1]

    frontend = make_frontend(generate)
    frontend.config = replace(frontend.config, sse_keep_alive=0.01)
    app = make_app(frontend)

    async def left(stream: bool) -> list[bytes]:
        """The data received before the client leaves."""
        heard = list[bytes]()

        async def receive() -> Any:
            body = json.dumps({"messages": [USER], "stream": stream}).encode()
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            heard.append(message.get("body", b""))

        scope = {"type": "http", "method": "POST", "path": "/api/chat", "query_string": b"", "headers": []}
        asking = asyncio.create_task(app(cast(Any, scope), receive, send))
        await started.wait()
        while stream and len(heard) < 4:
            await asyncio.sleep(0.001)
        assert not made[-1].aborted
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        started.clear()
        return [each for each in heard if each]

    async def both() -> tuple[list[bytes], list[bytes]]:
        return await left(True), await left(False)

    streamed, whole = asyncio.run(asyncio.wait_for(both(), 60))
    assert [generation.aborted for generation in made] == [True, True]
    assert "".join(json.loads(each)["message"]["content"] for each in streamed) == "Once"
    assert len(streamed) >= 3 and not whole


@pytest.fixture(scope="module")
def guarded() -> Any:
    """The app inside all middleware, with a model that is not ready."""
    frontend = make_frontend(health=Health())
    frontend.config = replace(frontend.config, api_key=("secret",), max_request_bytes=65_536)
    frontend.model_path = DEMO
    return with_middleware(make_app(frontend), frontend)


def asked(app: Any, method: str, path: str, headers: dict[str, str] | None = None, sent: bytes = b"") -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            given = {"authorization": "Bearer secret", "content-type": "application/json", **(headers or {})}
            return await client.request(method, path, headers=given, content=sent)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("method", "path", "headers", "sent", "status"),
    [
        ("POST", "/api/chat", {}, b"{", 400),
        ("POST", "/api/chat", {}, b"", 400),
        ("POST", "/api/chat", {"content-type": "text/plain"}, b"{}", 415),
        ("POST", "/api/chat", {"content-encoding": "gzip"}, b"{}", 415),
        ("POST", "/api/chat", {}, b" " * 70_000, 413),
        ("POST", "/api/chat", {"authorization": "Bearer other"}, b"{}", 401),
        ("POST", "/api/chat", {"host": "evil.example"}, b"{}", 403),
        ("POST", "/api/generate", {}, b'{"prompt": "a"}', 503),
        ("GET", "/api/nothing", {}, b"", 404),
    ],
)
def test_every_error_below_api_is_one_text_wherever_it_is_found(
    guarded: Any, method: str, path: str, headers: dict[str, str], sent: bytes, status: int
) -> None:
    answer = asked(guarded, method, path, headers, sent)
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"} and isinstance(answer.json()["error"], str) and answer.json()["error"]


def test_a_model_that_is_being_loaded_is_listed_and_not_running(guarded: Any) -> None:
    assert [each["name"] for each in asked(guarded, "GET", "/api/tags").json()["models"]] == ["demo:latest"]
    assert asked(guarded, "GET", "/api/ps").json() == {"models": []}
    assert asked(guarded, "POST", "/api/show", sent=b'{"model": "demo"}').status_code == 503


def test_a_full_queue_turns_them_away_at_once() -> None:
    config = ServerConfig(max_queued_requests=1)
    app, _ = wrapped.wrapped(wrapped.echo, config, wrapped.EngineStats(waiting=2))
    found = asyncio.run(wrapped.call(app, "/api/chat"))
    assert found.status == 429 and isinstance(found.error, str)


def test_a_body_that_curl_calls_a_form_is_read_here_and_nowhere_else(stage: Stage) -> None:
    stage.speak(content("A"))
    form = {"content-type": "application/x-www-form-urlencoded"}
    statuses = [
        httpx.post(f"{stage.url}{path}", content=json.dumps({"messages": [USER]}), headers=form).status_code
        for path in ("/api/chat", "/v1/chat/completions")
    ]
    assert statuses == [200, 415]


def test_a_text_says_the_same_as_the_other_protocols(server: Server, real: ollama.Client) -> None:
    asked = {"seed": 5, "temperature": 0.8, "max_tokens": 9}
    name = server.get("/v1/models")["data"][0]["id"]
    plain = server.post("/v1/completions", {"prompt": STORY, **asked})["choices"][0]["text"]
    message = server.post("/v1/chat/completions", {"messages": [USER], **asked})
    said = message["choices"][0]["message"]["content"]

    assert real.generate(name, STORY, raw=True, options=SEEDED).response == plain
    assert real.chat(name, [USER], options=SEEDED).message.content == said
    assert real.generate(name, USER["content"], options=SEEDED).response == said
    parts = list(real.chat(name, [USER], options=SEEDED, stream=True))
    assert "".join(part.message.content or "" for part in parts) == said
    assert parts[-1].prompt_eval_count == message["usage"]["prompt_tokens"] and parts[-1].eval_count == 9
    spent = (parts[-1].prompt_eval_duration or 0) + (parts[-1].eval_duration or 0)
    assert abs(spent - (parts[-1].total_duration or 0)) <= 2 and (parts[-1].eval_duration or 0) > 1000
    bound = real.chat(name, [USER], format=SCHEMA, options={"num_predict": 60})
    assert set(json.loads(bound.message.content or "")) == {"city", "days"}


def test_the_model_is_listed_and_shown(server: Server, real: ollama.Client) -> None:
    info = server.get("/server_info")
    name = info["served_model_names"][0]
    (listed,), (loaded,) = real.list().models, real.ps().models

    assert listed.model == loaded.model == f"{name}:latest"
    assert listed.size == loaded.size == (DEMO / "model.safetensors").stat().st_size
    assert listed.digest == loaded.digest and len(listed.digest or "") == 64
    assert listed.details and (listed.details.family, listed.details.format) == ("llama", "safetensors")
    assert listed.details.quantization_level == "BF16" and listed.details.parameter_size == "6.2M"
    assert loaded.context_length == info["max_model_len"] and loaded.expires_at is not None
    shown = real.show(listed.model or "")
    assert shown.modelinfo and shown.modelinfo["llama.context_length"] == info["max_model_len"]
    assert shown.modelinfo["general.architecture"] == "llama" and shown.modelinfo["llama.block_count"] == 6
    assert shown.capabilities == ["completion"] and shown.template == server.get("/tokenizer_info")["chat_template"]
    version = server.get("/api/version")
    assert tuple(map(int, version["version"].split("."))) >= (0, 12) and version["sglcore"] == info["version"]
    for path, model in (("tags", answers.ModelsThere), ("ps", answers.ModelsLoaded)):
        model.model_validate(server.get(f"/api/{path}"), strict=True)
    answers.Shown.model_validate(server.post("/api/show", {"name": name}), strict=True)


def test_vectors_are_those_of_the_other_protocol(encoder_server: Server) -> None:
    texts = ["A fox ran through the forest.", "Interest rates rose in March."]
    plain = encoder_server.post("/v1/embeddings", {"input": texts})
    wanted = np.array([each["embedding"] for each in plain["data"]])
    with ollama.Client(encoder_server.url, trust_env=False) as client:
        name = client.list().models[0].model or ""
        several, one = client.embed(name, texts), client.embed(name, texts[0], dimensions=8)
        cut = client.embed(name, "word " * 600)
        old = client.embeddings(name, texts[0])
        assert client.show(name).capabilities == ["embedding"]
        with pytest.raises(ollama.ResponseError, match="tokens"):
            client.embed(name, "word " * 600, truncate=False)

    np.testing.assert_allclose(several.embeddings, wanted, atol=1e-4)
    np.testing.assert_allclose(old.embedding, wanted[0], atol=1e-4)
    assert len(one.embeddings[0]) == 8 and np.linalg.norm(one.embeddings[0]) == pytest.approx(1, abs=1e-5)
    assert several.prompt_eval_count == plain["usage"]["prompt_tokens"] and cut.prompt_eval_count
    assert encoder_server.post("/api/embed", {"model": name, "input": []})["embeddings"] == []
    assert encoder_server.post("/api/embeddings", {"model": name, "prompt": ""}) == {"embedding": []}


def test_a_tool_is_called_by_the_clients_own_objects(tool_server: Server) -> None:
    def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: Where
        """
        return city

    with ollama.Client(tool_server.url, trust_env=False) as client:
        name = client.list().models[0].model or ""
        options = {"num_predict": 12, "temperature": 0}
        assert client.show(name).capabilities == ["completion", "tools", "thinking"]
        first = client.chat(name, [USER], tools=[weather], options=options)
        made = ollama.Message.ToolCall.Function(name="weather", arguments={"city": "Rome"})
        turn = ollama.Message(role="assistant", tool_calls=[ollama.Message.ToolCall(function=made)])
        result = ollama.Message(role="tool", content="dry", tool_name="weather")
        second = client.chat(name, [USER, turn, result], tools=[weather], options=options)

    assert first.done and second.done and (second.prompt_eval_count or 0) > (first.prompt_eval_count or 0)


def test_the_client_that_does_not_block_reads_the_same(stage: Stage) -> None:
    stage.speak(content("I "), content("look."))

    async def run() -> str:
        async with ollama.AsyncClient(stage.url, trust_env=False) as client:
            parts = await client.chat(stream=True, **ASKED)
            return "".join([part.message.content or "" async for part in parts])

    assert asyncio.run(run()) == "I look."
