"""Plans of latent attention: refreshed in place, for several steps at once, and with the indexer's
selection computed in parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sglcore.runtime.attention.contract import Bucket
from sglcore.runtime.attention.sparse.latent import DeepseekSparseAttnBackend, LatentPlan
from sglcore.worker.schedule_batch import ForwardMode
from tests.checkpoints import oracle_logprobs, save
from tests.latent import deepseek_v32
from tests.models.steps import CONTEXT, Steps, load

LENGTHS = {1: 21, 2: 5, 3: 33}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    yield save(deepseek_v32(), tmp_path_factory.mktemp("latent"))


@pytest.fixture
def steps(folder) -> Iterator[Steps]:
    """The steps of three prefilled requests."""
    made = Steps(load(folder, max_positions=128))
    made.logprobs({slot: [5] * length for slot, length in LENGTHS.items()})
    yield made


def backend_of(steps: Steps) -> DeepseekSparseAttnBackend:
    backend = steps.runner.attn_backend
    assert isinstance(backend, DeepseekSparseAttnBackend)
    return backend


def same(plan: LatentPlan, other: LatentPlan) -> bool:
    return torch.equal(plan.tokens.slots, other.tokens.slots) and torch.equal(plan.tokens.lens, other.tokens.lens)


def test_a_captured_plan_becomes_a_batchs_where_it_stands(steps: Steps) -> None:
    backend = backend_of(steps)
    plan = backend.capture_plan(Bucket(2, 2))
    where = plan.tokens.slots.data_ptr(), plan.tokens.lens.data_ptr()
    for slots in ((1, 3), (2, 1)):
        batch = steps.staged({slot: [7] for slot in slots}, ForwardMode.DECODE)
        assert backend.refresh(plan, batch) is None
        assert same(plan, backend.plan(batch))
    assert plan.tokens.most >= CONTEXT
    assert (plan.tokens.slots.data_ptr(), plan.tokens.lens.data_ptr()) == where


def test_a_forward_writes_all_that_a_token_keeps(steps: Steps) -> None:
    backend, batch = backend_of(steps), steps.staged({1: [7], 3: [7]}, ForwardMode.DECODE)
    found, pool = backend.rows_of(batch), backend.token_to_kv_pool
    kept = [pool.rows(layer, name) for layer, names in enumerate(pool.layers) for name in names]
    assert len(kept) == 2 * pool.num_layers
    assert [rows.data_ptr() for rows, _ in found] == [rows.data_ptr() for rows in kept]
    assert all(places is batch.out_cache_loc for _, places in found)


def test_a_choice_in_parts_is_the_whole_choice(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglcore.runtime.attention.sparse.token_queries.LOGITS", 300)
    oracle, ids = deepseek_v32(), [index * 7 % 89 + 3 for index in range(50)]
    got = Steps(load(folder, max_positions=128)).logprobs({1: ids})
    assert (got - oracle_logprobs(oracle, ids)).abs().max() < 5e-5
