"""Recurrences over the tokens of rows, for one token of each and for many at once. All arrays are
float32.

What happens inside a chunk of tokens is products of matrices; from chunk to chunk only the state
goes on. `chunk` is its size, a power of two.
"""

from __future__ import annotations

import mlx.core as mx


def gated_delta_rule(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, states: mx.array, chunk: int
) -> tuple[mx.array, mx.array]:
    """S = exp(g) S; S = S + k (beta (v - S^T k))^T; the result is S^T q (Yang et al. 2024, Gated
    Delta Networks).

    q and k [N, heads, L, K], v [N, heads, L, V], g and beta [N, heads, L], states S [N, heads, K,
    V]; gives results [N, heads, L, V] and the states after the last token.
    """
    if q.shape[2] == 1:
        return _delta_step(q, k, v, g, beta, states)
    return _delta_chunks(q, k, v, g, beta, states, chunk)


def selective_scan(
    x: mx.array, g: mx.array, before: mx.array, after: mx.array, states: mx.array, chunk: int
) -> tuple[mx.array, mx.array]:
    """S = exp(g) S + x B^T; the result is S C (Dao and Gu 2024, Mamba 2), where x is times its time
    step already.

    Heads are in groups, which share B, `before`, and C, `after`: x [N, groups, each, L, P], g [N,
    groups, each, L], B and C [N, groups, 1, L, W], states S [N, groups, each, P, W]; gives results
    [N, groups, each, L, P] and the states after the last token.
    """
    if x.shape[3] == 1:
        return _scan_step(x, g, before, after, states)
    return _scan_chunks(x, g, before, after, states, chunk)


def _delta_step(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, states: mx.array
) -> tuple[mx.array, mx.array]:
    """One token: the states are read for one product, and once more to be written."""
    decay = mx.exp(g)[..., None]
    found = mx.concatenate([k, q], axis=2) @ states * decay
    delta = (v - found[:, :, :1]) * beta[..., None]
    out = found[:, :, 1:] + (q * k).sum(axis=-1, keepdims=True) * delta
    return out, states * decay + k.swapaxes(2, 3) * delta


def _delta_chunks(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, states: mx.array, chunk: int
) -> tuple[mx.array, mx.array]:
    """Section 3.3 there: what the tokens of a chunk find of each other is a triangular system."""
    length = q.shape[2]
    q, k, v, g, beta = (_chunked(each, 2, chunk) for each in (q, k, v, g, beta))
    passed, kept, within = _decays(g)
    weighed = k * beta[..., None]
    solved = _inverse(weighed @ k.swapaxes(-1, -2) * within)
    own, found = solved @ (v * beta[..., None]), solved @ (weighed * passed)
    scores, q, k = q @ k.swapaxes(-1, -2) * within, q * passed, (k * kept).swapaxes(-1, -2)
    results: list[mx.array] = []
    for i in range(q.shape[2]):
        new = own[:, :, i] - found[:, :, i] @ states
        results.append(q[:, :, i] @ states + scores[:, :, i] @ new)
        states = states * passed[:, :, i, -1:] + k[:, :, i] @ new
    return mx.concatenate(results, axis=2)[:, :, :length], states


def _scan_step(
    x: mx.array, g: mx.array, before: mx.array, after: mx.array, states: mx.array
) -> tuple[mx.array, mx.array]:
    decay = mx.exp(g)[..., None]
    out = after @ states.swapaxes(-1, -2) * decay + (before * after).sum(axis=-1, keepdims=True) * x
    return out, states * decay + x.swapaxes(-1, -2) * before


def _scan_chunks(
    x: mx.array, g: mx.array, before: mx.array, after: mx.array, states: mx.array, chunk: int
) -> tuple[mx.array, mx.array]:
    """Section 6 there."""
    length = x.shape[3]
    x, g, before, after = (_chunked(each, 3, chunk) for each in (x, g, before, after))
    passed, kept, within = _decays(g)
    inside, x = after @ before.swapaxes(-1, -2) * within @ x, (x * kept).swapaxes(-1, -2)
    results: list[mx.array] = []
    for i in range(x.shape[3]):
        at = (slice(None), slice(None), slice(None), i)
        results.append(inside[at] + after[at] @ states.swapaxes(-1, -2) * passed[at])
        states = states * passed[at][..., -1:, :] + x[at] @ before[at]
    return mx.concatenate(results, axis=3)[..., :length, :], states


def _decays(g: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Of a chunk's logarithms [..., C]: what is left at each token of what was before the chunk,
    and at the chunk's end of each token, [..., C, 1]; at token i of token j, [..., C, C], zero
    where j is later."""
    total, places = mx.cumsum(g, axis=-1), mx.arange(g.shape[-1])
    between = mx.where(places[:, None] >= places, total[..., :, None] - total[..., None, :], -mx.inf)
    return mx.exp(total)[..., None], mx.exp(total[..., -1:] - total)[..., None], mx.exp(between)


def _chunked(x: mx.array, axis: int, most: int) -> mx.array:
    """The axis of L tokens as two, of chunks and of their tokens; with zeros behind the last one,
    which change no state."""
    lead, length, rest = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    size = min(most, 1 << (length - 1).bit_length())
    missing = -length % size
    if missing:
        x = mx.concatenate([x, mx.zeros((*lead, missing, *rest), x.dtype)], axis=axis)
    return x.reshape(*lead, (length + missing) // size, size, *rest)


def _inverse(lower: mx.array) -> mx.array:
    """The inverses of I + lower, of which only what is below the diagonal counts, [..., C, C], C a
    power of two: of blocks of two, from these of four, and so on. That is substitution; a series of
    powers would cancel where keys are alike."""
    places, found, width = mx.arange(lower.shape[-1]), mx.eye(lower.shape[-1]), 1
    while width < lower.shape[-1]:
        block = places // width
        is_below = (block[:, None] == block + 1) & (block % 2 == 0)
        found = found - found @ mx.where(is_below, lower, 0) @ found
        width *= 2
    return found
