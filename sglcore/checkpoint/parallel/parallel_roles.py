"""Rules for dividing linear layers among ranks, by the layers' names in model files. A layer
without a rule is whole on every rank, which is always correct.

A product that is divided by its outputs has *sections*: queries of all heads, then keys of all
heads, and so on. A rank has consecutive heads of each section.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.checkpoint.parallel.tensor_parallel import Range, Shard
from sglcore.checkpoint.recurrent_config import delta_net_config, mamba2_config

_BY_INPUTS = frozenset({"o_proj", "out_proj", "o_b_proj", "down_proj", "Wo"})
_HEADS_OF_SEQUENCES = ("classifier.", "pooler.")
QUERIES = frozenset({"q_proj", "q_b_proj"})
"""Names of unfused layers that compute query heads, outside an indexer."""
WHOLE = frozenset({"q_a_proj", "kv_proj"})
"""First names of fused layers that compute data which all heads share."""
OF_ALL_HEADS = ("indexer.", "compressor.")
"""Suffixes of the scopes of modules that serve all heads at once; every rank holds them whole."""


@dataclass(frozen=True, slots=True)
class Section:
    """`count` units (such as heads) of `size` outputs each. If `shared`, several ranks hold the
    same unit when there are fewer units than ranks."""

    count: int
    size: int
    shared: bool = False

    @property
    def outputs(self) -> int:
        """The outputs of all units."""
        return self.count * self.size

    def part(self, shard: Shard) -> Range:
        """Return the range of a rank's outputs, counted from the start of this section. Raises
        ConfigError if the units do not divide evenly and are not `shared`. The count of `shared`
        units must be a multiple or a divisor of the ranks, which is not checked.
        """
        first, last = shard.kv_heads(self.count) if self.shared else shard.part(self.count)
        return first * self.size, last * self.size


def is_by_inputs(scope: str, name: str) -> bool:
    """Return whether the linear layer `name` in a scope (the prefix, with a dot at its end) is
    divided by its inputs, as the last layer of a block: each rank multiplies the inputs that it
    computed, and the results are summed."""
    if scope.endswith(_HEADS_OF_SEQUENCES):
        return False
    return name in _BY_INPUTS or (name == "dense" and scope.endswith("output."))


def sections_of_fused(config: ModelConfig, scope: str, parts: Sequence[tuple[str, int]]) -> tuple[Section, ...] | None:
    """Return the sections of fused linear layers: those of `sections`, or of queries, keys, values
    and perhaps gates, which are recognised by their sizes, because their names differ by model.

    Empty for layers in `WHOLE`, which are not divided. None if no rule fits.
    """
    if found := sections(config, scope, parts):
        return found
    if parts[0][0] in WHOLE:
        return ()
    total = sum(count for _, count in parts)
    heads = (of_attention(config, has_gate) for has_gate in (False, True))
    return next((each for each in heads if sum(section.outputs for section in each) == total), None)


def reordered(ranges: Sequence[Range], order: Sequence[int]) -> tuple[tuple[Range, ...], list[int]]:
    """Return what a rank has of a product whose output i is the checkpoint's output order[i], if it
    has `ranges` of these outputs: the ranges of the checkpoint's rows, and the place of each output
    among these rows.
    """
    wanted = [order[place] for first, last in ranges for place in range(first, last)]
    rows = sorted(wanted)
    place_of = {row: place for place, row in enumerate(rows)}
    return runs(rows), [place_of[row] for row in wanted]


def sections(config: ModelConfig, scope: str, parts: Sequence[tuple[str, int]]) -> tuple[Section, ...]:
    """Return the sections by which ranks divide the outputs of one or several fused linear layers
    `parts` (name, outputs) in a scope (the prefix, with a dot at its end).

    Empty if no rule fits: each rank then holds all outputs.
    """
    first, outputs = parts[0][0], sum(count for _, count in parts)
    if scope.endswith(OF_ALL_HEADS):
        return ()
    if first in ("in_proj_qkvz", "in_proj_qkv"):
        return _of_delta_net(config)
    if first == "in_proj":
        return _of_convolution(config) if scope.endswith("conv.") else _of_mamba2(config)
    if first in QUERIES and len(parts) == 1:
        heads = config.num_attention_heads
        return (Section(heads, outputs // heads),)
    if first == "Wqkv":
        return of_attention(config)
    is_inner = first == "up_proj" or (first == "dense" and scope.endswith("intermediate."))
    return (Section(outputs, 1),) if is_inner else ()


def of_attention(config: ModelConfig, has_gate: bool = False) -> tuple[Section, ...]:
    """Return the sections of queries, keys and values, and with `has_gate` of a gate for each
    element of the queries.
    """
    queries = Section(config.num_attention_heads, config.head_dim)
    keys = Section(config.num_key_value_heads, config.head_dim, shared=True)
    return (queries, keys, keys, *((queries,) if has_gate else ()))


def _of_delta_net(config: ModelConfig) -> tuple[Section, ...]:
    """Return the sections of queries, keys, values, gates, b and a."""
    net = delta_net_config(config)
    keys, values = Section(net.key_heads, net.key_dim), Section(net.value_heads, net.value_dim)
    each = Section(net.value_heads, 1)
    return keys, keys, values, values, each, each


def _of_mamba2(config: ModelConfig) -> tuple[Section, ...]:
    """Return the sections of gates and inputs by head, of the states' input and output matrices by
    group, and of time steps by head."""
    space = mamba2_config(config)
    heads, groups = Section(space.heads, space.head_dim), Section(space.groups, space.width, shared=True)
    return heads, heads, groups, groups, Section(space.heads, 1)


def _of_convolution(config: ModelConfig) -> tuple[Section, ...]:
    """Return the sections of the input gate, the output gate and the input."""
    return (Section(config.hidden_size, 1),) * 3


def kept(divided: Sequence[Section], shard: Shard) -> tuple[Range, ...]:
    """Return the ranges of a rank's outputs in a product with the sections `divided`, one for each
    section."""
    found, start = [], 0
    for section in divided:
        first, last = section.part(shard)
        found.append((start + first, start + last))
        start += section.outputs
    return tuple(found)


def by_part(parts: Sequence[tuple[str, int]], ranges: Sequence[Range]) -> tuple[tuple[Range, ...], ...]:
    """Return `ranges` of the outputs of a product as ranges within each of its `parts` (name,
    outputs): one tuple per part, empty if no range meets it."""
    found, start = [], 0
    for _, count in parts:
        inside = [(max(first, start), min(last, start + count)) for first, last in ranges]
        found.append(tuple((first - start, last - start) for first, last in inside if first < last))
        start += count
    return tuple(found)


def runs(places: Sequence[int]) -> tuple[Range, ...]:
    """Return `places`, which are ascending, as ranges [first, last) of consecutive numbers."""
    found: list[Range] = []
    for place in places:
        if found and found[-1][1] == place:
            found[-1] = found[-1][0], place + 1
        else:
            found.append((place, place + 1))
    return tuple(found)
