"""Ollama's protocol with more than one of a thing: calls, blocks, tools, messages and names, and
what is read once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.serving.apis.ollama import route
from sglcore.serving.apis.ollama.body import AnswerFields, OllamaChatBody, OllamaGenerateBody
from sglcore.serving.apis.ollama.events import LinesWriter, Shape, as_message, as_text
from sglcore.serving.apis.ollama.request import chat_request, params_of, plain_prompt
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.replicas.server_errors import InvalidRequest
from tests.serving.scripted import Stage, call, content, reasoning, staged
from tests.serving.stubs import DEMO, Application, make_frontend

FRONTEND: Any = SimpleNamespace(config=ServerConfig(), sampling={}, names=("a", "b:7b"))
USER: Any = {"role": "user", "content": "q"}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged(ServerConfig()) as stage:
        yield stage


@pytest.fixture(scope="module")
def described() -> Application:
    frontend: Any = make_frontend()
    frontend.names, frontend.model_path = ("a", "b:7b"), DEMO
    return Application(frontend)


def post(stage: Stage, path: str, body: Any) -> httpx.Response:
    answer = httpx.post(f"{stage.url}/api/{path}", json={"stream": False, **body}, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def messages(*given: Any) -> list[Any]:
    return list(chat_request(OllamaChatBody.model_validate({"messages": [USER, *given]}), FRONTEND).messages[1:])


def turn(*calls: tuple[str | None, str]) -> dict[str, Any]:
    made = [{"id": name, "function": {"name": function, "arguments": {}}} for name, function in calls]
    return {"role": "assistant", "tool_calls": made}


def answer(name: str | None, function: str | None) -> dict[str, Any]:
    return {"role": "tool", "content": "r", "tool_call_id": name, "tool_name": function}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (("second", "f"), ("second", "f")),
        (("second", "g"), ("second", "f")),
        (("third", "f"), ("third", "g")),
        (("other", "g"), ("other", "g")),
        (("", "g"), ("third", "g")),
    ],
)
def test_an_answer_with_an_id_belongs_to_that_call_and_has_the_name_of_its_function(given: Any, wanted: Any) -> None:
    _, found = messages(turn(("first", "f"), ("second", "f"), ("third", "g")), answer(*given))
    assert (found["tool_call_id"], found["name"]) == wanted


def test_a_call_that_has_its_answer_by_id_is_answered_by_no_name_again() -> None:
    called = turn((None, "f"), (None, "f"), (None, "f"))
    *_, second, first, third = messages(called, answer("call00002", None), answer(None, "f"), answer(None, "f"))
    assert [each["tool_call_id"] for each in (second, first, third)] == ["call00002", "call00001", "call00003"]


def test_ids_count_on_over_the_turns_of_a_conversation_though_calls_are_answered() -> None:
    called = turn((None, "f"), (None, "g"))
    found = messages(called, answer(None, "f"), answer(None, "g"), called, answer(None, "g"))
    assert [each["id"] for each in found[3]["tool_calls"]] == ["call00003", "call00004"]
    assert found[4]["tool_call_id"] == "call00004"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_image_is_refused_at_the_place_of_its_message(place: int) -> None:
    given: list[Any] = [USER] * 3
    given[place] = {**USER, "images": ["aGk="]}
    with pytest.raises(InvalidRequest, match=rf"messages\[{place}\].images") as refused:
        chat_request(OllamaChatBody.model_validate({"messages": given}), FRONTEND)
    assert refused.value.param == f"messages[{place}].images"


def test_each_tool_is_offered_in_its_order() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g", "h")]
    found = chat_request(OllamaChatBody.model_validate({"messages": [USER], "tools": tools}), FRONTEND)
    assert found.tools == tools


def test_texts_on_both_sides_of_calls_are_one_in_a_whole_answer_and_calls_are_counted(stage: Stage) -> None:
    stage.speak(
        reasoning("Hm"), content("I "), *call("f", "{}"), *call("g", "{}", index=1), reasoning("."), content("look.")
    )
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g")]
    message = post(stage, "chat", {"messages": [USER], "tools": tools}).json()["message"]
    assert (message["thinking"], message["content"]) == ("Hm.", "I look.")
    made = [each["function"] for each in message["tool_calls"]]
    assert [(each["index"], each["name"]) for each in made] == [(0, "f"), (1, "g")]


@pytest.mark.parametrize(("think", "told"), [(None, ""), (True, "think"), (False, "think"), ("low", "think")])
def test_thinking_has_no_effect_on_a_text_without_template_and_is_named(stage: Stage, think: Any, told: str) -> None:
    stage.speak("A")
    said = post(stage, "generate", {"prompt": "a", "raw": True, "think": think}).headers
    assert said.get("x-sglcore-warnings", "").removeprefix("ignored: ") == told


def test_a_gap_is_filled_between_the_prompt_and_its_suffix() -> None:
    marks = {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3}
    codec = SimpleNamespace(tokenizer=SimpleNamespace(token_to_id=marks.get), need_text=lambda *given: None)
    frontend: Any = SimpleNamespace(codec=codec)
    for prompt, before in (("a(", "a("), (None, ""), ("", "")):
        body = OllamaGenerateBody.model_validate({"prompt": prompt, "suffix": ")b"})
        assert plain_prompt(body, frontend) == f"<|fim_prefix|>{before}<|fim_suffix|>)b<|fim_middle|>"


def test_the_files_of_a_model_are_read_once_and_again_only_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    card = SimpleNamespace(num_bytes=9, digest="d", modified=0.5, format="gguf", family="llama", parameters=1)

    def read_card(path: Any) -> Any:
        read.append(path)
        if len(read) == 1:
            raise OSError("planted")
        return SimpleNamespace(**vars(card), precision="F32", sizes={})

    monkeypatch.setattr(route, "read_card", read_card)
    frontend: Any = make_frontend()
    frontend.model_path, frontend.names = "folder", ("a", "b:7b")
    served = Application(frontend)
    assert served.send("GET", "/api/tags").status_code == 500
    found = [served.send("GET", f"/api/{path}").json()["models"] for path in ("tags", "ps", "tags")]
    assert [[each["name"] for each in listed] for listed in found] == [["a:latest", "b:7b"]] * 3
    assert read == ["folder"] * 2


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"model": "a"}, "a:latest"),
        ({"model": "a:latest"}, "a:latest"),
        ({"model": "b:7b"}, "b:7b"),
        ({"name": "b:7b"}, "b:7b"),
        ({"model": "", "name": "b:7b"}, "b:7b"),
        ({"model": "b:7b", "name": "a"}, "b:7b"),
        ({"model": "a", "name": "none"}, "a:latest"),
    ],
)
def test_a_model_is_shown_by_the_newer_field_first_under_the_name_that_is_asked_for(
    described: Application, given: Any, name: str
) -> None:
    found = described.send("POST", "/api/show", given)
    assert found.status_code == 200, found.text
    assert found.json()["modelfile"].splitlines()[0] == f"FROM {name}"


@pytest.mark.parametrize(
    ("shape", "empty"),
    [(as_message, {"message": {"role": "assistant", "content": ""}}), (as_text, {"response": ""})],
)
def test_a_sign_of_life_is_a_part_that_says_nothing_and_ends_nothing(shape: Shape, empty: dict[str, Any]) -> None:
    frontend = make_frontend()
    writer = LinesWriter(frontend, TokenTexts(frontend.codec), AnswerFields.model_validate({}), shape)
    sign = json.loads(writer.form.keep_alive)
    assert writer.form.keep_alive.endswith(b"\n") and writer.form.media_type == "application/x-ndjson"
    assert sign == {"model": "demo", "created_at": sign["created_at"], **empty, "done": False}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"stop": [""]}, "options.stop"),
        ({"stop_regex": "("}, "options.stop_regex"),
        ({"seed": 2**64}, "options.seed"),
        ({"min_tokens": 5, "num_predict": 3}, "options.min_tokens"),
    ],
)
def test_an_option_that_is_refused_has_its_place_in_the_body(options: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        params_of(AnswerFields.model_validate({"options": options}), FRONTEND)
    assert refused.value.param == param and str(refused.value).startswith(param)


@pytest.mark.parametrize(
    ("form", "kind"),
    [(None, None), ("", None), ("json", "json_object"), ({}, "json_schema"), ({"a": 1}, "json_schema")],
)
def test_a_format_is_any_object_or_the_one_of_a_schema_though_it_may_be_empty(form: Any, kind: str | None) -> None:
    grammar = params_of(AnswerFields.model_validate({"format": form}), FRONTEND).grammar
    assert (None if grammar is None else (grammar.kind, grammar.text)) == (
        None if kind is None else (kind, "" if kind == "json_object" else json.dumps(form))
    )


def test_a_description_tells_which_fields_of_its_request_have_no_effect(described: Application) -> None:
    given = {"model": "a", "verbose": False, "system": "", "template": "t", "options": {}}
    told = described.send("POST", "/api/show", given).headers["x-sglcore-warnings"]
    assert told == "ignored: options, system, template, verbose"


def test_a_call_that_is_sent_back_has_no_unknown_fields(stage: Stage) -> None:
    stage.speak(content("A"))
    function = {"index": 0, "name": "f", "description": "d", "arguments": {}}
    turns = [
        USER,
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        answer("c", "f"),
    ]
    assert "x-sglcore-warnings" not in post(stage, "chat", {"messages": turns}).headers


@pytest.mark.parametrize(
    ("path", "body"),
    [("chat", {"messages": [USER]}), ("generate", {"prompt": "a"}), ("generate", {"prompt": "a", "raw": True})],
)
@pytest.mark.parametrize(("given", "streams"), [({}, True), ({"stream": None}, True), ({"stream": False}, False)])
def test_an_answer_streams_unless_that_is_off(stage: Stage, path: str, body: Any, given: Any, streams: bool) -> None:
    stage.speak("A" if body.get("raw") else content("A"))
    found = httpx.post(f"{stage.url}/api/{path}", json={**body, **given}, trust_env=False, timeout=60)
    assert found.headers["content-type"] == ("application/x-ndjson" if streams else "application/json")
    assert [json.loads(line)["done"] for line in found.text.splitlines()] == ([False, True] if streams else [True])
