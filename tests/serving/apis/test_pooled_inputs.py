"""The inputs of embedding, scoring, reranking and classification on their way to the model: how
they are cut, in which order they are paired, and which field an error is about."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse

from sglcore.serving.apis.answer import Answer
from sglcore.serving.apis.pooling import request
from sglcore.serving.apis.pooling.answers import ClassifyAnswer, EmbeddingAnswer, RerankAnswer, ScoreAnswer
from sglcore.serving.replicas.server_errors import InvalidRequest
from tests.serving.apis.test_pooling_requests import LONGEST, Served

LONG = "one two three four five six seven eight nine ten eleven twelve"
ASKED: dict[str, tuple[int, dict[str, Any], str]] = {
    "/v1/embeddings": (0, {"input": [LONG, "a"]}, "input"),
    "/v1/score": (0, {"text_1": LONG, "text_2": ["a"]}, "text_2"),
    "/v1/rerank": (0, {"query": "a", "documents": [LONG]}, "documents"),
    "/v2/rerank": (0, {"query": "a", "documents": [{"text": LONG}]}, "documents"),
    "/v1/classify": (3, {"input": [LONG, "a"]}, "input"),
}
"""The number of labels, a body and the field of its texts, for each endpoint."""
PAIRS = {"/v1/score": {"text_1": "q", "text_2": [LONG, "b"]}, "/v1/rerank": {"query": "q", "documents": [LONG, "b"]}}


@pytest.fixture(autouse=True)
def labels(monkeypatch: pytest.MonkeyPatch) -> None:
    names = SimpleNamespace(probabilities=lambda row: np.array(row), names=("sad", "glad", "mad"))
    monkeypatch.setattr(request, "read_labels", lambda path: names)


def serving(labels: int) -> Served:
    served = Served(labels=labels)
    served.frontend.model_path = "folder"
    return served


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"truncate_prompt_tokens": 5}, 5),
        ({"truncate_prompt_tokens": 5.0}, 5),
        ({"truncate_prompt_tokens": 2**31 - 1}, LONGEST),
        ({"truncate": True}, LONGEST),
        ({"truncate": False}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("path", ASKED)
def test_a_long_text_is_cut_at_every_endpoint_where_that_is_asked_for(path: str, given: Any, most: int | None) -> None:
    labels, body, _ = ASKED[path]
    served = serving(labels)
    answer = served.post(path, {**body, **given})
    wanted = served.ids(LONG)
    assert len(wanted) > LONGEST and max(served.asked[0], key=len) == wanted[:most]
    assert answer["usage"]["total_tokens"] == sum(map(len, served.asked[0]))


@pytest.mark.parametrize("most", [0, 1, 2])
def test_ids_are_cut_to_so_many_and_none_of_them_is_a_number_too(most: int) -> None:
    served = serving(0)
    served.post("/v1/embeddings", {"input": [[5, 6, 7], [8]], "truncate_prompt_tokens": most})
    assert served.asked == [[(5, 6, 7)[:most], (8,)[:most]]]


@pytest.mark.parametrize("path", ASKED)
def test_a_text_that_the_model_does_not_take_is_refused_by_its_field(path: str) -> None:
    labels, body, param = ASKED[path]
    served = serving(labels)

    async def pooled(texts: Any) -> Any:
        raise InvalidRequest("planted")

    served.frontend.pooled = pooled
    error = served.post(path, body, 400)
    assert (error["param"], error["message"]) == (param, "planted")


@pytest.mark.parametrize(("path", "param"), [("/v1/score", "text_2"), ("/v1/rerank", "documents")])
@pytest.mark.parametrize("most", [None, 6])
def test_a_head_reads_the_query_before_each_document(path: str, param: str, most: int | None) -> None:
    served = serving(1)
    found = served.post(path, {**PAIRS[path], "truncate_prompt_tokens": most})
    texts = [served.frontend.codec.encode_texts("q", text, most=most)[0] for text in (LONG, "b")]
    assert served.asked == [[tuple(ids) for ids in texts]] and found["usage"]["prompt_tokens"] == sum(map(len, texts))
    lengths = [len(ids) for ids in texts]
    if path == "/v1/score":
        assert [each["score"] for each in found["data"]] == lengths
    else:
        assert [(each["index"], each["relevance_score"]) for each in found["results"]] == [*enumerate(lengths)]

    async def pooled(texts: Any) -> Any:
        raise InvalidRequest("planted")

    served.frontend.pooled = pooled
    assert served.post(path, PAIRS[path], 400)["param"] == param


def test_a_named_prompt_is_put_before_each_text_and_is_refused_with_ids() -> None:
    served = serving(0)
    named: list[tuple[str, str | None]] = []
    real = served.frontend.codec

    def prompted(text: str, name: str | None) -> str:
        named.append((text, name))
        return f"{name or 'default'}: {text}"

    served.frontend.codec = SimpleNamespace(prompted=prompted, encode_texts=real.encode_texts)
    try:
        for name in ("query", None):
            served.post("/v1/embeddings", {"input": ["a", "b"], "prompt_name": name})
        refused = served.post("/v1/embeddings", {"input": [[5]], "prompt_name": "query"}, 400)
    finally:
        served.frontend.codec = real
    assert named == [("a", "query"), ("b", "query"), ("a", None), ("b", None)]
    assert served.asked == [[served.ids(f"{name}: {text}") for text in "ab"] for name in ("query", "default")]
    assert refused["param"] == "input" and "'query'" in refused["message"]


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ["a", 5]}, "text_2[1]"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": "b"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input[0]"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ],
)
def test_an_input_with_nothing_in_it_is_refused_by_its_field(path: str, wrong: Any, param: str) -> None:
    assert serving(0).post(path, wrong, 400)["param"] == param


@pytest.mark.parametrize("path", ASKED)
def test_fields_without_effect_are_told_at_every_endpoint(path: str) -> None:
    labels, body, _ = ASKED[path]
    served = serving(labels)
    answer = served.application.send("POST", path, {**body, "user": "u"})
    assert answer.headers["x-sglcore-warnings"] == "ignored: user"
    assert "x-sglcore-warnings" not in served.application.send("POST", path, body).headers


@pytest.mark.parametrize(
    ("path", "prefix"), [("/v1/score", "score"), ("/v1/classify", "classify"), ("/v1/rerank", "rerank")]
)
def test_an_answer_has_an_id_of_its_kind(path: str, prefix: str) -> None:
    labels, body, _ = ASKED[path]
    served = serving(labels)
    first, second = (served.post(path, body) for _ in range(2))
    assert first["id"].startswith(f"{prefix}-") and first["id"] != second["id"]


DOCUMENTED: dict[str, type[Answer]] = {
    "/v1/embeddings": EmbeddingAnswer,
    "/v1/score": ScoreAnswer,
    "/v1/rerank": RerankAnswer,
    "/v2/rerank": RerankAnswer,
    "/v1/classify": ClassifyAnswer,
}


@pytest.mark.parametrize("path", ASKED)
def test_every_field_of_an_answer_is_in_the_document_with_its_type(path: str) -> None:
    labels, body, _ = ASKED[path]
    served = serving(labels)
    found = served.post(path, body)
    assert DOCUMENTED[path].model_validate(found, strict=True).model_dump(exclude_unset=True) == found
    if "created" in found:
        assert 0 <= time.time() - found["created"] < 60
    if path == "/v1/classify":
        row = found["data"][0]
        assert row["num_classes"] == len(row["probs"]) == 3 and row["label"] == "sad"
        assert served.post(path, {"input": [[5], [6], [7], [8]]})["data"][3]["num_classes"] == 3
    if path == "/v1/embeddings":
        CreateEmbeddingResponse.model_validate(found, strict=True)
