"""What a draw needs and gives, in arrays `A` of whichever library draws, and the host arrays that it is made of.

No tensor library.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from sglcore.sampling.batch import SamplingBatch, SamplingNeeds

A = TypeVar("A")
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Bias(Generic[A]):
    """Additions to single logits, E entries. One counts while the position to be drawn is below its `until`."""

    rows: A
    """int[E]"""
    ids: A
    """int[E]"""
    values: A
    """float32[E]"""
    until: A
    """int32[E]"""


@dataclass(frozen=True, slots=True)
class Masks(Generic[A]):
    """The tokens that M rows may draw. Other rows are left bit for bit as they are."""

    rows: A
    """int[M], distinct rows of the batch."""
    words: A
    """int32[M, ceil(V / 32)], lowest bit first, 1 = allowed (the layout of grammar libraries)."""


@dataclass(frozen=True, slots=True)
class SamplingState(Generic[A, P]):
    """What one sampling call needs; `P` are the library's penalties. A part that no row wants is None, except where wider
    `needs` were asked for."""

    needs: SamplingNeeds
    positions: A
    """int32[B]: the sequence index of the token to be drawn."""
    seed_words: A
    """int32[B, 2]"""
    scale: A
    """float32[B]: 2**16 / temperature."""
    greedy: A
    """bool[B]"""
    top_k: A | None = None
    """int32[B]"""
    top_p: A | None = None
    """int32[B], in 2**-24"""
    min_p: A | None = None
    """int32[B], the largest gap kept"""
    penalties: P | None = None
    bias: Bias[A] | None = None
    masks: Masks[A] | None = None


@dataclass(frozen=True, slots=True)
class Logprobs(Generic[A]):
    """Of N rows. Ranks and lists order by (logprob descending, id ascending), so entry i of a list has rank i + 1."""

    chosen: A
    """float32[N]"""
    ranks: A
    """int32[N], 1 = the most likely token."""
    top_ids: A
    """int32[N, K]"""
    top: A
    """float32[N, K]"""


@dataclass(frozen=True, slots=True)
class SampledTokens(Generic[A]):
    """token_ids int32[B]; bad_rows bool[B]: logits held NaN, +inf or nothing else than -inf, and the token is 0."""

    token_ids: A
    bad_rows: A
    logprobs: Logprobs[A] | None = None


def state_arrays(batch: SamplingBatch, needs: SamplingNeeds) -> dict[str, np.ndarray]:
    """What the state of a host batch is made of, by name; penalties apart."""
    arrays = {"seed_words": batch.seed_words, "scale": batch.scale, "greedy": batch.greedy}
    if needs.any_top_k:
        arrays["top_k"] = batch.top_k
    if needs.any_top_p:
        arrays["top_p"] = batch.top_p
    if needs.any_min_p:
        arrays["min_p"] = batch.min_p
    if needs.any_bias:
        arrays["bias_rows"], arrays["bias_ids"] = batch.bias_rows(), batch.bias_ids
        arrays["bias_values"], arrays["bias_until"] = batch.bias_values, batch.bias_until
    return arrays


def penalty_arrays(batch: SamplingBatch, all_rows: bool = False) -> dict[str, np.ndarray]:
    """What the penalties of a host batch are made of, by name: of its `penalty_rows`, or of all rows."""
    rows = None if all_rows else batch.penalty_rows()
    own = batch if rows is None else batch.select(rows)
    arrays = {} if rows is None else {"penalty_rows": rows}
    return arrays | {
        "prompt_len": own.prompt_len,
        "repetition": own.repetition,
        "presence": own.presence,
        "frequency": own.frequency,
    }
