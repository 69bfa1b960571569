"""Changes of logits before the draw: penalties, bias with early bans, and masks. Elementwise, no
host reads.

The token counts of a penalty are inputs of the forward. Nothing accumulates, so running twice
changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sglcore.sampling.state import Bias, Masks


@dataclass(frozen=True, slots=True)
class PenaltyState:
    """Penalties of R rows of the batch; every float tensor is float32[R]. Rows without penalties
    keep their logits bit for bit.
    """

    rows: Tensor | None
    """int32[R], distinct rows of the batch; None = all rows, in order (for captured graphs)."""
    seen: Tensor
    """bool[R, V]: the token occurs in prompt or output."""
    output_counts: Tensor
    """int32[R, V]: occurrences in the output."""
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """The constant part of the penalties of R rows: int32[R] `rows` of the batch (None: all rows,
    in order), int32[R] `starts` (the start of each output), and the float32[R] parameters.
    """

    rows: Tensor | None
    starts: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


def token_counts(history: Tensor, lengths: Tensor, starts: Tensor, vocab_size: int) -> Tensor:
    """Return occurrences int32[R, V] of tokens at positions starts..lengths-1 of history int32[R,
    L]; starts and lengths are int32[R].

    Entries outside that range may hold anything. Ids outside the vocabulary (placeholders) are not
    counted.
    """
    positions = torch.arange(history.shape[1], dtype=torch.int32, device=history.device)
    inside = (positions >= starts[:, None]) & (positions < lengths[:, None])
    inside &= (history >= 0) & (history < vocab_size)
    counts = torch.zeros(history.shape[0], vocab_size, dtype=torch.int32, device=history.device)
    return counts.scatter_add_(1, history.clamp(0, vocab_size - 1), inside.to(torch.int32))


def place_penalties(parts: Mapping[str, Tensor], rows: Tensor | None) -> PenaltyRows:
    """Make the constant part of the penalties from `parts`, the device's views of `penalty_arrays`
    by name, for rows int32[R] (None: all rows).
    """
    return PenaltyRows(rows, *(parts[name] for name in ("prompt_len", "repetition", "presence", "frequency")))


def count_penalties(rows: PenaltyRows, history: Tensor, lengths: Tensor, vocab_size: int) -> PenaltyState:
    """Return the penalties of these rows for history int32[R, L], their prompt and output tokens,
    and lengths int32[R], the tokens of each row that count. No host reads.
    """
    return PenaltyState(
        rows.rows,
        token_counts(history, lengths, torch.zeros_like(rows.starts), vocab_size) > 0,
        token_counts(history, lengths, rows.starts, vocab_size),
        rows.repetition,
        rows.presence,
        rows.frequency,
    )


def penalise(logits: Tensor, state: PenaltyState) -> Tensor:
    """Return new float32[R, V] from logits float32[R, V] of the state's rows. For tokens in prompt
    or output, the repetition penalty divides positive logits and multiplies others. For output
    tokens, the frequency penalty is subtracted per occurrence and the presence penalty once.
    """
    factor = state.repetition[:, None]
    changed = torch.where(logits > 0, logits / factor, logits * factor)
    result = torch.where(state.seen, changed, logits)
    result -= state.output_counts * state.frequency[:, None]
    result -= (state.output_counts > 0) * state.presence[:, None]
    return result


def apply_penalties_(logits: Tensor, state: PenaltyState) -> Tensor:
    """Penalise the state's rows of logits float32[B, V] in place; return the logits."""
    if state.rows is None:
        return logits.copy_(penalise(logits, state))
    return logits.index_put_((state.rows,), penalise(logits.index_select(0, state.rows), state))


def apply_bias_(logits: Tensor, state: Bias[Tensor], positions: Tensor) -> Tensor:
    """Add the entries that are active at positions int32[B] to contiguous logits float32[B, V], in
    place; return the logits.
    """
    active = positions.index_select(0, state.rows) < state.until
    values = torch.where(active, state.values, torch.zeros_like(state.values))
    return logits.index_put_((state.rows, state.ids), values, accumulate=True)


def apply_masks_(logits: Tensor, state: Masks[Tensor]) -> Tensor:
    """Set logits float[B, V] of the state's rows to -inf for tokens that are not allowed, in place;
    return the logits.
    """
    banned = ~unpack_bitmask(state.words, logits.shape[1])
    return logits.index_put_((state.rows,), logits.index_select(0, state.rows).masked_fill_(banned, -torch.inf))


def unpack_bitmask(words: Tensor, vocab_size: int) -> Tensor:
    """Return bool[M, V] from int32[M, ceil(V / 32)], lowest bit first, 1 = allowed."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = (words[:, :, None] >> shifts).bitwise_and_(1)
    return bits.view(words.shape[0], words.shape[1] * 32)[:, :vocab_size].bool()
