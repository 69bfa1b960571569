"""Helpers of the model tests: load a model from a folder, and compute its log-probabilities with
simple attention functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from sglcore.checkpoint.model_config import read_config
from sglcore_mlx.attention import dense
from sglcore_mlx.attention.indexed import chosen_mask
from sglcore_mlx.forward_batch import Advance, Attend, ForwardBatch, Recur
from sglcore_mlx.layers.linear import LinearParts
from sglcore_mlx.load import load_model
from sglcore_mlx.models.contract import Model

TWO_STREAMS = 2


def ignore(done: int, total: int) -> None:
    """A progress callback that does nothing."""


def load(
    folder: Path,
    dtype: mx.Dtype = mx.float32,
    parts: LinearParts | None = None,
    max_positions: int | None = None,
    progress: Callable[[int, int], None] = ignore,
    **options: Any,
) -> Model:
    """Load the model of a folder, for its whole context unless `max_positions` is given."""
    config = read_config(folder)
    positions = max_positions or config.context_length
    parts = parts or LinearParts()
    return load_model(folder, config, dtype=dtype, max_positions=positions, parts=parts, progress=progress, **options)


def split_parts() -> LinearParts:
    """Return layer implementations for the CPU, with matrix products on two streams."""
    streams = tuple(mx.new_stream(mx.default_device()) for _ in range(TWO_STREAMS))
    return LinearParts.of_processor(streams)


def causal(model: Model) -> Attend:
    """Causal attention within each layer's window."""

    chosen: list[mx.array] = []

    def attend(layer_id: int, q: mx.array, k: mx.array, v: mx.array | None, index: Any = None) -> mx.array:
        shape, at = model.layers[layer_id], mx.arange(q.shape[0])
        distance = at[:, None] - at[None, :]
        seen = (distance >= 0) & (distance < (shape.sliding_window or q.shape[0]))
        if index is not None and q.shape[0] > shape.top_k:
            chosen[:] = [chosen_mask(index, shape.index_keys(k[:, None]), seen, shape.top_k)]
        seen = chosen[0] if chosen and shape.top_k else seen
        if v is None:
            k, v = shape.parts(k[:, None])
        queries, keys, values = (x.transpose(1, 0, 2)[None] for x in (q, k, v))
        return dense.attend(queries, keys, values, seen, shape)[0].transpose(1, 0, 2)

    return attend


def full(model: Model) -> Attend:
    """Attention of every token to all tokens."""

    def attend(layer_id: int, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        heads_first = [x.transpose(1, 0, 2)[None] for x in (q, k, v)]
        out = mx.fast.scaled_dot_product_attention(*heads_first, scale=model.layers[layer_id].scale)
        return out[0].transpose(1, 0, 2)

    return attend


def hidden_states(model: Model, ids: mx.array, attend: Attend) -> mx.array:
    """Return the hidden states [T, H] of one whole sequence int32 [T]."""
    positions = mx.arange(ids.size, dtype=mx.int32)
    return model(ForwardBatch(input_ids=ids, positions=positions, attend=attend, recur=from_zeros(model)))


def from_zeros(model: Model) -> Recur:
    """Recurrence of one request from zero states."""

    def recur(layer_id: int, advance: Advance, *inputs: mx.array) -> mx.array:
        states = [mx.zeros((1, *each.shape), each.dtype) for each in model.states[layer_id]]
        return advance(states, *(each[None] for each in inputs))[0][0]

    return recur


def logprobs(model: Model, ids: Sequence[int]) -> np.ndarray:
    """Return float32 [len(ids), vocab]: the log-probabilities after each token of a sequence."""
    logits = model.logits(hidden_states(model, mx.array(list(ids), dtype=mx.int32), causal(model)))
    assert logits.dtype == mx.float32
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
