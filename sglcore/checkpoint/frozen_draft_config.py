"""The configuration of a draft that reads the target's keys and values and keeps none itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

BACKBONE = "backbone_hidden_size"
"""The target's hidden size. Only configurations of such drafts have this key."""


class FrozenCells(NamedTuple):
    """The layer of the target, `layer_id`, from which one layer of the draft reads keys and values:
    its shape and sliding window in tokens (None: full attention).
    """

    layer_id: int
    num_kv_heads: int
    head_dim: int
    window: int | None


def flat_words(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's words with those of `text_config` at the top level. A word that is
    at the top level already keeps its value.

    The rotary base of sliding-window layers is also under `rope_local_base_freq`.
    """
    words = {**raw.get("text_config", {}), **raw}
    words.pop("text_config", None)
    local = words.get("rope_parameters", {}).get("sliding_attention", {})
    return {**({"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}), **words}
