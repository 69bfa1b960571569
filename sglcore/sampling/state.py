"""What a draw needs and gives, in arrays `A` of whichever library draws, and the host arrays that it is made of.

No tensor library.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

import numpy as np

from sglcore.sampling.batch import SamplingBatch, SamplingNeeds
from sglcore.sampling.noise import OFF, TOP_P_OFF

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
class Exclusion(Generic[A]):
    """XTC of M rows, which replaces their cut-offs: theirs apply before it, and the draw has none for them."""

    rows: A
    """int[M], distinct rows of the batch. What follows is int32[M]."""
    chance: A
    """Of leaving out the top tokens, in 2**-24."""
    share: A
    """Of the weight, that makes a token one of them, in 2**-24."""
    top_k: A | None
    top_p: A | None
    min_p: A | None


@dataclass(frozen=True, slots=True)
class SamplingState(Generic[A, P]):
    """What one sampling call of B rows needs, in the library's arrays. A part that no row needs is
    None, except where wider `needs` were requested.
    """

    needs: SamplingNeeds
    """Which code the call runs."""
    positions: A
    """int32[B]: the sequence index of the token to be drawn."""
    seed_words: A
    """int32[B, 2]: seed and sample index, mixed."""
    scale: A
    """float32[B]: 2**16 / temperature."""
    greedy: A
    """bool[B]: the row is greedy."""
    top_k: A | None = None
    """int32[B]: tokens kept."""
    top_p: A | None = None
    """int32[B], in units of 2**-24."""
    min_p: A | None = None
    """int32[B]: the largest gap kept, in 2**-16 nat."""
    penalties: P | None = None
    """Penalties, in the library's own form."""
    bias: Bias[A] | None = None
    """Logit biases and bans."""
    masks: Masks[A] | None = None
    """Grammar masks."""
    xtc: Exclusion[A] | None = None
    """XTC, of the rows that have it."""
    changes: Bias[A] | None = None
    """Logit changes of this step alone, in addition to `bias`."""


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
    plain = batch.xtc_chance == 0
    if needs.any_top_k:
        arrays["top_k"] = np.where(plain, batch.top_k, np.int32(OFF))
    if needs.any_top_p:
        arrays["top_p"] = np.where(plain, batch.top_p, np.int32(TOP_P_OFF))
    if needs.any_min_p:
        arrays["min_p"] = np.where(plain, batch.min_p, np.int32(OFF))
    if needs.any_xtc:
        rows = arrays["xtc_rows"] = batch.xtc_rows()
        arrays |= {name: getattr(batch, name)[rows] for name in ("xtc_chance", "xtc_share")}
        arrays |= {name: cut for name, cut in _cut_offs(batch, rows).items() if cut is not None}
    if needs.any_bias:
        arrays["bias_rows"], arrays["bias_ids"] = batch.bias_rows(), batch.bias_ids
        arrays["bias_values"], arrays["bias_until"] = batch.bias_values, batch.bias_until
    return arrays


CUT_OFFS: Mapping[str, int] = MappingProxyType({"top_k": OFF, "top_p": TOP_P_OFF, "min_p": OFF})
"""And what each is in a row without it."""


def _cut_offs(batch: SamplingBatch, rows: np.ndarray) -> dict[str, np.ndarray | None]:
    """Those of the rows of XTC, None where none of them has one."""
    found = {name: (getattr(batch, name)[rows], off) for name, off in CUT_OFFS.items()}
    return {f"xtc_{name}": values if (values != off).any() else None for name, (values, off) in found.items()}


CHANGE_ARRAYS = ("change_rows", "change_ids", "change_values", "change_until")
"""The arrays of what a step adds to single logits."""


def place_changes(parts: Mapping[str, A]) -> Bias[A] | None:
    """It, from the device's arrays; None: nothing."""
    return Bias(*(parts[name] for name in CHANGE_ARRAYS)) if CHANGE_ARRAYS[0] in parts else None


def place_exclusion(needs: SamplingNeeds, parts: Mapping[str, A]) -> Exclusion[A] | None:
    """XTC from the device's arrays of those of `state_arrays`."""
    if not needs.any_xtc:
        return None
    always = (parts[f"xtc_{name}"] for name in ("rows", "chance", "share"))
    return Exclusion(*always, *(parts.get(f"xtc_{name}") for name in CUT_OFFS))


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
