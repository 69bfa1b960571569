"""Inputs and outputs of a draw in arrays `A` of any library, and the host arrays from which the
inputs are made.

No tensor library.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

import numpy as np

from sglcore.sampling.noise import OFF, TOP_P_OFF
from sglcore.sampling.params_batch import SamplingBatch, SamplingNeeds

A = TypeVar("A")
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Bias(Generic[A]):
    """Additions to single logits, E entries. An entry is active while the position of the sampled
    token is below its `until`.
    """

    rows: A
    """int[E]: the row of the batch. Rows may repeat."""
    ids: A
    """int[E]: the token."""
    values: A
    """float32[E]: the value to add to its logit; -inf bans it."""
    until: A
    """int32[E]: the position at which the entry ends."""


@dataclass(frozen=True, slots=True)
class Masks(Generic[A]):
    """The tokens that M rows may sample. Other rows keep their logits bit for bit."""

    rows: A
    """int[M], distinct rows of the batch."""
    words: A
    """int32[M, ceil(V / 32)], lowest bit first, 1 = allowed (the layout of grammar libraries)."""


@dataclass(frozen=True, slots=True)
class Exclusion(Generic[A]):
    """XTC of M rows with their cut-offs, which apply before XTC; the draw itself uses no cut-offs
    for these rows. A cut-off is None if none of the rows has it.
    """

    rows: A
    """int[M], distinct rows of the batch. The next fields are int32[M]."""
    chance: A
    """Probability of dropping the top tokens, in 2**-24."""
    share: A
    """Share of the total weight from which a token is a top token, in 2**-24."""
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
    """Log-probabilities of N rows. Ranks and lists are ordered by (logprob descending, id
    ascending), so entry i of a list has rank i + 1.
    """

    chosen: A
    """float32[N]: log-probability of the chosen token."""
    ranks: A
    """int32[N]: rank of the chosen token, 1 = the most likely token."""
    top_ids: A
    """int32[N, K]: the K most likely tokens."""
    top: A
    """float32[N, K]: their log-probabilities."""


@dataclass(frozen=True, slots=True)
class SampledTokens(Generic[A]):
    """token_ids int32[B]; bad_rows bool[B]: the logits had NaN, +inf or only -inf, and the token is
    0. `logprobs` is None if no row requests log-probabilities.
    """

    token_ids: A
    bad_rows: A
    logprobs: Logprobs[A] | None = None


def state_arrays(batch: SamplingBatch, needs: SamplingNeeds) -> dict[str, np.ndarray]:
    """Return the arrays of a host batch's sampling state, by name, without penalties. Arrays of a
    cut-off, XTC or biases are present only if `needs` names them. Rows with XTC have no cut-off in
    `top_k`, `top_p` and `min_p`; theirs are in `xtc_top_k` and so on.
    """
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
"""The cut-offs, and their values in a row that has none."""


def _cut_offs(batch: SamplingBatch, rows: np.ndarray) -> dict[str, np.ndarray | None]:
    """Return the cut-offs of these rows (indices, those with XTC), by name as `xtc_top_k`; None for
    a cut-off that none of them has.
    """
    found = {name: (getattr(batch, name)[rows], off) for name, off in CUT_OFFS.items()}
    return {f"xtc_{name}": values if (values != off).any() else None for name, (values, off) in found.items()}


CHANGE_ARRAYS = ("change_rows", "change_ids", "change_values", "change_until")
"""Names of the arrays with the logit additions of one step."""


def place_changes(parts: Mapping[str, A]) -> Bias[A] | None:
    """Return the logit additions of this step from the device's arrays named in CHANGE_ARRAYS, or
    None if these are absent.
    """
    return Bias(*(parts[name] for name in CHANGE_ARRAYS)) if CHANGE_ARRAYS[0] in parts else None


def place_exclusion(needs: SamplingNeeds, parts: Mapping[str, A]) -> Exclusion[A] | None:
    """Return the XTC inputs from the device's copies of `state_arrays`, or None if `needs` has no
    XTC.
    """
    if not needs.any_xtc:
        return None
    always = (parts[f"xtc_{name}"] for name in ("rows", "chance", "share"))
    return Exclusion(*always, *(parts.get(f"xtc_{name}") for name in CUT_OFFS))


def penalty_arrays(batch: SamplingBatch, all_rows: bool = False) -> dict[str, np.ndarray]:
    """Return the arrays of a host batch's penalties, by name: `prompt_len`, `repetition`,
    `presence` and `frequency` for its `penalty_rows`, and these indices as `penalty_rows`; or, with
    `all_rows`, the four for all rows.
    """
    rows = None if all_rows else batch.penalty_rows()
    own = batch if rows is None else batch.select(rows)
    arrays = {} if rows is None else {"penalty_rows": rows}
    return arrays | {
        "prompt_len": own.prompt_len,
        "repetition": own.repetition,
        "presence": own.presence,
        "frequency": own.frequency,
    }
