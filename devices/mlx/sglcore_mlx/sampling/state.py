"""What one sampling call needs, as arrays: made of a host batch, and taken apart for `mx.compile`."""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from sglcore.device.errors import ConfigError
from sglcore.sampling.batch import SamplingBatch, SamplingNeeds
from sglcore_mlx.sampling.processors import Bias, Masks, Penalties

ROW_FIELDS = ("positions", "seed_words", "scale", "greedy", "top_k", "top_p", "min_p")
SMALLEST_BIAS = 8
"""Bias entries are padded to this many, or to the next power of two, so that few shapes are compiled."""


@dataclass(frozen=True, slots=True)
class SamplingState:
    """What one sampling call needs. A part that `needs` does not name is None."""

    needs: SamplingNeeds
    positions: mx.array
    """int32[B]: the sequence index of the token to be drawn."""
    seed_words: mx.array
    """int32[B, 2]"""
    scale: mx.array
    """float32[B]: 2**16 / temperature."""
    greedy: mx.array
    """bool[B]"""
    top_k: mx.array | None = None
    """int32[B]"""
    top_p: mx.array | None = None
    """int32[B], in 2**-24"""
    min_p: mx.array | None = None
    """int32[B], the largest gap kept"""
    penalties: Penalties | None = None
    bias: Bias | None = None
    masks: Masks | None = None

    def row_arrays(self) -> dict[str, mx.array]:
        """The fields, by name, that hold one entry per row and that the draw itself reads."""
        parts = {name: getattr(self, name) for name in ROW_FIELDS}
        return {name: part for name, part in parts.items() if part is not None}


def make_state(
    host: SamplingBatch,
    positions: mx.array,
    *,
    history: mx.array | None = None,
    masks: Masks | None = None,
    needs: SamplingNeeds | None = None,
) -> SamplingState:
    """The state of a host batch at positions int32[B]; B beyond the batch's rows is padding.

    history int32[B, L] holds each row's tokens so far, the one at index p in column p; L may end at the longest row.
    `needs` may be wider than the batch's own. Raises ConfigError if a row has a penalty and there is no history.
    """
    needs = needs or host.needs
    parts = {name: mx.array(part) for name, part in state_arrays(host, needs, positions.shape[0]).items()}
    return place_state(needs, positions, parts, history=history, masks=masks)


def state_arrays(host: SamplingBatch, needs: SamplingNeeds, rows: int) -> dict[str, np.ndarray]:
    """What `place_state` needs of a host batch padded to `rows`, by name."""
    batch = host if len(host) == rows else host.padded(rows)
    arrays = {"seed_words": batch.seed_words, "scale": batch.scale, "greedy": batch.greedy}
    if needs.any_top_k:
        arrays["top_k"] = batch.top_k
    if needs.any_top_p:
        arrays["top_p"] = batch.top_p
    if needs.any_min_p:
        arrays["min_p"] = batch.min_p
    if needs.any_penalty:
        arrays |= {"prompt_len": batch.prompt_len, "repetition": batch.repetition}
        arrays |= {"presence": batch.presence, "frequency": batch.frequency}
    if needs.any_bias:
        arrays |= _bias_arrays(batch)
    return arrays


def place_state(
    needs: SamplingNeeds,
    positions: mx.array,
    parts: Mapping[str, mx.array],
    *,
    history: mx.array | None = None,
    masks: Masks | None = None,
) -> SamplingState:
    """From arrays of `state_arrays`: a dictionary of arrays can be an argument of a compiled function, a state cannot.

    Raises ConfigError if `needs` names penalties and there is no history.
    """
    return SamplingState(
        needs,
        positions,
        parts["seed_words"],
        parts["scale"],
        parts["greedy"],
        parts.get("top_k"),
        parts.get("top_p"),
        parts.get("min_p"),
        _penalties(parts, history) if needs.any_penalty else None,
        _bias(parts) if needs.any_bias else None,
        masks,
    )


def _penalties(parts: Mapping[str, mx.array], history: mx.array | None) -> Penalties:
    if history is None:
        raise ConfigError(
            "rows with penalties and no history", wanted="the tokens so far of every row", remedy="pass history="
        )
    return Penalties(history, parts["prompt_len"], parts["repetition"], parts["presence"], parts["frequency"])


def _bias(parts: Mapping[str, mx.array]) -> Bias:
    return Bias(parts["bias_rows"], parts["bias_ids"], parts["bias_values"], parts["bias_until"])


def _bias_arrays(batch: SamplingBatch) -> dict[str, np.ndarray]:
    """The entries of a batch with padding; zeros throughout are an entry that never counts."""
    arrays = {
        "bias_rows": batch.bias_rows(),
        "bias_ids": batch.bias_ids,
        "bias_values": batch.bias_values,
        "bias_until": batch.bias_until,
    }
    count = len(batch.bias_ids)
    size = max(SMALLEST_BIAS, 1 << (count - 1).bit_length() if count else 0)
    return {name: np.pad(part, (0, size - count)) for name, part in arrays.items()}
