"""Models with recurrent states and draft tokens at a start: counted bytes equal allocated bytes,
and a start that tries draft tokens and turns them off runs on the buffers made for both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglcore.engine import speed_trial
from sglcore.runtime.memory.memory_bring_up import verified_rows
from sglcore.runtime.memory.states import StatePool, taken_bytes
from tests.checkpoints import llama, qwen3_next, save
from tests.drafts import TARGET, eagle, next_token
from tests.laws.engine import TokenEngine, random_prompts

pytestmark = pytest.mark.needs("graphs.native")
CONTEXT, TOKENS = 64, 3


def engine_of(folder: Path, **settings: Any) -> TokenEngine:
    return TokenEngine(folder, max_requests=4, max_model_len=CONTEXT, **settings)


def test_what_states_take_in_of_proposals_is_counted(tmp_path: Path) -> None:
    folder = save(qwen3_next(max_position_embeddings=CONTEXT), tmp_path)
    plain, proposing = engine_of(folder), engine_of(folder, speculative="ngram", draft_tokens=TOKENS)
    pool = proposing.worker.runner.state_pool
    assert pool is not None and plain.worker.runner.state_pool is not None
    kept = [each for each in pool._taken if each.shape[0]]
    made, of_plain = sum(each.nbytes for each in kept), plain.worker.limits.state_bytes
    each = (TOKENS + 1) * taken_bytes(pool.layers)
    assert len(kept) == len(pool.layers) and not plain.worker.runner.state_pool._taken
    assert proposing.worker.limits.state_bytes == of_plain + 5 * each
    assert 4 * each < made <= 5 * each
    assert proposing.worker.limits.snapshot_bytes <= plain.worker.limits.snapshot_bytes
    for engine in (plain, proposing):
        engine.worker.close()


def test_nothing_is_verified_where_nothing_is_proposed() -> None:
    assert verified_rows(None, None) == 0  # pyright: ignore[reportArgumentType]
    assert not StatePool((), 4, 2, "cpu")._taken


def of_states(folder: Path) -> dict[str, Any]:
    one = {"layer_types": ["full_attention"], "mlp_only_layers": []}
    next_token(qwen3_next(max_position_embeddings=CONTEXT), folder, qwen3_next, "qwen", **one)
    return {}


def of_trees(folder: Path) -> dict[str, Any]:
    target = llama(**TARGET, max_position_embeddings=CONTEXT)
    eagle(target, save(target, folder) / "draft")
    return {"draft_width": 2, "draft_depth": 2, "draft_tokens": 5}


@pytest.mark.parametrize("graph", ["off", "native"])
@pytest.mark.parametrize("margin", [0.0, 1e9])
@pytest.mark.parametrize("make", [of_states, of_trees])
def test_a_start_that_tried_proposals_writes_the_same_with_them_and_without(
    make: Callable[[Path], dict[str, Any]], margin: float, graph: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain worker decodes on the same buffers and graphs, and passes neither accepted runs nor
    visibility words."""
    monkeypatch.setattr(speed_trial, "MARGIN", margin)
    given, found = make(tmp_path), []
    for speculative in ("off", "auto"):
        settings = given if speculative == "auto" else {}
        engine = engine_of(tmp_path, speculative=speculative, graph=graph, poison=True, **settings)
        assert bool(engine.scheduler.limits.draft_tokens) == (speculative == "auto" and not margin)
        results = engine.run(random_prompts(5, (21, 6, 9)), 12, temperature=1.0, seed=3, stagger=2)
        found.append([each.tokens for each in results])
        engine.worker.close()
    assert found[0] == found[1]
