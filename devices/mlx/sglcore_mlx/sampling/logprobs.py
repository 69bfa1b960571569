"""Log-probabilities of raw logits, float32: of the chosen token with its rank, and of the best
tokens."""

import mlx.core as mx

from sglcore.sampling.state import Logprobs
from sglcore_mlx.sampling.race import ID_BITS


def logprobs_of(logits: mx.array, targets: mx.array, top_n: int) -> Logprobs[mx.array]:
    """Return the log-probabilities float32 [N] and ranks int32 [N] (the best is 1) of targets int
    [N] under logits float [N, V], and ids and log-probabilities [N, K] of the K = min(top_n, V)
    best tokens, best first. Targets are clipped to the vocabulary. Lazy; N may be 0."""
    vocab_size = logits.shape[1]
    count = min(top_n, vocab_size)
    if not logits.shape[0]:
        return Logprobs(mx.zeros(0), mx.zeros(0, mx.int32), mx.zeros((0, count), mx.int32), mx.zeros((0, count)))
    logits = logits.astype(mx.float32)
    targets = mx.clip(targets.astype(mx.int32), 0, vocab_size - 1)[:, None]
    ids = mx.arange(vocab_size, dtype=mx.int32)
    norm = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, targets, axis=-1)
    ahead = (logits > chosen) | ((logits == chosen) & (ids < targets))
    top_ids = _top_ids(logits, ids, count)
    return Logprobs(
        (chosen - norm)[:, 0],
        mx.sum(ahead, axis=-1).astype(mx.int32) + 1,
        top_ids,
        mx.take_along_axis(logits, top_ids, axis=-1) - norm,
    )


def _top_ids(logits: mx.array, ids: mx.array, count: int) -> mx.array:
    """Return the ids of the `count` best logits of each row, int32 [N, count], best first; of equal
    ones the lower id first. `ids`: 0 to V - 1. Value and inverted id form a unique integer key; the
    result is sorted, because `topk` is unordered."""
    if not count:
        return mx.zeros((logits.shape[0], 0), mx.int32)
    last = (1 << ID_BITS) - 1
    keys = (ordered_bits(logits).astype(mx.int64) << ID_BITS) | (last - ids)
    best = -mx.sort(-mx.topk(keys, count, axis=-1), axis=-1)
    return (last - (best & last)).astype(mx.int32)


def ordered_bits(values: mx.array) -> mx.array:
    """Return int32 that compare as the float32 `values`, in their shape; both zeros are equal, NaN
    is beyond the infinities."""
    bits = values.view(mx.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered - (ordered >> 31)
