"""Recurrences over each request's tokens, for one token and for many. All arrays are float32.

Within a chunk of tokens they are matrix products; only the state passes from chunk to chunk.
`chunk`: the largest chunk size, a power of two. Shapes: N requests with L tokens each.
"""

from __future__ import annotations

import mlx.core as mx


def gated_delta_rule(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, states: mx.array, chunk: int
) -> tuple[mx.array, mx.array]:
    """Compute for each token S = exp(g) S; S = S + k (beta (v - S^T k))^T; result S^T q (Yang et
    al. 2024, Gated Delta Networks).

    q and k [N, heads, L, K], v [N, heads, L, V], g and beta [N, heads, L], states S [N, heads, K,
    V]. Returns results [N, heads, L, V] and the states after the last token.
    """
    if q.shape[2] == 1:
        return _delta_step(q, k, v, g, beta, states)
    return _delta_chunks(q, k, v, g, beta, states, chunk)


def selective_scan(
    x: mx.array, g: mx.array, before: mx.array, after: mx.array, states: mx.array, chunk: int
) -> tuple[mx.array, mx.array]:
    """Compute for each token S = exp(g) S + x B^T; result S C (Dao and Gu 2024, Mamba 2). x is
    already multiplied by its time step.

    The heads of a group share B (`before`) and C (`after`): x [N, groups, each, L, P], g [N,
    groups, each, L], B and C [N, groups, 1, L, W], states S [N, groups, each, P, W]. Returns
    results [N, groups, each, L, P] and the states after the last token.
    """
    if x.shape[3] == 1:
        return _scan_step(x, g, before, after, states)
    return _scan_chunks(x, g, before, after, states, chunk)


def _delta_step(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, states: mx.array
) -> tuple[mx.array, mx.array]:
    """Compute `gated_delta_rule` for one token (L = 1), with arguments and results as there: the
    states are read for one product, and once more for the update."""
    decay = mx.exp(g)[..., None]
    found = mx.concatenate([k, q], axis=2) @ states * decay
    delta = (v - found[:, :, :1]) * beta[..., None]
    out = found[:, :, 1:] + (q * k).sum(axis=-1, keepdims=True) * delta
    return out, states * decay + k.swapaxes(2, 3) * delta


def _delta_chunks(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, states: mx.array, chunk: int
) -> tuple[mx.array, mx.array]:
    """Compute `gated_delta_rule` for many tokens in the chunked form (section 3.3 of Yang et al.),
    with arguments and results as there: the dependencies between the tokens of a chunk are a
    triangular system."""
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
    """Compute `selective_scan` for many tokens in the chunked form (section 6 of Dao and Gu);
    arguments and results as there."""
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
    """Return three arrays of decay factors of a chunk with logarithms g [..., C]: from before the
    chunk to each token, [..., C, 1]; from each token to the end of the chunk, [..., C, 1]; and from
    token j to token i, [..., C (i), C (j)], zero if j is later."""
    total, places = mx.cumsum(g, axis=-1), mx.arange(g.shape[-1])
    between = mx.where(places[:, None] >= places, total[..., :, None] - total[..., None, :], -mx.inf)
    return mx.exp(total)[..., None], mx.exp(total[..., -1:] - total)[..., None], mx.exp(between)


def _chunked(x: mx.array, axis: int, most: int) -> mx.array:
    """Return x with the axis of L tokens split into two, chunks and tokens of a chunk, padded at
    the end with zeros, which change no state. A chunk has `most` tokens, or the next power of two
    from L if that is less."""
    lead, length, rest = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    size = min(most, 1 << (length - 1).bit_length())
    missing = -length % size
    if missing:
        x = mx.concatenate([x, mx.zeros((*lead, missing, *rest), x.dtype)], axis=axis)
    return x.reshape(*lead, (length + missing) // size, size, *rest)


def _inverse(lower: mx.array) -> mx.array:
    """Return the inverses of I + the part of `lower` [..., C, C] below the diagonal, in the same
    shape; C is a power of two. Inverts blocks of size 2, then 4, and so on, which is substitution;
    a power series would suffer from cancellation for similar keys."""
    places, found, width = mx.arange(lower.shape[-1]), mx.eye(lower.shape[-1]), 1
    while width < lower.shape[-1]:
        block = places // width
        is_below = (block[:, None] == block + 1) & (block % 2 == 0)
        found = found - found @ mx.where(is_below, lower, 0) @ found
        width *= 2
    return found
