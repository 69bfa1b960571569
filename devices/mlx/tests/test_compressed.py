"""Tests attention over sliding windows and compressed blocks (DeepSeek-V4) against transformers, in
float32, on tiny random checkpoints: texts in chunks, with neighbours, prefix hits, preemption and
verified draft tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.parity import TokenEngine
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.core.errors import ConfigError
from sglcore_mlx.attention import compressed
from sglcore_mlx.attention.compressed import BlockAttention, BlockPlan, BlockStep
from sglcore_mlx.attention.gathered import GatheredAttention
from sglcore_mlx.attention.select import refusal
from sglcore_mlx.layers import compressed as layer
from sglcore_mlx.layers import hyper, limited

pytestmark = pytest.mark.needs("torch")

ATOL = 1e-4
SETTINGS = {"page_size": 16, "max_model_len": 192, "poison": True, "kv_cache_memory": 8 << 20}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A model with windows of 16 tokens and blocks of 4 and of 16, in transformers' form."""
    from tests.checkpoints import save
    from tests.deepseek_v4 import deepseek_v4

    oracle = deepseek_v4()
    yield save(oracle, tmp_path_factory.mktemp("deepseek-v4")), oracle


def check(oracle: Any, results: Any) -> None:
    """Compare the log-probabilities of outputs, and of prompts where they were asked for, with the
    transformers model's."""
    from tests.checkpoints import oracle_logprobs

    for result in results:
        assert result.finish == "length", "not a number ends a request"
        text = (*result.prompt, *result.tokens)
        found = oracle_logprobs(oracle, list(text)).numpy()[np.arange(len(text) - 1), text[1:]]
        first = len(result.prompt) - 1
        np.testing.assert_allclose(result.logprobs, found[first:], rtol=0, atol=ATOL)
        if result.prompt_logprobs:
            np.testing.assert_allclose(result.prompt_logprobs, found[:first], rtol=0, atol=ATOL)


@pytest.mark.parametrize("graph", ["off", "compiled"])
def test_chunks_neighbours_hits_and_preemption_change_nothing(checkpoint: tuple[Path, Any], graph: str) -> None:
    folder, oracle = checkpoint
    with TokenEngine(folder, graph=graph, **SETTINGS) as engine:
        session = engine.session(chunk=24, scramble=2, stagger=2)
        check(oracle, session.run(random_prompts(1, (5, 60, 17, 34, 1)), 8, score_prompts=True))
        base = random_prompts(8, (70,))[0]
        others = [base[:37] + tail for tail in random_prompts(9, (3, 1, 40))] + [[*base[:48], 3]]
        for prompts, hits in (([base], 0), ([base], 64), (others, 32), (others, 32)):
            found = session.run(prompts, 6)
            check(oracle, found)
            assert all(each.cached >= hits for each in found)
        few = engine.session(chunk=24, pages=12, scramble=3, stagger=1)
        check(oracle, few.run(random_prompts(10, (40, 44, 48, 42)), 30))
        assert few.scheduler.stats().retractions > 0


def test_texts_continue_from_every_page_of_one_that_is_running(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    base = random_prompts(11, (81,))[0]
    pairs = [base[:end] + tail for end in (16, 32, 48, 64, 80) for tail in random_prompts(end, (2, 19))]
    with TokenEngine(folder, **SETTINGS) as engine:
        session = engine.session(chunk=32, stagger=4, scramble=5)
        check(oracle, session.run([base, *pairs], 20))
        check(oracle, session.run([base, base[:80], base[:64], *pairs[::3]], 6))
        assert session.scheduler.stats().hit_tokens > 400


@pytest.mark.parametrize("draft_tokens", [1, 5])
def test_tokens_that_are_verified_together_have_the_same_log_probabilities(
    checkpoint: tuple[Path, Any], draft_tokens: int
) -> None:
    """A repeated text: the n-gram drafter proposes, and some of its tokens are rejected."""
    folder, oracle = checkpoint
    words = random_prompts(12, (9,))[0]
    given = {"speculative": "ngram", "draft_tokens": draft_tokens}
    with TokenEngine(folder, **given, **SETTINGS) as engine:
        session = engine.session(chunk=24, stagger=1, scramble=1)
        check(oracle, session.run([words * 5, random_prompts(13, (26,))[0], words * 2], 40))
        check(oracle, session.run([words * 5], 12, temperature=1.0))
        assert session.scheduler.drafts.total() > 0


def test_published_names_are_read_too(tmp_path: Path) -> None:
    from tests.deepseek_v4 import RATES, SPARSE, deepseek_v4, with_published_names

    oracle = deepseek_v4(compress_rates={**RATES, "heavily_compressed_attention": 128, SPARSE: 4})
    folder = with_published_names(oracle, tmp_path)
    with TokenEngine(folder, **{**SETTINGS, "page_size": 128, "max_model_len": 384}) as engine:
        check(oracle, engine.session(chunk=50).run(random_prompts(3, (140, 20)), 6, score_prompts=True))


def test_layered_prefill_leaves_the_states_of_blocks_to_decode(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    with TokenEngine(folder, prompt_slices="60", **SETTINGS) as engine:
        session = engine.session(chunk=24, stagger=2, scramble=2)
        check(oracle, session.run(random_prompts(4, (21, 50, 9)), 20))


@pytest.mark.parametrize("graph", ["off", "compiled"])
@pytest.mark.parametrize("given", [{}, {"speculative": "ngram", "draft_tokens": 3}], ids=["plain", "verified"])
def test_no_array_of_a_layer_is_copied(checkpoint: tuple[Path, Any], graph: str, given: dict[str, Any]) -> None:
    settings = {**SETTINGS, "kv_cache_memory": 160 << 20, "max_requests": 1024, "poison": False, "graph": graph}
    with TokenEngine(checkpoint[0], **{**settings, **given}) as engine:
        worker: Any = engine.worker
        least = min(array.nbytes for array in worker._stepper._state.cells)
        assert least > 1 << 20
        session = engine.session(chunk=24, stagger=1)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        session.run(random_prompts(12, (60, 20, 16)), 20)
        assert mx.get_peak_memory() - before < least


def test_a_page_has_whole_blocks(checkpoint: tuple[Path, Any]) -> None:
    with pytest.raises(ConfigError, match="a multiple of 16 tokens"):
        TokenEngine(checkpoint[0], **{**SETTINGS, "page_size": 24})


def test_only_one_backend_takes_models_with_blocks_and_it_takes_no_others() -> None:
    given = ("float32", (32,), 16, "cpu", True)
    assert refusal(BlockAttention.facts, *given, has_blocks=True) == ""
    assert "no compressed blocks" in refusal(GatheredAttention.facts, *given, has_blocks=True)
    assert "only models with compressed blocks" in refusal(BlockAttention.facts, *given)


def sees_open_blocks(patch: pytest.MonkeyPatch) -> None:
    """A token sees the block that it is in."""
    own = BlockPlan._blocks

    def more(self: BlockPlan, rows: mx.array, blocks: Any, chosen: Any) -> Any:
        return own(BlockPlan(self.page_table, self.lens + blocks.ratio - 1, self.page_size), rows, blocks, chosen)

    patch.setattr(BlockPlan, "_blocks", more)


def chooses_the_lowest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compressed, "highest", lambda scores, count: mx.argpartition(scores, count)[..., :count])


def forgets_the_page_before(patch: pytest.MonkeyPatch) -> None:
    """The first block of a page has what the request slot holds of the block before it."""
    patch.setattr(compressed, "_from_page", lambda plan, stored, every, blocks: every)


def keeps_no_tokens(patch: pytest.MonkeyPatch) -> None:
    """The tokens of an incomplete block are lost at the end of a step."""
    own = BlockStep._continued

    def lost(self: BlockStep, state_id: int, x: mx.array) -> Any:
        self._step.states[state_id] = [mx.zeros_like(self._step.states[state_id][0])]
        return own(self, state_id, x)

    patch.setattr(BlockStep, "_continued", lost)


def keeps_no_page(patch: pytest.MonkeyPatch) -> None:
    """A request that enters at a page keeps no block of the page before in its state."""
    own = BlockStep.compress

    def kept(self: BlockStep, layer_id: int, number: int, x: mx.array, *more: Any) -> None:
        state_id = self._states[layer_id] + number
        every = self._continued(state_id, x.astype(mx.float32))
        own(self, layer_id, number, x, *more)
        span = self._of(layer_id).span
        self._step.states[state_id] = [mx.concatenate([rows[:, rows.shape[1] - span + 1 :] for rows in every])]

    patch.setattr(BlockStep, "compress", kept)


def sees_a_token_less(patch: pytest.MonkeyPatch) -> None:
    own = BlockPlan._window

    def less(self: BlockPlan, kv: mx.array, shape: Any) -> Any:
        rows, seen = own(self, kv, shape)
        distance = mx.arange(seen.shape[2])[None] - mx.arange(seen.shape[1])[:, None]
        return rows, seen & (distance > 0)[None]

    patch.setattr(BlockPlan, "_window", less)


def does_not_turn_back(patch: pytest.MonkeyPatch) -> None:
    """Rotates by the position where the other direction is needed."""
    own = layer.turned
    patch.setattr(layer, "turned", lambda heads, angles: own(heads, (angles[0], mx.abs(angles[1]))))


def mixes_the_other_way(patch: pytest.MonkeyPatch) -> None:
    own = hyper.HyperConnection.widen
    patch.setattr(
        hyper.HyperConnection, "widen", lambda self, x, h, mix: own(self, x, h, (mix[0], mix[1].swapaxes(1, 2)))
    )


def knows_no_limit(patch: pytest.MonkeyPatch) -> None:
    own = limited.limited_silu_and_mul
    patch.setattr(limited, "limited_silu_and_mul", lambda gate_up, limit: own(gate_up, 1e9))


DEFECTS = (
    sees_open_blocks,
    chooses_the_lowest,
    forgets_the_page_before,
    keeps_no_tokens,
    keeps_no_page,
    sees_a_token_less,
    does_not_turn_back,
    mixes_the_other_way,
    knows_no_limit,
)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda each: each.__name__)
def test_a_defect_is_caught(tmp_path: Path, defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.checkpoints import save
    from tests.deepseek_v4 import deepseek_v4

    oracle = deepseek_v4(swiglu_limit=0.5)
    base = random_prompts(12, (70,))[0]
    defect(monkeypatch)
    with TokenEngine(save(oracle, tmp_path), **SETTINGS) as engine, pytest.raises(AssertionError):
        session = engine.session(chunk=24)
        for prompts in ([base], [[*base[:48], 3]]):
            check(oracle, session.run(prompts, 6))
