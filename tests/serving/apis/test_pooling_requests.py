"""Embeddings, scores, rankings and labels over a frontend that returns set vectors: what is asked
of the model, and what is made of its numbers."""

from __future__ import annotations

import asyncio
import base64
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.serving.apis.pooling import request
from sglcore.serving.apis.pooling.body import EmbeddingBody
from sglcore.serving.apis.pooling.request import UNIT, _cosine, _shortened
from sglcore.serving.replicas.engine_frontend import Pooled
from sglcore.serving.replicas.metrics.health import Health
from tests.serving.stubs import Application, make_frontend

LONGEST = 9


@cache
def shared() -> tuple[Any, Application]:
    """A frontend and the application over it, made once: each `Served` sets the frontend anew."""
    frontend = make_frontend()
    return frontend, Application(frontend)


class Served:
    """An application over a model that gives each text a vector; `asked` are the encoded texts of
    each request."""

    def __init__(self, labels: int = 0, generates: bool = False) -> None:
        frontend, self.application = shared()
        frontend.info = SimpleNamespace(
            generates=generates, limits={"num_labels": labels}, fingerprint="fp_0123456789ab", max_model_len=64
        )
        frontend.config = ServerConfig(max_prompts=12)
        frontend.names = ("first", "second")
        frontend.longest_prompt = lambda info, embeds: LONGEST
        frontend.pooled, frontend.health = self.pooled, Health()
        frontend.health.become_ready()
        self.frontend, self.asked, self.vectors = frontend, list[list[tuple[int, ...]]](), dict[tuple[int, ...], Any]()

    async def pooled(self, texts: Any) -> list[Pooled]:
        found = [tuple(ids) for ids, _ in texts]
        self.asked.append(found)
        return [Pooled(np.array(self.vectors.get(ids, [len(ids), 1.0, 2.0]), "<f4"), len(ids)) for ids in found]

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.frontend.codec.encode(text))

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        answer = self.application.send("POST", path, body)
        assert answer.status_code == status, answer.text
        return answer.json() if status == 200 else answer.json()["error"]


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({}, None),
        ({"truncate": False}, None),
        ({"truncate": True}, -1),
        ({"truncate_prompt_tokens": -1}, -1),
        ({"truncate_prompt_tokens": 0}, 0),
        ({"truncate_prompt_tokens": 5, "truncate": True}, 5),
    ],
)
def test_a_text_is_truncated_to_the_number_that_is_asked_for(given: Any, most: int | None) -> None:
    assert EmbeddingBody.model_validate({"input": "a", **given}).most == most


@pytest.mark.parametrize(
    ("most", "kept"), [(-1, LONGEST), (4, 4), (LONGEST, LONGEST), (LONGEST + 1, LONGEST), (50, LONGEST)]
)
def test_ids_are_truncated_to_the_limit_of_the_model_at_most(most: int, kept: int) -> None:
    served = Served()
    found = served.post("/v1/embeddings", {"input": [list(range(20)), [5]], "truncate_prompt_tokens": most})
    assert served.asked == [[tuple(range(kept)), (5,)]]
    assert found["usage"] == {"prompt_tokens": kept + 1, "total_tokens": kept + 1}
    assert [each["index"] for each in found["data"]] == [0, 1]


@pytest.mark.parametrize(
    ("vector", "size", "wanted"),
    [
        ([0.6, 0.8], 2, [0.6, 0.8]),
        ([3.0, 4.0], 2, [3.0, 4.0]),
        ([0.6, 0.8], 1, [1.0]),
        ([3.0, 4.0], 1, [3.0]),
        ([0.0, 1.0], 1, [0.0]),
        ([(1 + UNIT / 2), 0.0, 0.0], 2, [1.0, 0.0]),
        ([(1 + 2 * UNIT), 0.0, 0.0], 2, [(1 + 2 * UNIT), 0.0]),
    ],
)
def test_a_vector_of_length_one_keeps_that_length_and_another_its_numbers(vector: Any, size: int, wanted: Any) -> None:
    np.testing.assert_allclose(_shortened(np.array(vector), size), wanted, rtol=1e-6)


def test_the_cosine_is_that_of_the_angle_and_zero_without_one() -> None:
    assert _cosine(np.array([2.0, 0.0]), np.array([3.0, 4.0])) == pytest.approx(0.6)
    assert _cosine(np.array([0.0, 0.0]), np.array([3.0, 4.0])) == 0.0


def test_vectors_have_the_form_and_the_dimensions_that_are_asked_for() -> None:
    served = Served()
    served.vectors[5,] = [1.5, 2.5, 3.5]
    for size, wanted in ((None, [1.5, 2.5, 3.5]), (3, [1.5, 2.5, 3.5]), (2, [1.5, 2.5])):
        for form in (None, "float", "base64"):
            body = {"input": [5], "dimensions": size, "encoding_format": form, "user": "u"}
            (found,) = served.post("/v1/embeddings", body)["data"]
            numbers = found["embedding"]
            read = np.frombuffer(base64.b64decode(numbers), "<f4").tolist() if form == "base64" else numbers
            assert read == wanted, form
    assert served.application.send("POST", "/v1/embeddings", body).headers["x-sglcore-warnings"] == "ignored: user"
    error = served.post("/v1/embeddings", {"input": [5], "dimensions": 4}, 400)
    assert error["param"] == "dimensions" and "at most 3" in error["message"]


def test_each_text_of_several_pairs_is_asked_for_once() -> None:
    served = Served()
    served.vectors = {served.ids("x"): [1.0, 0.0], served.ids("y"): [0.0, 2.0], served.ids("z"): [3.0, 4.0]}
    found = served.post("/v1/score", {"text_1": ["x", "y", "z"], "text_2": ["z", "z", "x"]})
    assert [each["score"] for each in found["data"]] == pytest.approx([0.6, 0.8, 0.6])
    assert served.asked == [[served.ids("x"), served.ids("z"), served.ids("y")]]
    assert found["usage"]["total_tokens"] == sum(len(served.ids(each)) for each in "xyz")
    one = served.post("/v1/score", {"text_1": "x", "text_2": ["z", "y"]})
    assert [each["score"] for each in one["data"]] == pytest.approx([0.6, 0.0])
    assert [each["index"] for each in one["data"]] == [0, 1] and one["id"].startswith("score-")
    for wrong in ({"text_1": ["x", "y"], "text_2": "z"}, {"text_1": ["x", "y"], "text_2": ["z"] * 3}):
        assert served.post("/v1/score", wrong, 400)["param"] == "text_1"


def test_a_head_of_one_label_scores_each_pair_in_its_order() -> None:
    served = Served(labels=1)
    found = served.post("/v1/score", {"text_1": "x", "text_2": ["yy", "z"]})
    assert [each["score"] for each in found["data"]] == [len(ids) for ids in served.asked[0]]
    assert found["usage"]["prompt_tokens"] == sum(map(len, served.asked[0]))
    assert served.asked[0] == [tuple(served.frontend.codec.encode_texts("x", text)[0]) for text in ("yy", "z")]


@pytest.mark.parametrize(
    ("path", "shows", "wanted"),
    [
        ("/v1/rerank", None, True),
        ("/v1/rerank", False, False),
        ("/v2/rerank", None, False),
        ("/v2/rerank", True, True),
        ("/v2/rerank", False, False),
    ],
)
def test_documents_are_ranked_all_of_them_and_shown_where_that_is_asked_for(
    path: str, shows: bool | None, wanted: bool
) -> None:
    served = Served()
    documents = ["x" + "y" * place for place in range(12)]
    served.vectors = {served.ids(text): [1.0, float(place)] for place, text in enumerate(documents)}
    served.vectors[served.ids("q")] = [0.0, 1.0]
    body: dict[str, Any] = {
        "query": "q",
        "documents": [*documents[:11], {"text": documents[11]}],
        "return_documents": shows,
    }
    found = served.post(path, body)
    assert [each["index"] for each in found["results"]] == list(range(11, -1, -1))
    assert [each.get("document") for each in found["results"]] == [
        {"text": documents[place]} if wanted else None for place in range(11, -1, -1)
    ]
    assert [each["index"] for each in served.post(path, {**body, "top_n": 2})["results"]] == [11, 10]
    assert found["id"].startswith("rerank-") and found["model"] == "first"


def test_documents_that_match_alike_keep_their_order() -> None:
    served = Served()
    found = served.post("/v1/rerank", {"query": "q", "documents": ["x", "x", "x"]})
    assert [each["index"] for each in found["results"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ["a"]}, "input"),
        ("/v1/classify", {"input": ["a"]}, "input"),
        ("/v1/score", {"text_1": "a", "text_2": ["a"]}, "text_2"),
        ("/v1/rerank", {"query": "q", "documents": ["a"]}, "documents"),
    ],
)
def test_each_endpoint_has_the_limits_and_the_names_of_its_server(path: str, body: Any, param: str) -> None:
    served = Served()
    many = {name: value * 13 if name == param else value for name, value in body.items()}
    error = served.post(path, many, 400)
    assert (error["param"], error["code"]) == (param, "limit_exceeded") and "13 texts" in error["message"]
    assert served.post(path, {**body, "model": "third"}, 404)["param"] == "model"
    if path != "/v1/classify":
        assert served.post(path, {**body, "model": "second"})["model"] == "second"
        assert served.post(path, body)["system_fingerprint"] == "fp_0123456789ab"
    served.frontend.health = Health()
    assert served.post(path, body, 503)["code"] == "not_ready"


@pytest.mark.parametrize(
    ("labels", "generates", "refused"),
    [
        (
            0,
            True,
            {"/v1/embeddings": "/v1/completions", "/v1/score": "/v1/completions", "/v1/classify": "/v1/completions"},
        ),
        (0, False, {"/v1/classify": "/v1/embeddings", "/v1/completions": "/v1/embeddings"}),
        (
            1,
            False,
            {"/v1/embeddings": "/v1/score for one label, or /classify", "/v1/completions": "/v1/score or /classify"},
        ),
        (
            3,
            False,
            {
                "/v1/embeddings": "/v1/score for one",
                "/v1/score": "/v1/score for one",
                "/v1/completions": "/v1/score or",
            },
        ),
    ],
)
def test_a_model_of_another_kind_names_what_it_answers(labels: int, generates: bool, refused: dict[str, str]) -> None:
    served = Served(labels, generates)
    bodies = {
        "/v1/embeddings": {"input": "a"},
        "/v1/score": {"text_1": "a", "text_2": "b"},
        "/v1/classify": {"input": "a"},
        "/v1/completions": {"prompt": "a"},
    }
    for path, own in refused.items():
        error = served.post(path, bodies[path], 400)
        assert error["param"] == "model" and f"use {own}" in error["message"], (path, error)


def test_vectors_of_ollama_have_length_one_and_long_texts_are_truncated_unless_that_is_off() -> None:
    served = Served()
    served.vectors = {served.ids("x"): [3.0, 4.0, 0.0], served.ids("y"): [0.0, 0.0, 0.0]}
    found = served.post("/api/embed", {"input": ["x", "y"], "keep_alive": 0})
    np.testing.assert_allclose(found["embeddings"], [[0.6, 0.8, 0.0], [0.0, 0.0, 0.0]], rtol=1e-6)
    assert (found["model"], found["load_duration"]) == ("first", 0) and found["total_duration"] > 0
    assert found["prompt_eval_count"] == len(served.ids("x")) + len(served.ids("y"))
    one = served.post("/api/embed", {"input": "x", "dimensions": 2, "model": "second"})
    assert one["model"] == "second" and np.allclose(one["embeddings"], [[0.6, 0.8]])
    long = "word " * 50
    for truncate in (None, True):
        served.post("/api/embed", {"input": long, "truncate": truncate})
        assert len(served.asked[-1][0]) == LONGEST
    served.post("/api/embed", {"input": long, "truncate": False})
    assert served.asked[-1] == [served.ids(long)], "the frontend refuses what is too long"
    count = len(served.asked)
    for nothing in ([], ""):
        answer = served.post("/api/embed", {"input": nothing})
        assert (answer["embeddings"], answer["prompt_eval_count"]) == ([], 0) and len(served.asked) == count


def test_the_time_of_vectors_is_told_in_nanoseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    served, now = Served(), [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    async def pooled(texts: Any) -> list[Pooled]:
        now[0] += 0.25
        return await served.pooled(texts)

    served.frontend.pooled = pooled
    assert served.post("/api/embed", {"input": "x"})["total_duration"] == 250_000_000


def test_the_older_endpoint_of_ollama_gives_the_vector_as_it_is() -> None:
    served = Served()
    served.vectors[served.ids("x")] = [3.0, 4.0, 0.0]
    assert served.post("/api/embeddings", {"prompt": "x"}) == {"embedding": [3.0, 4.0, 0.0]}
    served.post("/api/embeddings", {"prompt": "word " * 50})
    assert len(served.asked[-1][0]) == LONGEST
    assert served.post("/api/embeddings", {"prompt": ""}) == {"embedding": []} and len(served.asked) == 2
    other = served.application.send("POST", "/api/embeddings", {"prompt": "x", "model": "third", "options": {}})
    assert other.status_code == 404
    for path, body in (("/api/embeddings", {"prompt": "x"}), ("/api/embed", {"input": "x"})):
        told = served.application.send("POST", path, {**body, "options": {}, "keep_alive": 1})
        assert told.headers["x-sglcore-warnings"] == "ignored: keep_alive, options"


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls outside the event loop, for texts of more than four characters."""
    found: list[str] = []
    real = asyncio.to_thread

    async def noted(work: Any, *given: Any) -> Any:
        found.append("beside")
        return await real(work, *given)

    monkeypatch.setattr(request, "LONG_TEXT", 4)
    monkeypatch.setattr(asyncio, "to_thread", noted)
    return found


@pytest.mark.parametrize(("texts", "is_long"), [(["abcd"], False), (["ab", "cd"], False), (["abc", "de"], True)])
def test_texts_are_encoded_alike_in_the_loop_and_beside_it(texts: Any, is_long: bool, beside: list[str]) -> None:
    served = Served()
    served.post("/v1/embeddings", {"input": texts})
    assert served.asked == [[served.ids(text) for text in texts]] and len(beside) == is_long
    served.post("/v1/embeddings", {"input": [[5] * 9]})
    assert len(beside) == is_long, "ids are not encoded"


def test_long_documents_are_shortened_alike_in_the_loop_and_beside_it(beside: list[str]) -> None:
    served, documents = Served(), ["Once upon a time", "A", "The end of it"]
    shown = [served.frontend.codec.first_tokens(text, 2) for text in documents]
    body = {"query": "q", "documents": documents, "max_tokens_per_doc": 2}
    found = {each["index"]: each["document"]["text"] for each in served.post("/v1/rerank", body)["results"]}
    assert [found[place] for place in range(3)] == shown != documents and beside


def test_each_input_has_the_label_of_its_own_row_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(labels=3)
    served.vectors = {(5,): [0.0, 1.0, 0.0], (6, 7): [0.5, 0.25, 0.25], (8,): [0.25, 0.25, 0.5]}
    labels = SimpleNamespace(probabilities=lambda row: row, names=("sad", "glad", "mad"))
    monkeypatch.setattr(request, "read_labels", lambda path: labels)
    monkeypatch.setattr(served.frontend, "model_path", "folder", raising=False)
    found = served.post("/v1/classify", {"input": [[5], [6, 7], [8]]})
    assert [(each["index"], each["label"]) for each in found["data"]] == [(0, "glad"), (1, "sad"), (2, "mad")]
    assert [each["probs"] for each in found["data"]] == [served.vectors[ids] for ids in served.asked[0]]
    assert found["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


def test_the_tag_latest_may_be_added_for_vectors_too_and_is_told_as_it_was_given() -> None:
    served = Served()
    for name in ("second", "second:latest"):
        assert served.post("/api/embed", {"model": name, "input": "x"})["model"] == name
        assert served.post("/api/embeddings", {"model": name, "prompt": "x"})["embedding"]
    for path, body in (("/api/embed", {"input": "x"}), ("/api/embeddings", {"prompt": "x"})):
        assert "second:7b" in served.post(path, {**body, "model": "second:7b"}, 404)
