"""Tests latent attention against transformers, in float32, on tiny random checkpoints: whole
sequences, and texts of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.model_cases import load, logprobs
from devices.mlx.tests.parity import TokenEngine
from devices.mlx.tests.test_models import ATOL, IDS, wanted
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore_mlx.attention import gathered, indexed
from sglcore_mlx.attention.paged import MetalAttention
from sglcore_mlx.attention.select import refusal
from sglcore_mlx.layers import latent
from sglcore_mlx.layers.linear import LinearParts
from sglcore_mlx.models.contract import LayerShape
from sglcore_mlx.pool import cell_bytes

pytestmark = pytest.mark.needs("torch")

LATENT = (
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "deepseek-v3-biases-tied",
    "glm4-moe-lite",
    "deepseek-v3.2",
    "deepseek-v3.2-sees-all",
    "glm-moe-dsa",
)
"""The names of `tests.latent.LATENT`, which cannot be imported during collection."""


def saved(name: str, folder: Path) -> Any:
    """Save the transformers model of this name to the folder and return it."""
    from tests import checkpoints
    from tests.latent import LATENT as MADE

    oracle = MADE[name]()
    checkpoints.save(oracle, folder)
    return oracle


@pytest.mark.parametrize("parts", [LinearParts(), LinearParts.of_processor()], ids=["gpu", "processor"])
@pytest.mark.parametrize("name", LATENT)
def test_log_probabilities_are_those_of_transformers(tmp_path: Path, name: str, parts: LinearParts) -> None:
    oracle = saved(name, tmp_path)
    np.testing.assert_allclose(logprobs(load(tmp_path, parts=parts), IDS), wanted(oracle), rtol=0, atol=ATOL)


def furthest(oracle: Any, results: Any) -> float:
    """Return the largest difference of a text's log-probabilities from the transformers model's."""
    worst = 0.0
    for result in results:
        text = (*result.prompt, *result.tokens)
        found = wanted(oracle, text)[len(result.prompt) - 1 : -1]
        of_tokens = found[np.arange(len(result.tokens)), result.tokens]
        worst = max(worst, float(np.abs(of_tokens - np.array(result.logprobs)).max()))
    return worst


def texts(folder: Path, **settings: Any) -> Any:
    """Run texts in chunks, with neighbours, cached prefixes and pages in any order."""
    first, other, third = random_prompts(5, (41, 6, 19))
    with TokenEngine(folder, poison=True, kv_cache_memory=4 << 20, max_model_len=128, **settings) as engine:
        session = engine.session(chunk=16, scramble=2, stagger=1)
        found = session.run([first, other, third], 12, temperature=1.0)
        again = session.run([[*first[:30], 3], other], 12, temperature=1.0)
        assert again[0].cached > 0
    return [*found, *again]


@pytest.mark.parametrize("backend", ["gathered", "processor"])
@pytest.mark.parametrize("graph", ["off", "compiled"])
@pytest.mark.parametrize("name", LATENT)
def test_texts_have_the_log_probabilities_of_transformers(tmp_path: Path, name: str, graph: str, backend: str) -> None:
    oracle = saved(name, tmp_path)
    assert furthest(oracle, texts(tmp_path, graph=graph, attention_backend=backend)) < ATOL


def rotates_neighbours_as_halves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(latent, "pairs_apart", lambda heads: heads)


def values_of_the_wrong_part(patch: pytest.MonkeyPatch) -> None:
    own = LayerShape.parts

    def late(self: LayerShape, entries: mx.array) -> tuple[mx.array, mx.array]:
        keys, _ = own(self, entries)
        return keys, keys[..., -(self.value_dim or 0) :]

    patch.setattr(LayerShape, "parts", late)


def chooses_the_lowest(patch: pytest.MonkeyPatch) -> None:
    for module in (indexed, gathered):
        patch.setattr(module, "highest", lambda scores, count: mx.argpartition(scores, count)[..., :count])


def keeps_the_first_choice(patch: pytest.MonkeyPatch) -> None:
    """A layer with an indexer of its own attends to the choice of the first layer."""
    own = latent.LatentAttention.__call__

    def shared(self: Any, hidden: mx.array, batch: Any) -> mx.array:
        self._indexer = self._indexer if self._layer_id == 0 else None
        return own(self, hidden, batch)

    patch.setattr(latent.LatentAttention, "__call__", shared)


DEFECTS = (rotates_neighbours_as_halves, values_of_the_wrong_part, chooses_the_lowest, keeps_the_first_choice)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda each: each.__name__)
def test_latent_attention_that_is_wrong_shows(tmp_path: Path, defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = saved("deepseek-v3.2", tmp_path)
    defect(monkeypatch)
    assert np.abs(logprobs(load(tmp_path), IDS) - wanted(oracle)).max() > 100 * ATOL


def test_a_cache_entry_is_one_row_for_all_heads(tmp_path: Path) -> None:
    saved("deepseek-v3.2", tmp_path)
    (first, *_), width = load(tmp_path).layers, 32 + 16
    assert (first.entry, first.head_dim, first.value_dim, first.top_k) == ((1, 1, width + 32), width, 32, 16)
    assert cell_bytes([first], mx.float32) == 4 * (width + 32)


def test_a_backend_that_takes_no_latent_entries_is_not_selected() -> None:
    facts = MetalAttention.facts
    assert refusal(facts, "float32", (64,), 16, "metal") == ""
    assert refusal(facts, "float32", (64,), 16, "metal", has_latent=True) == "does not take latent entries"


@pytest.mark.parametrize("backend", ["gathered", "processor"])
def test_tokens_that_are_verified_together_choose_as_they_do_alone(tmp_path: Path, backend: str) -> None:
    oracle = saved("deepseek-v3.2", tmp_path)
    given = {"speculative": "ngram", "draft_tokens": 3, "attention_backend": backend}
    assert furthest(oracle, texts(tmp_path, **given)) < ATOL
