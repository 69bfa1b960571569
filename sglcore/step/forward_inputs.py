"""The inputs of one forward, for any tensor library: each field is declared here once, and only
here.

A worker stages them in one loop over these declarations. Its batch is a `ForwardInputs` of its own
arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglcore.step.batch_field import (
    Axis,
    Moved,
    Once,
    Split,
    When,
    Wide,
    batch_field,
    batch_record,
    fill_once,
    sentinel,
    zero,
)
from sglcore.worker.schedule_batch import CaptureHiddenMode, ForwardMode, ScheduleBatch
from sglcore.worker.step_plan import StepPlan

Array = TypeVar("Array")
Ints = NDArray[np.int32]
REQUESTS, TOKENS, NONE = Axis.REQUESTS, Axis.TOKENS, Axis.NONE
PLACED = Wide.PLACED
EXTEND, WINDOWS, IF_GIVEN = When.EXTEND, When.WINDOWS, When.IF_GIVEN
_ONE = np.array(1, np.int32)
"""An array, to avoid a scalar conversion in each step."""


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


def _window_prefix_lens(batch: Any) -> Any:
    return None if batch.extend_seq_lens is None else batch.window_seq_lens - batch.extend_seq_lens


def _window_prefix_lens_cpu(batch: Any) -> Ints | None:
    ends, lengths = batch.window_seq_lens_cpu, batch.extend_seq_lens_cpu
    return None if ends is None or lengths is None else ends - lengths


@batch_record(ScheduleBatch)
class NgramEmbeddingInfo(Generic[Array]):
    """Inputs of n-gram embeddings.

    `previous_ids`: int32[T, k], the k tokens before each token in its text, the nearest first; -1
    before the start of the text.
    """

    previous_ids: Array | None = batch_field(
        axis=TOKENS, dtype="int32", padding=zero(), owner="token table", when=IF_GIVEN
    )


@batch_record(ScheduleBatch)
class ForwardInputs(Generic[Array]):
    """The inputs of one forward: B requests and T tokens, staged from a ScheduleBatch by its
    worker.

    A padded view has more rows than the `num_token_non_padded` real ones. `*_cpu` fields are host
    mirrors; they are None only where the device alone knows the lengths, which never happens if the
    facts of the device or of its attention have `needs_host_lengths`. A KV slot is an index into
    the KV pool.
    """

    forward_mode: ForwardMode = batch_field(axis=NONE, split=Split.COPY, read="forward_mode", default=ForwardMode.IDLE)
    """Forward mode."""
    batch_size: int = batch_field(axis=NONE, split=Split.SIZE, read="batch_size", wide=PLACED, default=0)
    """Number of requests, B."""
    num_tokens: int = batch_field(axis=NONE, split=Split.SIZE, read="num_tokens", wide=PLACED, default=0)
    """Number of tokens, T."""
    width: int | None = batch_field(axis=NONE, split=Split.COPY, owner="speculative")
    """Rows per request in a decode: consecutive tokens; trailing tokens that are not verified have
    slot 0. Host lengths are then upper bounds. None: one row per request, with exact lengths."""

    req_pool_indices: Array = batch_field(axis=REQUESTS, dtype="int32", padding=zero(), read="slots", wide=PLACED)
    """int32[B]: request slots, the indices into the page table."""
    seq_lens: Array = batch_field(
        axis=REQUESTS,
        moved=Moved(by_rest=1),
        dtype="int32",
        padding=sentinel(1),
        read=_seq_lens,
        wide=PLACED,
        in_window="window_seq_lens",
    )
    """int32[B]: number of tokens of each request after this forward."""
    visible: Array | None = batch_field(
        axis=REQUESTS, dtype="int32", padding=sentinel(-1), owner="speculative", when=IF_GIVEN
    )
    """int32[B] (optional): bit 31 - d says whether the row sees the KV slot d before its own. KV
    slots 32 or more before it are always seen; -1 sees all. If given, a row's own KV slot is at
    `seq_lens` - 1, and `positions` are its positions in the text. None: rows see all KV slots
    before their own."""
    run_slots: Array | None = batch_field(
        axis=REQUESTS, dtype="int32", padding=zero(), owner="speculative", when=IF_GIVEN
    )
    """int32[T] (optional): for a decode with several rows per request, by a model with recurrent
    states. The rows of one request are a run: the first row has the request slot of the state, the
    others 0."""
    run_targets: Array | None = batch_field(
        axis=REQUESTS, dtype="int32", padding=zero(), owner="speculative", when=IF_GIVEN
    )
    """int32[T] (optional): at the first row of a run, the request slot to which the state is
    written (0: none); 0 at other rows."""
    run_lens: Array | None = batch_field(
        axis=REQUESTS, dtype="int32", padding=zero(), owner="speculative", when=IF_GIVEN
    )
    """int32[T] (optional): at the first row of a run, its number of rows; 0 at other rows."""
    run_rows: Array | None = batch_field(
        axis=REQUESTS, dtype="int32", padding=zero(), owner="speculative", when=IF_GIVEN
    )
    """int32[T] (optional): index, from 1, at which the state inputs of each row are kept. 0: they
    are not kept."""
    extend_prefix_lens: Array | None = batch_field(
        axis=REQUESTS,
        moved=Moved(by_skipped=1),
        dtype="int32",
        padding=zero(),
        read="prefix_lens",
        when=EXTEND,
        in_window=_window_prefix_lens,
    )
    """int32[B]: number of tokens of each request in the KV pool before this forward. None: every
    request has one new token."""
    extend_seq_lens: Array | None = batch_field(
        axis=REQUESTS,
        moved=Moved(by_skipped=-1, by_rest=1),
        dtype="int32",
        padding=sentinel(1),
        read=_extend_seq_lens,
        when=EXTEND,
    )
    """int32[B]: number of new tokens of each request. None: every request has one."""
    extend_start_loc: Array | None = batch_field(
        axis=REQUESTS, split=Split.SIZE, dtype="int32", padding=zero(), read=_extend_start_loc, when=EXTEND
    )
    """int32[B]: index of each request's first token among the T. None: each request has one."""
    input_ids: Array = batch_field(
        axis=TOKENS, dtype="int32", padding=zero(), read="input_ids", when=EXTEND, owner="token table", wide=PLACED
    )
    """int32[T]: token ids. A negative id stands for a token that only the device knows; in a decode
    step all are negative."""
    positions: Array = batch_field(
        axis=TOKENS,
        dtype="int32",
        padding=zero(),
        read=_positions,
        wide=PLACED,
        in_window="window_positions",
    )
    """int32[T]: each token's position in its text."""
    out_cache_loc: Array | None = batch_field(
        axis=TOKENS, dtype="int64", padding=zero(), owner="pool", in_window="window_cache_loc"
    )
    """int64[T]: the KV slot to which each token is written. None: the forward writes none."""
    window_seq_lens: Array | None = batch_field(
        axis=REQUESTS,
        moved=Moved(by_rest=1),
        dtype="int32",
        padding=sentinel(1),
        read=_window_seq_lens,
        when=WINDOWS,
        wide=PLACED,
    )
    """int32[B]: `seq_lens` as sliding-window layers see it, counted from
    `ScheduleBatch.window_starts`. None: the worker has no sliding-window pages. The same holds for
    `window_positions` and `window_cache_loc`."""
    window_positions: Array | None = batch_field(
        axis=TOKENS, dtype="int32", padding=zero(), read=_window_positions, when=WINDOWS, wide=PLACED
    )
    """int32[T]: `positions`, counted from the same starts."""
    window_cache_loc: Array | None = batch_field(
        axis=TOKENS, dtype="int64", padding=zero(), owner="window pool", when=WINDOWS
    )
    """int64[T]: `out_cache_loc` in the pool of the sliding-window layers."""
    num_token_non_padded: Array = batch_field(
        axis=NONE, split=Split.COUNT, dtype="int32", padding=fill_once(0), owner="registry"
    )
    """int32[1]: number of real token rows; the others are padding."""

    seq_lens_cpu: Ints | None = batch_field(
        axis=REQUESTS, split=Split.CLIP, mirror="seq_lens", in_window="window_seq_lens_cpu"
    )
    """int32[B]: the host mirror of `seq_lens`."""
    extend_prefix_lens_cpu: Ints | None = batch_field(
        axis=REQUESTS, split=Split.CLIP, mirror="extend_prefix_lens", in_window=_window_prefix_lens_cpu
    )
    """int32[B]: the host mirror of `extend_prefix_lens`."""
    extend_seq_lens_cpu: Ints | None = batch_field(
        axis=REQUESTS, split=Split.CLIP, mirror="extend_seq_lens", when=EXTEND
    )
    """int32[B]: the host mirror of `extend_seq_lens`."""
    window_seq_lens_cpu: Ints | None = batch_field(
        axis=REQUESTS, split=Split.CLIP, mirror="window_seq_lens", when=WINDOWS
    )
    """int32[B]: the host mirror of `window_seq_lens`."""

    token_type_ids: Array | None = batch_field(
        axis=TOKENS, dtype="int32", padding=zero(), read="token_type_ids", when=IF_GIVEN
    )
    """int32[T]: the segment of each token in its text. None: segment 0."""
    mrope_positions: Array | None = batch_field(
        axis=TOKENS, dtype="int32", padding=zero(), read="mrope_positions", when=IF_GIVEN, lead=(3,)
    )
    """int32[3, T]: time, height and width positions. None: each token's three are equal."""
    input_embeds: Array | None = batch_field(axis=TOKENS, owner="embedding", when=IF_GIVEN)
    """[T, H]: embeddings in place of those of `input_ids`. None: the model looks them up."""
    features: Array | None = batch_field(axis=TOKENS, padding=zero(), owner="target model", when=IF_GIVEN)
    """[T, F]: the target model's hidden features of each token, for a draft model. None: the
    forward reads none."""
    ngram_embedding_info: NgramEmbeddingInfo[Array] | None = batch_field(
        axis=NONE, split=Split.NESTED, record=NgramEmbeddingInfo, when=IF_GIVEN
    )
    """Inputs of n-gram embeddings. None: the model has none."""

    capture_hidden_mode: CaptureHiddenMode = batch_field(
        axis=NONE, split=Split.COPY, read=Once("capture_hidden_mode"), default=CaptureHiddenMode.NONE
    )
    """Which hidden states the forward returns."""
    return_hidden_states_before_norm: bool = batch_field(
        axis=NONE, split=Split.COPY, read=Once("return_hidden_states_before_norm"), default=False
    )
    """Return the hidden states before the last norm."""
    step_plan: StepPlan | None = batch_field(axis=NONE, split=Split.DROP, read="step_plan", when=IF_GIVEN)
    """The plan that the data-parallel shards agreed on. None: there is one shard."""
    sampling: Any = batch_field(axis=NONE, split=Split.DROP, owner="sampler", when=IF_GIVEN)
    """The sampler's inputs. None: the forward samples nothing."""
    spec_info: Any = batch_field(axis=NONE, split=Split.NESTED, owner="speculative", when=IF_GIVEN)
    """Inputs of speculation. None: there are none."""
