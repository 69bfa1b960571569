"""The inputs of one forward, whatever the tensor library: each field is declared here once, in one line, and only here.

A worker stages them by one loop over these declarations, and its batch is a `ForwardInputs` of its own arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglcore.device.batch import CaptureHiddenMode, ForwardMode, ScheduleBatch
from sglcore.device.plan import StepPlan
from sglcore.step.fields import Axis, Once, Split, When, batch_field, batch_record, fill_once, sentinel, zero

Array = TypeVar("Array")
Ints = NDArray[np.int32]
REQUESTS, TOKENS, NONE = Axis.REQUESTS, Axis.TOKENS, Axis.NONE
EXTEND, WINDOWS, IF_GIVEN = When.EXTEND, When.WINDOWS, When.IF_GIVEN
_ONE = np.array(1, np.int32)
"""An array, so that no scalar is converted at each step."""


def _seq_lens(batch: ScheduleBatch, values: Mapping[str, Any]) -> Ints:
    given = batch.seq_lens_cpu_cache.take()
    return batch.seq_lens if given is None else given


def _extend_seq_lens(batch: ScheduleBatch, values: Mapping[str, Any]) -> Ints:
    return np.diff(batch.token_offsets)


def _extend_start_loc(batch: ScheduleBatch, values: Mapping[str, Any]) -> Ints:
    return batch.token_offsets[:-1]


def _positions(batch: ScheduleBatch, values: Mapping[str, Any]) -> Ints:
    lengths = values.get("extend_seq_lens")
    if lengths is None:
        return values["seq_lens"] - _ONE
    offsets = np.repeat(batch.prefix_lens - values["extend_start_loc"], lengths)
    return offsets + np.arange(batch.num_tokens, dtype=np.int32)


def _window_seq_lens(batch: ScheduleBatch, values: Mapping[str, Any]) -> Ints | None:
    return None if batch.window_starts is None else values["seq_lens"] - batch.window_starts


def _window_positions(batch: ScheduleBatch, values: Mapping[str, Any]) -> Ints | None:
    starts, lengths = batch.window_starts, values.get("extend_seq_lens")
    if starts is None:
        return None
    return values["positions"] - (starts if lengths is None else np.repeat(starts, lengths))


@batch_record(ScheduleBatch)
class NgramEmbeddingInfo(Generic[Array]):
    """Inputs of n-gram embeddings: where in its row of the token history each request's tokens of this step start, and
    how many there are. int32[B] each."""

    column_starts: Array | None = batch_field(
        axis=REQUESTS, split=Split.ADVANCE, dtype="int32", padding=zero(), read="ngram_starts", when=IF_GIVEN
    )
    req_lens: Array | None = batch_field(
        axis=REQUESTS, split=Split.CLIP, dtype="int32", padding=zero(), read="ngram_lens", when=IF_GIVEN
    )


@batch_record(ScheduleBatch)
class ForwardInputs(Generic[Array]):
    """B requests and T tokens; a padded view has more rows than `num_token_non_padded` says are real.

    Negative input ids stand for tokens that only the device knows; on decode all are. Cells are indices into the KV pool.
    `extend_*` are None when every row brings one token. `*_cpu` are host mirrors, None
    only where the device alone knows the lengths, which never is on one whose facts say `needs_host_lengths`.
    `window_*` is the same as layers with windows see it, whose requests begin at `ScheduleBatch.window_starts` and whose
    cells are indices into a pool of their own; None where the worker keeps none.
    `width`: a decode has so many rows of each request, whose tokens follow one another, the last of them perhaps of slot 0 instead,
    and the host's lengths are the most that they can be; None: one row, and its length.
    `visible` int32[B]: bit 31 - d of a row says whether it sees the cell d before its own; cells from 32 before it on are seen always,
    and -1 is a row that sees all. Where it is given a row's cell is at `seq_lens` - 1, and `positions` are where it stands in its text.
    `run_*` int32[T], on decodes of several rows of each request, by a model with states: those of one request are a run, whose first
    row has the slot of its state, the slot that the state is written to (0: none) and how many rows it has, and all others 0; and each
    row's place among what is kept of such a decode, counted from 1, 0 for nobody's.
    `features` [T, F]: what a target model made of each token, for the model that proposes the next ones.
    `global_num_tokens` int32[ranks] counts tokens on every data-parallel rank; `step_plan` is what all of them agreed on.
    """

    forward_mode: ForwardMode = batch_field(axis=NONE, split=Split.COPY, read="forward_mode", default=ForwardMode.IDLE)
    batch_size: int = batch_field(axis=NONE, split=Split.CLIP, read="batch_size", default=0)
    num_tokens: int = batch_field(axis=NONE, split=Split.CLIP, read="num_tokens", default=0)
    width: int | None = batch_field(axis=NONE, split=Split.COPY, owner="speculative")

    req_pool_indices: Array = batch_field(axis=REQUESTS, dtype="int32", padding=zero(), read="slots")
    seq_lens: Array = batch_field(axis=REQUESTS, split=Split.CLIP, dtype="int32", padding=sentinel(1), read=_seq_lens)
    visible: Array | None = batch_field(
        axis=REQUESTS, dtype="int32", padding=sentinel(-1), owner="speculative", when=IF_GIVEN
    )
    run_slots: Array | None = batch_field(
        axis=REQUESTS, dtype="int32", padding=zero(), owner="speculative", when=IF_GIVEN
    )
    run_targets: Array | None = batch_field(
        axis=REQUESTS, dtype="int32", padding=zero(), owner="speculative", when=IF_GIVEN
    )
    run_lens: Array | None = batch_field(
        axis=REQUESTS, dtype="int32", padding=zero(), owner="speculative", when=IF_GIVEN
    )
    run_rows: Array | None = batch_field(
        axis=REQUESTS, dtype="int32", padding=zero(), owner="speculative", when=IF_GIVEN
    )
    extend_prefix_lens: Array | None = batch_field(
        axis=REQUESTS, split=Split.CLIP, dtype="int32", padding=zero(), read="prefix_lens", when=EXTEND
    )
    extend_seq_lens: Array | None = batch_field(
        axis=REQUESTS, split=Split.CLIP, dtype="int32", padding=sentinel(1), read=_extend_seq_lens, when=EXTEND
    )
    extend_start_loc: Array | None = batch_field(
        axis=REQUESTS, split=Split.CLIP, dtype="int32", padding=zero(), read=_extend_start_loc, when=EXTEND
    )
    input_ids: Array = batch_field(
        axis=TOKENS, dtype="int32", padding=zero(), read="input_ids", when=EXTEND, owner="token table"
    )
    positions: Array = batch_field(axis=TOKENS, dtype="int32", padding=zero(), read=_positions)
    out_cache_loc: Array | None = batch_field(axis=TOKENS, dtype="int64", padding=zero(), owner="pool")
    window_seq_lens: Array | None = batch_field(
        axis=REQUESTS, split=Split.CLIP, dtype="int32", padding=sentinel(1), read=_window_seq_lens, when=WINDOWS
    )
    window_positions: Array | None = batch_field(
        axis=TOKENS, dtype="int32", padding=zero(), read=_window_positions, when=WINDOWS
    )
    window_cache_loc: Array | None = batch_field(
        axis=TOKENS, dtype="int64", padding=zero(), owner="window pool", when=WINDOWS
    )
    num_token_non_padded: Array = batch_field(
        axis=NONE, split=Split.COUNT, dtype="int32", padding=fill_once(0), owner="registry"
    )
    global_num_tokens: Array | None = batch_field(
        axis=NONE, split=Split.DROP, dtype="int32", padding=fill_once(0), owner="parallel", when=IF_GIVEN
    )

    seq_lens_cpu: Ints | None = batch_field(axis=REQUESTS, split=Split.CLIP, mirror="seq_lens")
    extend_prefix_lens_cpu: Ints | None = batch_field(axis=REQUESTS, split=Split.CLIP, mirror="extend_prefix_lens")
    extend_seq_lens_cpu: Ints | None = batch_field(
        axis=REQUESTS, split=Split.CLIP, mirror="extend_seq_lens", when=EXTEND
    )
    window_seq_lens_cpu: Ints | None = batch_field(
        axis=REQUESTS, split=Split.CLIP, mirror="window_seq_lens", when=WINDOWS
    )

    token_type_ids: Array | None = batch_field(
        axis=TOKENS, dtype="int32", padding=zero(), read="token_type_ids", when=IF_GIVEN
    )
    mrope_positions: Array | None = batch_field(
        axis=TOKENS, dtype="int32", padding=zero(), read="mrope_positions", when=IF_GIVEN, lead=(3,)
    )
    input_embeds: Array | None = batch_field(axis=TOKENS, owner="embedding", when=IF_GIVEN)
    features: Array | None = batch_field(axis=TOKENS, padding=zero(), owner="target model", when=IF_GIVEN)
    ngram_embedding_info: NgramEmbeddingInfo[Array] | None = batch_field(
        axis=NONE, split=Split.NESTED, record=NgramEmbeddingInfo, when=IF_GIVEN
    )

    capture_hidden_mode: CaptureHiddenMode = batch_field(
        axis=NONE, split=Split.COPY, read=Once("capture_hidden_mode"), default=CaptureHiddenMode.NONE
    )
    return_hidden_states_before_norm: bool = batch_field(
        axis=NONE, split=Split.COPY, read=Once("return_hidden_states_before_norm"), default=False
    )
    step_plan: StepPlan | None = batch_field(axis=NONE, split=Split.DROP, read="step_plan", when=IF_GIVEN)
    sampling: Any = batch_field(axis=NONE, split=Split.DROP, owner="sampler", when=IF_GIVEN)
    spec_info: Any = batch_field(axis=NONE, split=Split.NESTED, owner="speculative", when=IF_GIVEN)
