"""Steps in two micro-batches on several ranks give transformers' log-probabilities, for every kind
of parallelism."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sglcore.core.errors import WorkerLost
from tests.checkpoints import gemma3, llama, qwen3_moe, qwen3_next, save
from tests.laws.engine import check_logprobs, random_prompts
from tests.parallel import defects
from tests.parallel.engine import RankedEngine

CONTEXT, SEED = 128, 5
FORMS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "tp": {"tp": 2},
        "tp, experts on 2": {"tp": 2, "ep": 2},
        "dp": {"tp": 2, "dp": 2},
        "dp, experts on 2": {"tp": 2, "dp": 2, "ep": 2},
        "dp, experts at fixed places": {"tp": 2, "dp": 2, "ep": 2, "expert_dispatch": "fixed"},
        "tp x dp on 4": {"tp": 4, "dp": 2, "ep": 4},
    }
)


def check(engine: RankedEngine, oracle: Any, tolerance: float = 1e-4) -> None:
    """Chunks, arrivals while others run and while a shard is idle, prefix cache hits, and a single
    request."""
    prompts = random_prompts(SEED, (1, 5, 30, 17, 9))
    check_logprobs(engine.run(prompts, 8, score_prompts=True, stagger=2), oracle, tolerance)
    check_logprobs(engine.run([prompts[2] + tail for tail in random_prompts(6, (3, 1))], 6), oracle, tolerance)
    check_logprobs(engine.run(random_prompts(7, (4,)), 3), oracle, tolerance)
    assert "eager:halves" in engine.paths


@pytest.mark.parametrize("name", FORMS)
def test_halves_give_the_logprobs_of_transformers(name: str, tmp_path: Path) -> None:
    oracle = qwen3_moe(num_experts=8, max_position_embeddings=CONTEXT)
    settings = {"two_batch_overlap": "on", "graph": "off", "max_batch_tokens": 11, **FORMS[name]}
    with RankedEngine(save(oracle, tmp_path), **settings) as engine:
        check(engine, oracle)
        row = next(row for row in engine.started.ledger.rows if row.topic == "two-batch overlap")
        assert (row.requested, row.effective) == ("on", "on")
        assert ("split, in multiples of 2, and" in row.reason) == (name == "tp, experts on 2"), row.reason


def test_in_float64_nothing_is_left_of_the_difference(tmp_path: Path) -> None:
    oracle = llama(max_position_embeddings=CONTEXT).double()
    exact: dict[str, Any] = {
        "dtype": "float64",
        "kernels": "reference",
        "attention_backend": "reference",
        "graph": "off",
    }
    with RankedEngine(save(oracle, tmp_path), defects.in_double, two_batch_overlap="on", **exact) as engine:
        check(engine, oracle, 1e-6)  # log-probabilities cross in float32


def test_layers_with_windows_run_in_halves_too(tmp_path: Path) -> None:
    oracle = gemma3(max_position_embeddings=CONTEXT)
    with RankedEngine(save(oracle, tmp_path), two_batch_overlap="on", graph="off", max_batch_tokens=9) as engine:
        check(engine, oracle, 2e-4)


def test_requests_that_keep_a_state_are_not_cut(tmp_path: Path) -> None:
    oracle = qwen3_next(max_position_embeddings=CONTEXT)
    with RankedEngine(save(oracle, tmp_path), two_batch_overlap="on", graph="off", max_batch_tokens=9) as engine:
        check_logprobs(engine.run(random_prompts(SEED, (6, 5, 3)), 6), oracle, 1e-3)
        assert "eager:halves" in engine.paths
        row = next(row for row in engine.started.ledger.rows if row.topic == "two-batch overlap")
        assert row.reason.endswith("between requests, because each keeps a state")


def test_a_start_measures_whether_halves_are_faster(tmp_path: Path) -> None:
    """Whatever the result, all ranks do the same, and the ledger row has the numbers."""
    oracle = llama(max_position_embeddings=CONTEXT)
    with RankedEngine(save(oracle, tmp_path), two_batch_overlap="auto", graph="off") as engine:
        check_logprobs(engine.run(random_prompts(SEED, (40, 50, 3)), 4), oracle, 1e-4)
        row = next(row for row in engine.started.ledger.rows if row.topic == "two-batch overlap")
        assert row.effective in ("on", "off")
        assert row.reason.startswith("for a layer of 128 rows, computing takes ")


def cut_by_itself(rank: int) -> None:
    """A shard cuts by its own rows instead of the agreed plan."""
    from sglcore.runtime.overlap.micro_batches import Halves

    def cut_of(self: Halves, batch: Any) -> int | None:
        lengths = batch.extend_seq_lens_cpu
        return (self.terms.of_decode(batch.batch_size) if lengths is None else self.terms.of_prompts(lengths)) or None

    Halves.cut_of = cut_of


def ordered_by_its_own_mode(rank: int) -> None:
    """A shard staggers its micro-batches by its own mode instead of the agreed one."""
    from sglcore.runtime.overlap.micro_batches import Halves
    from sglcore.runtime.parallel import process_group

    own, process_group.TIMEOUT = Halves.forward, timedelta(seconds=3)

    def forward(self: Halves, model: Any, context: Any, parts: Any) -> Any:
        for part in parts:
            part.step_plan = dataclasses.replace(part.step_plan, is_decode=part.forward_mode.is_decode)
        return own(self, model, context, parts)

    Halves.forward = forward


@pytest.mark.parametrize("defect", [cut_by_itself, ordered_by_its_own_mode])
def test_a_shard_that_decides_for_itself_is_caught(defect: Callable[[int], None], tmp_path: Path) -> None:
    oracle = qwen3_moe(num_experts=8, max_position_embeddings=CONTEXT)
    settings: dict[str, Any] = {"two_batch_overlap": "on", "graph": "off", "max_batch_tokens": 11, "poison": True}
    with (
        RankedEngine(save(oracle, tmp_path), defect, tp=2, dp=2, **settings) as engine,
        pytest.raises((WorkerLost, AssertionError)),
    ):
        prompts = random_prompts(SEED, (9, 8, 5, 4, 30, 30))
        check_logprobs(engine.run(prompts, 12, stagger=1), oracle, 1e-4)
