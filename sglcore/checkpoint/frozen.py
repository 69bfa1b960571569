"""What a draft that keeps no keys and values of its own says in its configuration, and whose it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

BACKBONE = "backbone_hidden_size"
"""The width of the model that verifies, which only configurations of such drafts have."""


class FrozenCells(NamedTuple):
    """The layer of the model that verifies whose cells a layer of the draft reads, what lies there, and how far back it sees."""

    layer_id: int
    num_kv_heads: int
    head_dim: int
    window: int | None


def flat_words(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Those of its language part among the others, with the rotary base of layers with windows where it is looked for."""
    words = {**raw.get("text_config", {}), **raw}
    words.pop("text_config", None)
    local = words.get("rope_parameters", {}).get("sliding_attention", {})
    return {**({"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}), **words}
