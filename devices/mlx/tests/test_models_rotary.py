"""Tests both implementations of rotary embeddings against the formula in float64: kinds, partial
rotation, factors, large positions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from sglcore.checkpoint.model_config import ModelConfig, RopeConfig, read_config
from sglcore.checkpoint.rope_config import rotary_frequencies
from sglcore.core.errors import ConfigError
from sglcore_mlx.forward_batch import ForwardBatch
from sglcore_mlx.layers.rotary import Rotary

DEMO = Path(__file__).parents[3] / "sglcore" / "assets" / "demo"
CONTEXT = 1024
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1.0] * 16, "long_factor": [1.0 + step / 4 for step in range(16)], "factor": 4.0}
KINDS = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0},
    "longrope": LONG,
}


def with_rope(kind: str, scaling: dict[str, Any], partial: float = 1.0) -> ModelConfig:
    """Return the embedded model's configuration (heads of 32 elements) with another rotary
    embedding."""
    return replace(read_config(DEMO), rope=RopeConfig(10000.0, kind, partial, 256, scaling))


def rotated(heads: np.ndarray, positions: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Rotate heads by the definition (Su et al. 2021); the first half of the rotated part is paired
    with the second."""
    frequencies, factor = rotary_frequencies(config, CONTEXT)
    half = frequencies.size
    angles = (positions[:, None].astype(np.float64) * frequencies.astype(np.float64))[:, None]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    turned = (first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles))
    return np.concatenate([factor * turned[0], factor * turned[1], heads[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_rotated_by_the_formula(kind: str, partial: float, is_fused: bool) -> None:
    scaling = KINDS[kind] if partial == 1.0 or kind != "longrope" else {**LONG, "long_factor": LONG["long_factor"][:8]}
    config = with_rope(kind, dict(scaling), partial)
    random = np.random.default_rng(11)
    positions = random.integers(0, CONTEXT, 9).astype(np.int32)
    heads = random.normal(size=(9, 5, 32))
    rotate = Rotary(config, CONTEXT, mx.float32, is_fused).at(mx.array(positions))
    wanted, given = rotated(heads, positions, config), mx.array(heads.astype(np.float32))
    for count in (5, 3):
        np.testing.assert_allclose(np.array(rotate(given, count)), wanted[:, :count], rtol=0, atol=3e-4)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_narrow_heads_stay_narrow(dtype: mx.Dtype, is_fused: bool) -> None:
    config = with_rope("yarn", {"factor": 4.0})
    heads = mx.random.normal((3, 2, 32), key=mx.random.key(5)).astype(dtype)
    positions = np.array([0, 7, 900], np.int32)
    got = Rotary(config, CONTEXT, dtype, is_fused).at(mx.array(positions))(heads, 2)
    assert got.dtype == dtype
    want = rotated(np.array(heads.astype(mx.float32)), positions, config)
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), want, rtol=0, atol=0.05)


def test_both_ways_agree_in_a_compiled_function() -> None:
    config = with_rope("llama3", LLAMA3, 0.5)
    heads, positions = mx.random.normal((4, 3, 32), key=mx.random.key(2)), mx.array([5, 1, 700, 0])
    rotaries = [Rotary(config, CONTEXT, mx.float32, is_fused) for is_fused in (True, False)]
    turned = [mx.compile(lambda x, at, rotary=rotary: rotary.at(at)(x, 3))(heads, positions) for rotary in rotaries]
    np.testing.assert_allclose(np.array(turned[0]), np.array(turned[1]), atol=1e-5)


class Opened:
    """A rotary embedding that counts the calls of `at`."""

    count = 0

    def at(self, positions: mx.array) -> tuple[Opened, mx.array]:
        """Return itself and the positions."""
        self.count += 1
        return self, positions


def test_each_of_a_models_rotary_embeddings_is_opened_once_for_a_forward() -> None:
    positions, near, far = mx.array([7]), Opened(), Opened()
    batch: Any = ForwardBatch(positions=positions)
    for rotary in (near, far, near, far):
        whose, where = batch.rotation(rotary)
        assert whose is rotary and where is positions
    assert (near.count, far.count) == (1, 1)


def test_kinds_and_numbers_that_are_not_known_are_errors() -> None:
    with pytest.raises(ConfigError, match="rope_type 'spiral' is not supported; wanted one of default, dynamic"):
        Rotary(with_rope("spiral", {}), CONTEXT, mx.float32, True)
    with pytest.raises(ConfigError, match="the rope parameters of 'linear' have no 'factor'"):
        Rotary(with_rope("linear", {}), CONTEXT, mx.float32, True)
