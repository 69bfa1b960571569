"""With hisparse, data-parallel shards of requests keep the KV entries of their own requests in host
memory, and count what they moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sglcore.core.errors import WorkerLost
from sglcore.runtime.hisparse.hisparse_coordinator import HiSparseCoordinator
from sglcore.worker.model_worker import BatchResult, Ticket
from sglcore.worker.swap_counts import SwapCounts
from tests.checkpoints import save
from tests.latent import INDEXER, deepseek_v32, glm_moe_dsa
from tests.laws.engine import check_logprobs, random_prompts
from tests.parallel.engine import RankedEngine

CONTEXT, TOP_K = 160, INDEXER["index_topk"]
SETTINGS: dict[str, Any] = {
    "attention_backend": "latent",
    "hisparse": f'{{"device_buffer_size": {TOP_K}, "host_to_device_ratio": 100}}',
    "max_batch_tokens": 24,
    "page_size": 16,
    "poison": True,
}


class Counted:
    """Sums what the results of a group of ranks tell of hisparse."""

    def __init__(self, engine: RankedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.swaps, collect = SwapCounts(), engine.worker.collect

        def collected(ticket: Ticket) -> BatchResult:
            result = collect(ticket)
            self.swaps += result.swaps or SwapCounts()
            return result

        monkeypatch.setattr(engine.worker, "collect", collected)


@pytest.mark.parametrize("settings", [{"tp": 2, "dp": 2}, {"tp": 4, "dp": 2, "ep": 4}], ids=str)
@pytest.mark.parametrize("make", [deepseek_v32, glm_moe_dsa], ids=["latent", "shared"])
def test_shards_give_the_logprobs_of_transformers(make: Any, settings: dict[str, int], tmp_path: Path) -> None:
    """Ragged arrivals in chunks, while a shard is idle, and prefix hits."""
    oracle = make(max_position_embeddings=CONTEXT)
    with RankedEngine(save(oracle, tmp_path), **settings, **SETTINGS) as engine:
        prompts = random_prompts(1, (70, 60, 17, 34, 9))
        check_logprobs(engine.run(prompts, 8, score_prompts=True, stagger=2), oracle, 1e-4)
        check_logprobs(engine.run([prompts[0][:48] + tail for tail in random_prompts(6, (3, 30))], 6), oracle, 1e-4)
        check_logprobs(engine.run(random_prompts(7, (40,)), 3), oracle, 1e-4)
        assert engine.scheduler.stats().hit_tokens > 20


def test_what_shards_tell_adds_up_to_what_one_engine_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries that requests choose and store do not depend on where they run."""
    folder, found = save(deepseek_v32(max_position_embeddings=CONTEXT), tmp_path), []
    for settings in ({"tp": 2}, {"tp": 2, "dp": 2}):
        with RankedEngine(folder, **settings, **SETTINGS) as engine:
            counted = Counted(engine, monkeypatch)
            engine.run(random_prompts(1, (50, 60, 17, 34)), 8)
            found.append((counted.swaps.rows, counted.swaps.stored))
            assert 0 < counted.swaps.hits < counted.swaps.rows
    assert found[0] == found[1]


def forgets_who_left(rank: int) -> None:
    """The ranks of the second shard take the entries of a slot's earlier request for the next
    one's."""
    if rank:

        def nothing(self: HiSparseCoordinator, slots: Tensor) -> None:
            pass

        HiSparseCoordinator.enter = nothing


def test_a_shard_that_mixes_up_requests_is_caught(tmp_path: Path) -> None:
    oracle = deepseek_v32(max_position_embeddings=CONTEXT)
    caught = AssertionError, WorkerLost
    given: dict[str, Any] = {"tp": 2, "dp": 2, "max_requests": 2, **SETTINGS}
    with RankedEngine(save(oracle, tmp_path), forgets_who_left, **given) as engine, pytest.raises(caught):
        for seed in (1, 2, 3):
            check_logprobs(engine.run(random_prompts(seed, (60, 34, 50, 41)), 8), oracle, 1e-4)
