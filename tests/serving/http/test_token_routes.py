"""Tokens as text and back over the embedded tokenizer: which special tokens are added, and what is
refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.engine.tokenizers.text_codec import TextError
from sglcore.serving.apis.answer import Answer
from sglcore.serving.apis.server import token_routes
from sglcore.serving.apis.server.probes import PhaseAnswer
from sglcore.serving.apis.server.token_routes import DetokenizeAnswer, TokenizeAnswer, TokenizerInfo
from sglcore.serving.replicas.metrics.health import Health
from sglcore.serving.replicas.server_errors import InvalidRequest
from tests.serving.scripted import staged
from tests.serving.stubs import Application, make_frontend

TEXT = "Once upon a time"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def frontend() -> Any:
    made: Any = make_frontend()
    made.names = ("first", "second")
    return made


@pytest.fixture(scope="module")
def served(frontend: Any) -> Application:
    return Application(frontend)


def tokens(served: Application, **body: Any) -> Any:
    answer = served.send("POST", "/tokenize", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("given", "special"),
    [
        ({"prompt": TEXT}, True),
        ({"prompt": TEXT, "add_special_tokens": True}, True),
        ({"prompt": TEXT, "add_special_tokens": False}, False),
        ({"prompt": TEXT, "add_special": False}, True),
        ({"content": TEXT}, False),
        ({"content": TEXT, "add_special": True}, True),
        ({"content": TEXT, "add_special_tokens": True}, False),
    ],
)
def test_a_text_has_special_tokens_by_the_name_of_its_field(
    served: Application, frontend: Any, given: Any, special: bool
) -> None:
    ids = {flag: frontend.codec.encode(TEXT, special=flag) for flag in (False, True)}
    assert ids[False] != ids[True], "this test wants a tokenizer that adds some"
    found = tokens(served, **given)
    assert found == {"tokens": ids[special], "count": len(ids[special]), "max_model_len": 64}


def test_messages_have_the_tokens_of_their_template_and_others_where_that_is_asked_for(
    served: Application, frontend: Any
) -> None:
    text = served.send("POST", "/apply-template", {"messages": [USER]}).json()["prompt"]
    for flag in (None, False, True):
        found = tokens(served, messages=[USER], add_special_tokens=flag)["tokens"]
        assert found == frontend.codec.encode(text, special=bool(flag)), flag
    begun = {"messages": [USER, {"role": "assistant", "content": "A"}], "continue_final_message": True}
    longer = served.send("POST", "/apply-template", begun).json()["prompt"]
    assert longer.endswith("A") and not text.endswith("hi")
    assert (
        served.send("POST", "/apply-template", {"messages": [USER], "add_generation_prompt": False}).json()["prompt"]
        != text
    )


def test_pieces_and_strings_are_those_of_each_token(served: Application) -> None:
    plain = tokens(served, prompt=TEXT)["tokens"]
    found = tokens(served, prompt=TEXT, with_pieces=True, return_token_strs=True)
    assert [each["id"] for each in found["tokens"]] == plain and found["count"] == len(plain)
    assert [each["piece"] for each in found["tokens"]] == found["token_strs"]
    assert "".join(found["token_strs"]).endswith(TEXT)
    both = tokens(served, prompt=TEXT, with_pieces=False, return_token_strs=True)
    assert (both["tokens"], both["token_strs"]) == (plain, found["token_strs"])


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({}, "prompt", "neither prompt nor messages"),
        ({"prompt": "a", "content": "b"}, "prompt", "found prompt and content"),
        ({"prompt": "a", "messages": [USER]}, "prompt", "found prompt and messages"),
        ({"prompt": "a", "tools": []}, "tools", "found tools with prompt"),
        ({"content": "a", "chat_template_kwargs": {}}, "chat_template_kwargs", "wanted messages"),
        ({"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt", "wanted messages"),
        ({"prompt": "a", "continue_final_message": False}, "continue_final_message", "wanted messages"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "content"),
    ],
)
def test_a_request_has_one_kind_of_input_and_the_fields_of_that_kind(
    served: Application, given: Any, param: str, said: str
) -> None:
    answer = served.send("POST", "/tokenize", given)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and said in error["message"], error


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})])
def test_a_model_may_be_named_and_must_be_served(served: Application, path: str, body: Any) -> None:
    for name, status in ((None, 200), ("", 200), ("second", 200), ("third", 404)):
        assert served.send("POST", path, {**body, "model": name}).status_code == status, name


def test_special_tokens_are_text_too(served: Application, frontend: Any) -> None:
    ids = frontend.codec.encode(TEXT)
    found = served.send("POST", "/detokenize", {"tokens": ids}).json()
    assert found["prompt"] == found["content"] == frontend.codec.decode(ids, skip_special_tokens=False) != TEXT
    assert served.send("POST", "/detokenize", {"tokens": []}).json() == {"prompt": "", "content": ""}


def test_an_id_that_is_no_token_is_named_with_the_number_of_tokens(served: Application, frontend: Any) -> None:
    size = frontend.codec.tokenizer.get_vocab_size(with_added_tokens=True)
    assert served.send("POST", "/detokenize", {"tokens": [size - 1]}).status_code == 200
    error = served.send("POST", "/detokenize", {"tokens": [5, size, size + 1]}).json()["error"]
    assert error["param"] == "tokens" and f"the id {size};" in error["message"] and f"{size} tokens" in error["message"]


def test_the_tokenizer_tells_its_special_tokens_and_null_for_those_it_has_not() -> None:
    other: Any = make_frontend()
    known = {"bos_token": "<s>", "unk_token": ""}
    other.codec.template = SimpleNamespace(special_tokens=known, source=lambda: None)
    found = Application(other).send("GET", "/tokenizer_info").json()
    size = other.codec.tokenizer.get_vocab_size(with_added_tokens=True)
    wanted = {"bos_token": "<s>", "eos_token": None, "pad_token": None, "unk_token": None}
    assert found == {**wanted, "chat_template": None, "vocab_size": size}


def test_tokens_are_told_before_the_model_is_there() -> None:
    served = Application(make_frontend(health=Health()))
    assert tokens(served, prompt=TEXT)["max_model_len"] is None
    assert served.send("POST", "/detokenize", {"tokens": [5]}).status_code == 200


def test_many_tokens_are_read_alike_in_the_loop_and_beside_it(
    served: Application, frontend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = frontend.codec.encode(TEXT)
    size = frontend.codec.tokenizer.get_vocab_size(with_added_tokens=True)
    found: list[Any] = []
    for most in (len(ids), len(ids) - 1):
        monkeypatch.setattr(token_routes, "LONG_TEXT", most)
        refused = served.send("POST", "/detokenize", {"tokens": [*ids[1:], size]})
        answers = [tokens(served, prompt=TEXT, return_token_strs=True), refused.json()["error"]["message"]]
        found.append([*answers, served.send("POST", "/detokenize", {"tokens": ids}).json()])
    assert found[0] == found[1] and len(found[0][0]["token_strs"]) == len(ids)


@pytest.mark.parametrize(
    "special", [{"bos_token": "<s>"}, {"eos_token": "</s>"}, {"pad_token": "<p>"}, {"unk_token": "?"}]
)
def test_each_special_token_is_told_under_its_own_name(special: dict[str, str]) -> None:
    other: Any = make_frontend()
    other.codec.template = SimpleNamespace(special_tokens=special, source=lambda: "{{ a }}")
    found = Application(other).send("GET", "/tokenizer_info").json()
    assert {name: text for name, text in found.items() if name.endswith("_token") and text is not None} == special
    assert found["chat_template"] == "{{ a }}"


@pytest.mark.parametrize("given", [{"prompt": TEXT}, {"content": TEXT}, {"messages": [USER]}])
def test_an_input_that_can_not_be_read_is_refused_by_its_field(given: Any) -> None:
    other: Any = make_frontend()

    async def tokenize(text: str, *, special: bool) -> list[int]:
        raise TextError("planted")

    other.tokenize = tokenize
    error = Application(other).send("POST", "/tokenize", given).json()["error"]
    assert error["param"] == next(iter(given)) and "planted" in error["message"]


def test_messages_are_rendered_with_all_that_a_chat_gives_its_template() -> None:
    given = {
        "messages": [USER, {"role": "assistant", "content": "A"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "chat_template_kwargs": {"a": 1},
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    with staged(ServerConfig()) as stage:
        script = stage.speak()
        for path in ("/tokenize", "/v1/chat/completions"):
            assert httpx.post(stage.url + path, json=given, trust_env=False).status_code == 200
    tokenized, chatted = script.rendered
    assert tokenized == chatted and [each["function"]["name"] for each in tokenized["tools"]] == ["f"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", "/detokenize", {"tokens": [5]}),
        ("GET", "/tokenizer_info", None),
    ],
)
def test_without_a_tokenizer_there_are_no_tokens_to_tell(method: str, path: str, body: Any) -> None:
    other: Any = make_frontend()

    def need_text(what: str) -> None:
        raise InvalidRequest(f"{what} needs a tokenizer")

    other.codec.need_text = need_text
    answer = Application(other).send(method, path, body)
    assert answer.status_code == 400 and f"{path} needs a tokenizer" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "model"),
    [
        ("POST", "/tokenize", {"prompt": TEXT, "return_token_strs": True}, TokenizeAnswer),
        ("POST", "/tokenize", {"prompt": TEXT, "with_pieces": True}, TokenizeAnswer),
        ("POST", "/detokenize", {"tokens": [5]}, DetokenizeAnswer),
        ("GET", "/tokenizer_info", None, TokenizerInfo),
        ("GET", "/readyz", None, PhaseAnswer),
    ],
)
def test_every_field_of_an_answer_is_in_the_document_with_its_type(
    served: Application, method: str, path: str, body: Any, model: type[Answer]
) -> None:
    found = served.send(method, path, body).json()
    assert model.model_validate(found, strict=True).model_dump(exclude_unset=True) == found
    assert found.keys() <= model.model_fields.keys() | {"reason"}
