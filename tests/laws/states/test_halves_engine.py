"""Engines with two-batch overlap give the oracle's log-probabilities: chunks, sliding windows,
recurrent states, other KV layouts, draft tokens, graphs. One rank is enough: without collectives to
wait for, the micro-batches run one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from sglcore.core.errors import ConfigError
from sglcore.core.ledger import Row
from sglcore.engine import start as starting
from tests.checkpoints import llama, mistral, qwen3_moe, qwen3_next, save
from tests.deepseek_v4 import deepseek_v4
from tests.latent import deepseek_v32
from tests.laws.engine import TOLERANCE, TokenEngine, check_logprobs, random_prompts
from tests.laws.test_pooling_laws import CASES, embed, expected, open_engine

pytestmark = pytest.mark.needs("device")

CONTEXT = 128
MODELS: MappingProxyType[str, tuple[Callable[..., Any], str, dict[str, Any]]] = MappingProxyType(
    {
        "llama": (llama, "inside a request if its boundaries would make the micro-batches too uneven", {}),
        "mistral": (
            mistral,
            "inside a request if its boundaries would make the micro-batches too uneven",
            {"sliding_window": 6},
        ),
        "qwen3_moe": (
            qwen3_moe,
            "inside a request if its boundaries would make the micro-batches too uneven",
            {"num_experts": 8},
        ),
        "qwen3_next": (qwen3_next, "between requests, because each keeps a state", {}),
        "deepseek_v32": (
            deepseek_v32,
            "inside a request if its boundaries would make the micro-batches too uneven",
            {},
        ),
        "deepseek_v4": (deepseek_v4, "between requests, because blocks of rows cannot be split", {}),
    }
)


class Told:
    """Records the ledger rows of starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: tuple[Row, ...] = ()
        own = starting.start

        def start(*given: Any, **named: Any) -> Any:
            found = own(*given, **named)
            self.rows = found.ledger.rows
            return found

        monkeypatch.setattr("tests.laws.engine.start", start)

    def of(self, topic: str) -> Row:
        return next(row for row in self.rows if row.topic == topic)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_halves_gives_the_oracles_logprobs(name: str, tmp_path: Path, told: Told) -> None:
    make, where, changes = MODELS[name]
    oracle = make(max_position_embeddings=CONTEXT, **changes)
    rows = {"deepseek_v32": "latent", "deepseek_v4": "compressed"}
    page: dict[str, Any] = {"page_size": 16, "attention_backend": rows[name]} if name in rows else {}
    engine = TokenEngine(
        save(oracle, tmp_path), two_batch_overlap="on", graph="off", max_batch_tokens=24, max_model_len=CONTEXT, **page
    )
    check_logprobs(engine.run(random_prompts(5, (1, 5, 30, 17, 9)), 6, score_prompts=True, stagger=2), oracle, 2e-4)
    assert "eager:halves" in engine.paths
    assert told.of("two-batch overlap").reason.endswith(where)


@pytest.mark.parametrize("name", CASES)
def test_vectors_of_texts_that_are_embedded_in_halves(name: str, tmp_path: Path, told: Told) -> None:
    case, texts = CASES[name], random_prompts(5, (1, 17, 6, 30, 2))
    oracle = case.oracle()
    made = open_engine(replace(case, settings={**case.settings, "two_batch_overlap": "on"}), oracle, tmp_path)
    np.testing.assert_allclose(embed(made, texts), expected(case, oracle, texts), atol=TOLERANCE)
    assert made.paths == {"eager:halves"}
    is_encoder = made.worker.runner.attn_backend.shape.is_encoder
    assert told.of("two-batch overlap").reason.endswith("in both directions") == is_encoder


def test_steps_that_verify_proposals_are_cut_between_requests(tmp_path: Path) -> None:
    oracle = llama(max_position_embeddings=CONTEXT)
    engine = TokenEngine(
        save(oracle, tmp_path), two_batch_overlap="on", graph="off", speculative="ngram", draft_tokens=3
    )
    prompts = [prompt * 3 for prompt in random_prompts(5, (5, 9, 4))]
    check_logprobs(engine.run(prompts, 12), oracle, 2e-4)
    assert "eager:halves" in engine.paths


@pytest.mark.needs("graphs.full")
def test_full_graphs_hold_two_halves(tmp_path: Path, told: Told) -> None:
    oracle = mistral(max_position_embeddings=CONTEXT, sliding_window=20)
    engine = TokenEngine(save(oracle, tmp_path), two_batch_overlap="on", graph="full", max_batch_tokens=24)
    check_logprobs(engine.run(random_prompts(5, (1, 5, 30, 17, 9)), 8, stagger=2), oracle, 2e-4)
    assert any(path.startswith("full:") for path in engine.paths)
    row = told.of("two-batch overlap of graphs")
    assert row.effective == "on" and row.reason.startswith("decodes at batch sizes ")


@pytest.mark.needs("graphs.native")
def test_a_recorded_step_runs_whole_and_says_so(tmp_path: Path, told: Told) -> None:
    oracle = llama(max_position_embeddings=CONTEXT)
    engine = TokenEngine(save(oracle, tmp_path), two_batch_overlap="on", graph="native")
    check_logprobs(engine.run(random_prompts(5, (5, 17, 9)), 6), oracle, 2e-4)
    assert any(path.startswith("native:") for path in engine.paths) and "eager:halves" in engine.paths
    row = told.of("two-batch overlap of graphs")
    assert (row.effective, row.downgrade) == ("off", True)
    assert row.reason.endswith("batches in graphs replay whole")


def test_one_rank_does_not_try_whether_halves_are_faster(tmp_path: Path, told: Told) -> None:
    TokenEngine(save(llama(max_position_embeddings=CONTEXT), tmp_path), two_batch_overlap="auto")
    row = told.of("two-batch overlap")
    assert (row.effective, row.reason, row.downgrade) == ("off", "a single rank waits for no other", False)


def test_another_word_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two_batch_overlap is 'yes'; wanted one of off, on, auto"):
        TokenEngine(save(llama(max_position_embeddings=CONTEXT), tmp_path), two_batch_overlap="yes")
