"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.conftest import Server

TEXTS = ("Once upon a time", "Ein Kätzchen 😀", "null \x00 byte", "")


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_its_tokens(server: Server, text: str) -> None:
    found = server.post("/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True})
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 1024
    assert server.post("/detokenize", {"tokens": found["tokens"]})["prompt"] == text


def test_special_tokens_are_added_unless_told_otherwise(server: Server) -> None:
    with_them = server.post("/tokenize", {"prompt": "Hello"})["tokens"]
    without = server.post("/tokenize", {"prompt": "Hello", "add_special_tokens": False})["tokens"]
    assert with_them[1:] == without and with_them[0] not in without


def test_messages_are_the_prompt_that_a_chat_has(server: Server) -> None:
    messages = [{"role": "user", "content": "Hello you"}]
    found = server.post("/tokenize", {"messages": messages})
    chat = server.post(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 1, "return_token_ids": True, "temperature": 0}
    )
    assert found["tokens"] == chat["prompt_token_ids"]
    shorter = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert found["tokens"][: shorter["count"]] == shorter["tokens"] and shorter["count"] < found["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"text": "a"}, "text"),
        ("/detokenize", {"tokens": [1, 10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**31]}, "tokens[0]"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_what_can_not_be_read_is_refused_by_its_name(server: Server, path: str, body: Any, param: str) -> None:
    assert server.refusal(path, body)["param"] == param


@pytest.mark.parametrize("name", ["prompt", "content"])
def test_a_setting_of_messages_is_refused_with_the_field_that_has_the_text(server: Server, name: str) -> None:
    found = server.refusal("/tokenize", {name: "a", "add_generation_prompt": True})
    assert found["message"].startswith(f"found add_generation_prompt with {name}; wanted messages")
