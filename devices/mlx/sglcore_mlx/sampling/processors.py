"""Changes logits before sampling: penalties, bias with bans until a position, and masks. Pure
functions of arrays.

Penalties count the history anew each time, so repeated runs give the same result.
"""

from dataclasses import dataclass

import mlx.core as mx

from sglcore.sampling.state import Bias, Masks


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of the B requests of a batch, in order: `history` int32 [B, L], their tokens;
    `starts` int32 [B], index of the first output token; and repetition, presence and frequency
    penalty, float32 [B] each. Neutral parameters leave logits unchanged bit for bit."""

    history: mx.array
    """int32[B, L]: each request's prompt and output; entries at or beyond its position are
    ignored."""
    starts: mx.array
    """int32[B]: index of the first output token."""
    repetition: mx.array
    """float32[B], as the next two."""
    presence: mx.array
    frequency: mx.array


def token_counts(history: mx.array, lengths: mx.array, starts: mx.array, vocab_size: int) -> tuple[mx.array, mx.array]:
    """Return two counts, int32 [B, V] each, of each token of history int32 [B, L]: in the prompt
    (positions below `starts`), and in the output (from `starts`, below `lengths`); starts, lengths
    int32 [B]. Ids outside the vocabulary (placeholders) are not counted."""
    rows, columns = history.shape
    positions = mx.arange(columns, dtype=mx.int32)
    inside = (positions < lengths[:, None]) & (history >= 0) & (history < vocab_size)
    # One scatter for both: the output's counts come after the prompt's.
    places = mx.clip(history, 0, vocab_size - 1) + vocab_size * (positions >= starts[:, None]).astype(mx.int32)
    places = places + 2 * vocab_size * mx.arange(rows, dtype=mx.int32)[:, None]
    counts = mx.zeros(rows * 2 * vocab_size, mx.int32).at[places.reshape(-1)].add(inside.astype(mx.int32).reshape(-1))
    counts = counts.reshape(rows, 2, vocab_size)
    return counts[:, 0], counts[:, 1]


def apply_penalties(logits: mx.array, state: Penalties, lengths: mx.array) -> mx.array:
    """Return logits float32 [B, V] after penalties, for requests with `lengths` int32 [B] tokens so
    far: repetition divides positive and multiplies other logits of seen tokens; then, for output
    tokens, frequency is subtracted for each occurrence and presence once."""
    prompt, output = token_counts(state.history, lengths, state.starts, logits.shape[1])
    factor = state.repetition[:, None]
    changed = mx.where(logits > 0, logits / factor, logits * factor)
    result = mx.where(prompt + output > 0, changed, logits)
    result = result - _rounded(output.astype(mx.float32) * state.frequency[:, None])
    return result - (output > 0).astype(mx.float32) * state.presence[:, None]


def apply_bias(logits: mx.array, state: Bias[mx.array], positions: mx.array) -> mx.array:
    """Return logits float32 [B, V] plus those entries of the state that are active at positions
    int32 [B]: entries with `until` above their row's position."""
    active = mx.take(positions, state.rows) < state.until
    values = mx.where(active, state.values, 0.0)
    places = state.rows * logits.shape[1] + state.ids
    return logits.reshape(-1).at[places].add(values).reshape(logits.shape)


def apply_masks(logits: mx.array, state: Masks[mx.array]) -> mx.array:
    """Return logits float [B, V] with -inf where the masks of the rows that the state lists forbid
    a token; other rows stay."""
    allowed = unpack_bitmask(state.words, logits.shape[1])
    masked = mx.where(allowed, mx.take(logits, state.rows, axis=0), -float("inf"))
    places = mx.broadcast_to(state.rows[:, None], masked.shape)
    return mx.put_along_axis(logits, places, masked, axis=0)


def unpack_bitmask(words: mx.array, vocab_size: int) -> mx.array:
    """Return bool [M, V] from words int32 or uint32 [M, ceil(V / 32)], lowest bit first; 1 is True:
    allowed."""
    bits = (words.view(mx.uint32)[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab_size] != 0


def _rounded(product: mx.array) -> mx.array:
    """Round the product to float32. Reinterpreting its bits prevents a fused multiply-add with the
    subtraction, which would round once where other devices round twice."""
    return product.view(mx.int32).view(mx.float32)
