"""Quantising the embedded model's weights changes its perplexity by less than 0.5 % in 8 bits and
2 % in 4."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sglcore import LLM, SamplingParams
from sglcore_cpu.choice import kernels
from tests.checkpoints import oracle_logprobs
from tests.models.quantized_checkpoints import CASES, make
from tests.models.steps import Steps, load
from tests.models.test_causal_models import prompt

DOCUMENTS = Path(__file__).with_name("held_out_documents.json")
"""Eight documents of each kind in the training data, from seeds that were not used in training:
`tools/demo/text`, split "test"."""


def perplexity(**settings: Any) -> float:
    """Return the perplexity of the documents: exp of the mean negative log-probability of all
    tokens except the first of each."""
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(threads=1, max_requests=8, dtype="bfloat16", **settings) as llm:
        outputs = llm.generate(json.loads(DOCUMENTS.read_text(encoding="utf-8")), asked)
    scores = [token.logprob for output in outputs for token in output.prompt_logprobs or () if token is not None]
    assert len(scores) > 2000
    return math.exp(-sum(scores) / len(scores))


@pytest.fixture(scope="module")
def plain() -> float:
    return perplexity()


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.005), ("int4", 0.02)])
def test_rounded_weights_move_the_perplexity_little(plain: float, kind: str, most: float) -> None:
    found = perplexity(quantize=kind)
    print(f"{kind}: {found:.4f}, as stored {plain:.4f}, {100 * (found / plain - 1):+.2f} %")
    assert abs(found / plain - 1) < most


def test_cells_of_8_bits_move_the_perplexity_little(plain: float) -> None:
    found = perplexity(kv_cache_dtype="int8")
    print(f"cells of 8 bits: {found:.4f}, as stored {plain:.4f}, {100 * (found / plain - 1):+.2f} %")
    assert abs(found / plain - 1) < 0.005


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_codes_made_plain_give_the_numbers_of_the_dense_model_and_kept_ones_round_activations(
    name: str, tmp_path: Path
) -> None:
    oracle, ids = make(CASES[name], tmp_path), prompt(23)
    wanted = oracle_logprobs(oracle, ids)
    kept, exact = (
        Steps(load(tmp_path, kernels=kernels(), quantize=how)).logprobs({1: ids}) for how in ("auto", "none")
    )
    assert (exact - wanted).abs().max() < 1e-4 < (kept - wanted).abs().max()
