"""Tests the chunked recurrences against a token-by-token computation in float64, and over many
tokens with similar keys."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.sampling_rows import planted
from sglcore_mlx.layers import recurrence

ROWS, HEADS, KEYS, VALUES = 2, 4, 6, 5
LENGTHS = ((1,), (5,), (16,), (3, 1, 1, 20), (37, 64), (130,))
"""Lengths of the pieces into which the tokens of a row are split."""
SIZES = (1, 4, 16, 64)

Inputs = tuple[np.ndarray, ...]


def drawn_delta(seed: int, length: int, alike: float = 0.0) -> Inputs:
    """Return q, k, v, g, beta and states. `alike`: how similar the keys are; above 0 the state also
    decays little."""
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(ROWS, HEADS, length, KEYS)) + 20 * alike for _ in range(2))
    q, k = (each / np.linalg.norm(each, axis=-1, keepdims=True) for each in (q, k))
    v = rng.normal(size=(ROWS, HEADS, length, VALUES))
    g = -rng.exponential(size=(ROWS, HEADS, length)) * (1e-3 if alike else 1.0)
    beta = rng.uniform(0.95 if alike else 0.1, 1, size=(ROWS, HEADS, length))
    return q, k, v, g, beta, rng.normal(size=(ROWS, HEADS, KEYS, VALUES))


def plain_delta(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, states: np.ndarray):
    """Gated delta rule, token by token."""
    results = []
    for i in range(q.shape[2]):
        states = states * np.exp(g[:, :, i, None, None])
        delta = (v[:, :, i] - np.einsum("nhkv,nhk->nhv", states, k[:, :, i])) * beta[:, :, i, None]
        states = states + k[:, :, i, :, None] * delta[:, :, None]
        results.append(np.einsum("nhkv,nhk->nhv", states, q[:, :, i]))
    return np.stack(results, axis=2), states


def drawn_scan(seed: int, length: int) -> Inputs:
    """Return x, g, B, C and states, for two groups of two heads."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, 2, 2, length, VALUES))
    before, after = (rng.normal(size=(ROWS, 2, 1, length, KEYS)) for _ in range(2))
    g = -rng.exponential(size=(ROWS, 2, 2, length))
    return x, g, before, after, rng.normal(size=(ROWS, 2, 2, VALUES, KEYS))


def plain_scan(x: np.ndarray, g: np.ndarray, before: np.ndarray, after: np.ndarray, states: np.ndarray):
    """Selective scan, token by token."""
    results = []
    for i in range(x.shape[3]):
        states = states * np.exp(g[..., i, None, None]) + x[..., i, :, None] * before[..., i, None, :]
        results.append((states * after[..., i, None, :]).sum(-1))
    return np.stack(results, axis=3), states


RULES = {
    "gated_delta_rule": (drawn_delta, plain_delta, 2),
    "selective_scan": (drawn_scan, plain_scan, 3),
}


def by_mlx(rule: Callable, inputs: Inputs, axis: int, pieces: tuple[int, ...], chunk: int):
    """Run a rule piece by piece, each from the states after the piece before."""
    *given, states = (mx.array(each.astype(np.float32)) for each in inputs)
    results, first = [], 0
    for length in pieces:
        piece = [mx.take(each, mx.arange(first, first + length), axis=axis) for each in given]
        out, states = rule(*piece, states, chunk)
        results.append(out)
        first += length
    return np.array(mx.concatenate(results, axis=axis)), np.array(states)


def holds(module: ModuleType, name: str, seed: int, pieces: tuple[int, ...], chunk: int, atol: float = 2e-5) -> bool:
    """Return whether a module's rule gives the token-by-token result."""
    draw, plain, axis = RULES[name]
    inputs = draw(seed, sum(pieces))
    found = by_mlx(getattr(module, name), inputs, axis, pieces, chunk)
    return all(np.allclose(one, other, atol=atol) for one, other in zip(found, plain(*inputs), strict=True))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("chunk", SIZES)
def test_tokens_in_chunks_and_pieces_give_what_they_give_one_by_one(name: str, chunk: int) -> None:
    for seed, pieces in enumerate(LENGTHS):
        assert holds(recurrence, name, seed, pieces, chunk), pieces


def test_keys_that_are_alike_cost_no_precision() -> None:
    """An inverse by a power series would lose all precision here."""
    inputs = drawn_delta(3, 192, alike=1.0)
    found = by_mlx(recurrence.gated_delta_rule, inputs, 2, (192,), 64)
    for one, other in zip(found, plain_delta(*inputs), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "sound", "defect"),
    [
        ("gated_delta_rule", "(v - found[:, :, :1])", "(v - found[:, :, :1] / decay)"),
        ("gated_delta_rule", "states * decay + k.swapaxes(2, 3) * delta", "states + k.swapaxes(2, 3) * delta"),
        ("gated_delta_rule", "solved @ (weighed * passed)", "solved @ weighed"),
        ("gated_delta_rule", "scores, q, k = q @ k.swapaxes(-1, -2) * within", "scores, q, k = q @ k.swapaxes(-1, -2)"),
        ("gated_delta_rule", "states * passed[:, :, i, -1:]", "states * passed[:, :, i, :1]"),
        ("gated_delta_rule", "width *= 2", "width *= 4"),
        ("selective_scan", "* decay + (before * after)", "+ (before * after)"),
        ("selective_scan", "swapaxes(-1, -2) * passed[at])", "swapaxes(-1, -2))"),
        ("selective_scan", "(x * kept).swapaxes(-1, -2)", "x.swapaxes(-1, -2)"),
        ("selective_scan", "places[:, None] >= places", "places[:, None] > places"),
    ],
)
def test_a_planted_defect_of_the_recurrences_is_caught(name: str, sound: str, defect: str) -> None:
    module = planted(recurrence, sound, defect)
    assert not all(holds(module, name, seed, pieces, 16) for seed, pieces in enumerate(LENGTHS))
