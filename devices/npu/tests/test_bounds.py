"""Steps with draft tokens give the fused operator upper bounds of lengths and a mask of what lies
between a row's length and its bound, so that they overlap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglcore.schedule.draft_counts import sums_of
from sglcore.schedule.request import Request
from sglcore_npu.attention_fused import FusedAttention, FusedPlan
from tests.attention.on_device import Placed, place
from tests.attention.rows import Heads
from tests.checkpoints import llama, save
from tests.laws import half
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.laws.proposers import InFlight, Steered

DEVICE, PAGE = "npu:0", 128
ROWS = [(3, 1), (0, 1), (126, 1), (127, 1), (128, 1), (200, 1)]
PROMPTS = random_prompts(22, (125, 7, 250, 120))


def bounded(by: int) -> Placed:
    """Return a decode case with bounds `by` tokens above the lengths, and large values in KV slots
    that no row sees."""
    placed = place(ROWS, FusedAttention, Heads(4, 2, 64), DEVICE, page_size=PAGE, decode=True, context=512)
    mine = placed.backend
    for cells in mine.token_to_kv_pool.kv(0):
        cells.nan_to_num_(30.0)
    shape = replace(mine.shape, has_bounds=True)
    made = FusedAttention(shape, mine.req_to_token_pool, mine.token_to_kv_pool, mine.kernels)
    lengths = placed.batch.seq_lens_cpu
    assert lengths is not None
    placed.batch.seq_lens_cpu = np.minimum(lengths + np.int32(by), np.int32(512))
    return replace(placed, backend=made)


@pytest.mark.parametrize("by", [0, 1, 7, 130])
def test_rows_see_no_key_past_their_length(by: int) -> None:
    placed = bounded(by)
    placed.check(placed.run())


def without_mask(self: FusedAttention, batch: Any, plan: Any = FusedAttention.plan) -> FusedPlan:
    """Planted defect: eager steps believe the bounds."""
    made = plan(self, batch)
    made.mask = None
    return made


def test_bounds_that_are_believed_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedAttention, "plan", without_mask)
    placed = bounded(7)
    with pytest.raises(AssertionError):
        placed.check(placed.run())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """A model in float16 with texts over several pages."""
    oracle = llama(**{**half.SIZES, "max_position_embeddings": 512})
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.copy_(parameter.half().float())
    yield oracle, save(oracle, tmp_path_factory.mktemp("model"))


def engine(folder: Path, graph: str, **settings: Any) -> TokenEngine:
    """Start an engine with the fused operator."""
    given = {"dtype": "float16", "attention_backend": "fused", "page_size": PAGE, "graph_buckets": (1, 2, 4)}
    return TokenEngine(folder, graph=graph, overlap=True, max_batch_tokens=300, **given, **settings)


def verified(made: tuple[Any, Path], graph: str) -> TokenEngine:
    """Run all prompts with draft tokens that are partly right, and check every log-probability."""
    oracle, folder = made
    plain = engine(folder, "off")
    texts = [result.prompt + result.tokens for result in plain.run(PROMPTS, 20)]
    plain.worker.close()
    drafting = engine(folder, graph, speculative="ngram", draft_tokens=3)
    worker: Any = drafting.worker
    worker.drafter = steered = Steered(worker.drafter)
    watched, add = InFlight.of(drafting), drafting.scheduler.add
    requests = list[Request]()

    def added(request: Request) -> None:
        requests.append(request)
        steered.begin([texts[PROMPTS.index(each.prompt_ids.tolist())] for each in requests], requests)
        add(request)

    drafting.scheduler.add = added
    try:
        check_logprobs(drafting.run(PROMPTS, 20, stagger=1), oracle, half.TOLERANCE)
        assert watched.most == 2, "no step overlapped with the one before"
        counted = sums_of(drafting.scheduler.drafts)
        assert 0 < counted.accepted < counted.proposed
        return drafting
    finally:
        drafting.worker.close()


@pytest.mark.parametrize("graph", ["off", "full"])
def test_verified_texts_equal_the_model_and_steps_overlap(made: tuple[Any, Path], graph: str) -> None:
    ran = verified(made, graph)
    assert any(path.startswith("full") for path in ran.paths) is (graph == "full")
    assert ran.worker.limits.can_overlap and not ran.worker.limits.against_overlap


def stale_mask(self: FusedAttention, plan: FusedPlan, batch: Any, refresh: Any = FusedAttention.refresh) -> Any:
    """Planted defect: a replay has the mask of its capture, which hides nothing but what is past a
    length of 1."""
    kept, plan.mask = plan.mask, None
    update = refresh(self, plan, batch)
    plan.mask = kept
    return update


def test_a_replay_with_an_old_mask_is_caught(made: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedAttention, "refresh", stale_mask)
    with pytest.raises(AssertionError, match="divergent|finite"):
        verified(made, "full")
