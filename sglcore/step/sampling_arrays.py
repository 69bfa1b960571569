"""The sampling inputs of a host batch, as named arrays that a worker only has to copy to its
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglcore.sampling.noise import OFF
from sglcore.sampling.params_batch import SamplingBatch, SamplingNeeds
from sglcore.sampling.state import CHANGE_ARRAYS, Logprobs, penalty_arrays, state_arrays
from sglcore.step.emitting_rows import RowPlan, last_tokens
from sglcore.worker.schedule_batch import Ints, ScheduleBatch

PROMPT_LOGITS_ELEMENTS = 1 << 24
"""Prompt log-probabilities are computed for this many logits at a time, so that a long prompt does
not need vocabulary-sized memory for each token.
"""


@dataclass(frozen=True, slots=True)
class BatchSampling:
    """Sampling inputs that stay valid for one composition (the same requests in the same rows): its
    `number`, the `needs` of the emitting rows, and `penalised` int32[R], the indices of those with
    penalties among the emitting rows.
    """

    number: int
    needs: SamplingNeeds
    penalised: Ints

    def longest(self, batch: ScheduleBatch, rows: RowPlan) -> int:
        """Return the number of tokens of the longest row with penalties. There must be at least one
        such row.
        """
        return int(rows.select(batch.seq_lens)[self.penalised].max())


NO_SAMPLING = BatchSampling(-1, SamplingNeeds(), np.zeros(0, np.int32))
"""The value before the first step."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row with prompt log-probabilities: the batch's row number `row`, its tokens [start, end) of
    the step that are scored, the index `first` of its first target in the array `targets`, and the
    number of alternatives `top_n`.
    """

    row: int
    start: int
    end: int
    first: int
    top_n: int


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Inputs that the device needs to sample one step: host `arrays` by name. A name is absent if
    the step does not need it.

    - `positions` and `last` int32[N]: lengths of the emitting rows and indices of their last
      tokens, unless each row emits for its only token.
    - `mask_rows` int32[M] (index among the emitting rows) and `masks`.
    - CHANGE_ARRAYS: logit additions of this step.
    - `targets`: the tokens that the `scored` rows predict.
    - For a composition that is `new` (None: the worker has its state): `slots` int32[N], and the
      arrays of `state_arrays` and `penalty_arrays`.
    """

    arrays: Mapping[str, NDArray]
    new: BatchSampling | None = None
    scored: Sequence[ScoredRow] = ()


NO_INPUTS = SamplingInputs(MappingProxyType({}))


def sampling_inputs(batch: ScheduleBatch, rows: RowPlan, known: int, all_rows: bool = False) -> SamplingInputs:
    """Return the sampling inputs of a batch, for a worker that already has the state of composition
    `known`; they lack that state if the batch's composition is the same. Host work only.

    `all_rows`: include penalties of all emitting rows, not only of rows that have some.
    """
    is_known = batch.composition == known
    if is_known and rows.emitting is None and batch.prompt_logprobs is None and batch.masks is None:
        return NO_INPUTS
    arrays: dict[str, NDArray] = {}
    if rows.emitting is not None:
        arrays["positions"], arrays["last"] = rows.select(batch.seq_lens), last_tokens(batch, rows)
    new = None if is_known else _add_state(arrays, batch, rows, all_rows)
    if batch.masks is not None and batch.mask_rows is not None:
        arrays["mask_rows"], arrays["masks"] = rows.places(batch.mask_rows), batch.masks
        arrays |= _changes(batch, rows)
    return SamplingInputs(arrays, new, _add_targets(arrays, batch))


def _changes(batch: ScheduleBatch, rows: RowPlan) -> dict[str, NDArray]:
    """Return the arrays of CHANGE_ARRAYS: the batch's `change_*` additions to logits, which hold
    for this step only (such as those of DRY). {} if there are none."""
    if batch.change_rows is None or batch.change_ids is None or batch.change_values is None:
        return {}
    always = np.full_like(batch.change_ids, OFF)
    values = (rows.places(batch.change_rows), batch.change_ids, batch.change_values, always)
    return dict(zip(CHANGE_ARRAYS, values, strict=True))


def _add_state(arrays: dict[str, NDArray], batch: ScheduleBatch, rows: RowPlan, all_rows: bool) -> BatchSampling:
    host = batch.sampling
    assert isinstance(host, SamplingBatch)
    host = host if rows.emitting is None else host.select(rows.emitting)
    needs = host.needs
    arrays |= state_arrays(host, needs)
    arrays["slots"] = rows.select(batch.slots)
    if needs.any_penalty:
        arrays |= penalty_arrays(host, all_rows)
    return BatchSampling(batch.composition, needs, host.penalty_rows())


def _add_targets(arrays: dict[str, NDArray], batch: ScheduleBatch) -> Sequence[ScoredRow]:
    """Add to `arrays` the int32 array `targets`: for each token of the rows with prompt
    log-probabilities, the prompt token after it. The last prompt token, which none follows, is not
    scored. Returns these rows; empty, without `targets`, if there are none.
    """
    if batch.prompt_logprobs is None or batch.next_ids is None:
        return ()
    scored: list[ScoredRow] = []
    targets: list[Ints] = []
    first = 0
    for row in np.flatnonzero(batch.prompt_logprobs >= 0).tolist():
        start, end = int(batch.token_offsets[row]), int(batch.token_offsets[row + 1])
        wanted = np.append(batch.input_ids[start + 1 : end], batch.next_ids[row])
        if wanted[-1] < 0:
            wanted, end = wanted[:-1], end - 1
        scored.append(ScoredRow(row, start, end, first, int(batch.prompt_logprobs[row])))
        targets.append(wanted)
        first += len(wanted)
    if targets:
        arrays["targets"] = np.concatenate(targets)
    return scored


def score_prompts(
    inputs: SamplingInputs,
    arrived: Mapping[str, Any],
    hidden: Any,
    vocab_size: int,
    score: Callable[[Any, Any, int], Logprobs[Any]],
    join: Callable[[list[Any]], Any],
) -> dict[int, Logprobs[Any]]:
    """Return prompt log-probabilities by row of the batch, for the `scored` rows of `inputs`.

    The library provides `score(hidden [n, H], targets int32[n], top_n)` and `join(arrays)`, which
    concatenates. `score` is called for parts of a row, each of at most PROMPT_LOGITS_ELEMENTS
    logits (at least one token). `arrived` are the arrays of `inputs` on the device; `hidden` [T, H]
    are the hidden states of the step.
    """
    step = max(1, PROMPT_LOGITS_ELEMENTS // vocab_size)
    found: dict[int, Logprobs[Any]] = {}
    for part in inputs.scored:
        count = part.end - part.start
        pieces = [slice(at, min(at + step, count)) for at in range(0, max(count, 1), step)]
        own, targets = hidden[part.start : part.end], arrived["targets"][part.first : part.first + count]
        scores = [score(own[piece], targets[piece], part.top_n) for piece in pieces]
        columns = ([getattr(each, item.name) for each in scores] for item in fields(Logprobs))
        found[part.row] = scores[0] if len(scores) == 1 else Logprobs(*map(join, columns))
    return found
