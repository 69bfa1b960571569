"""The state of one sampling call, made from named arrays."""

from collections.abc import Mapping

import mlx.core as mx

from sglcore.core.errors import ConfigError
from sglcore.sampling.params_batch import SamplingNeeds
from sglcore.sampling.state import Bias, Masks, place_exclusion
from sglcore.sampling.state import SamplingState as OfAnyLibrary
from sglcore_mlx.sampling.processors import Penalties

ROW_FIELDS = ("positions", "seed_words", "scale", "greedy", "top_k", "top_p", "min_p")


class SamplingState(OfAnyLibrary[mx.array, Penalties]):
    """The inputs of one sampling call as MLX arrays."""

    __slots__ = ()

    def row_arrays(self) -> dict[str, mx.array]:
        """Return, by name, the fields with one entry per row that the draw reads; fields that are
        None are left out."""
        parts = {name: getattr(self, name) for name in ROW_FIELDS}
        return {name: part for name, part in parts.items() if part is not None}


def place_state(
    needs: SamplingNeeds,
    positions: mx.array,
    parts: Mapping[str, mx.array],
    *,
    history: mx.array | None = None,
    masks: Masks[mx.array] | None = None,
) -> SamplingState:
    """Make the state from the arrays of `state_arrays`, and of `penalty_arrays` of all rows: a
    compiled function can take a dictionary of arrays, but not a state.

    history int32[B, L]: each request's tokens so far, the token at index p in column p; L must be
    at least the length of the longest request with penalties. Raises ConfigError if `needs` has
    penalties and there is no history.
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
        Bias(*(parts[f"bias_{name}"] for name in ("rows", "ids", "values", "until"))) if needs.any_bias else None,
        masks,
        place_exclusion(needs, parts),
    )


def _penalties(parts: Mapping[str, mx.array], history: mx.array | None) -> Penalties:
    if history is None:
        raise ConfigError(
            "found rows with penalties, but no history", wanted="the tokens of every row so far", remedy="pass history="
        )
    return Penalties(history, parts["prompt_len"], parts["repetition"], parts["presence"], parts["frequency"])
