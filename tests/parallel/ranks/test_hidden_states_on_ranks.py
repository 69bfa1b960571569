"""Returned hidden states on several ranks are transformers' own, for every kind of parallelism."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.checkpoints import qwen3_moe, save
from tests.laws.hidden import check_states, run_for_states
from tests.laws.test_hidden_states_combined import make_kinds
from tests.parallel.engine import RankedEngine

CONTEXT = 128
FORMS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "tp": {"tp": 2},
        "dp": {"tp": 2, "dp": 2},
        "dp, experts on 2, in halves": {"tp": 2, "dp": 2, "ep": 2, "two_batch_overlap": "on", "graph": "off"},
        "tp, n-grams": {"tp": 2, "speculative": "ngram", "draft_tokens": 3},
    }
)


@pytest.mark.parametrize("name", FORMS)
def test_ranks_return_the_states_of_transformers(name: str, tmp_path: Path) -> None:
    oracle = qwen3_moe(num_experts=8, max_position_embeddings=CONTEXT)
    with RankedEngine(save(oracle, tmp_path), **{"max_batch_tokens": 11, **FORMS[name]}) as engine:
        requests = make_kinds(5)
        check_states(requests, run_for_states(engine, requests, stagger=2), oracle)
