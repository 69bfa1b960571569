"""Which tensor parallel sizes fit a model, and the part of it that each rank holds: pure arithmetic
over its configuration.

A constraint is data: it names what is divided in words for a person, and the remedy lists the sizes
that every constraint allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.checkpoint.quantization_config import read_quantization
from sglcore.core.errors import ConfigError

MOST_WIDTH = 64
"""Largest size that is tried for the list of sizes that fit."""


Range = tuple[int, int]
"""The half-open range [first, last)."""
Fits = Callable[[int, int], bool]
"""`fits(size, width)`: whether `size` items can be divided among `width` ranks."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A condition on the number of ranks, `width`: `fits(size, width)`. `name` names for messages
    what is divided, and `size` is its number. `axis`: the ranks that divide it: those of a shard
    ("attn_tp"), all ranks ("tp"), or all ranks unless each holds whole experts ("expert")."""

    name: str
    size: int
    fits: Fits
    axis: str = "tp"


def _divides(size: int, width: int) -> bool:
    return size % width == 0


def _shares(size: int, width: int) -> bool:
    """Return whether key heads can be divided among ranks, or each can be held by the same number
    of ranks."""
    return size % width == 0 or width % size == 0


def constraints(config: ModelConfig) -> tuple[Constraint, ...]:
    """Return the constraints of attention, states, feed-forward blocks and experts. The vocabulary
    has none: it is padded."""
    found = [
        Constraint("attention heads", config.num_attention_heads, _divides, "attn_tp"),
        Constraint("key-value heads", config.num_key_value_heads, _shares, "attn_tp"),
    ]
    moe = config.moe
    if moe is None or not all(moe.layers):
        found.append(Constraint("intermediate features in a feed-forward block", config.intermediate_size, _divides))
    if moe is not None:
        inside = "intermediate features in an expert"
        found.append(Constraint(inside, moe.intermediate_size, _divides, "expert"))
        if moe.shared_size:
            found.append(Constraint("intermediate features in the shared expert", moe.shared_size, _divides))
    return (*found, *_of_words(config), *_of_groups(config))


_WORDS: Mapping[str, tuple[str, Fits]] = MappingProxyType(
    {
        "linear_num_key_heads": ("key heads of linear attention", _divides),
        "linear_num_value_heads": ("value heads of linear attention", _divides),
        "mamba_n_heads": ("Mamba heads", _divides),
        "mamba_n_groups": ("groups of Mamba heads", _shares),
        "o_groups": ("groups of attention heads", _divides),
        "shared_intermediate_size": ("intermediate features in the shared block", _divides),
    }
)
"""Other numbers of the configuration that are divided, with their names for a person."""


def _of_words(config: ModelConfig) -> Iterator[Constraint]:
    for word, (name, fits) in _WORDS.items():
        if word in config.words:
            axis = "tp" if word == "shared_intermediate_size" else "attn_tp"
            yield Constraint(name, config.words[word], fits, axis)
    if "conv_L_cache" in config.words:
        yield Constraint("convolution channels", config.hidden_size, _divides, "attn_tp")


def _of_groups(config: ModelConfig) -> Iterator[Constraint]:
    """Yield constraints of quantised columns that share a scale: ranks must not split a group.

    A format under `quantization` is read, and its groups are checked, by the device's own loader.
    """
    quantization = None if "quantization" in config.raw else read_quantization(config.raw)
    values = config.num_attention_heads * config.words.get("v_head_dim", config.head_dim)
    inner = 0 if config.moe is not None and all(config.moe.layers) else config.intermediate_size
    for module, size, axis in (("self_attn.o_proj", values, "attn_tp"), ("mlp.down_proj", inner, "tp")):
        scheme = None if quantization is None else quantization.scheme(f"model.layers.0.{module}")
        group = 0 if scheme is None or scheme.kind == "float8" else scheme.block[1] or 0
        if group and size:
            fits = partial(_keeps_groups, group)
            yield Constraint(f"inputs of {module} in groups of {group}", size, fits, axis)


def _keeps_groups(group: int, size: int, width: int) -> bool:
    return size % width == 0 and size // width % group == 0


def legal_widths(config: ModelConfig) -> tuple[int, ...]:
    """Return every width up to MOST_WIDTH that satisfies every constraint, as if there were neither
    `dp` nor `ep`; ascending.
    """
    rules = constraints(config)
    return tuple(width for width in range(1, MOST_WIDTH + 1) if all(rule.fits(rule.size, width) for rule in rules))


def check_divisible(config: ModelConfig, width: int, is_ours: bool = True) -> None:
    """Raise ConfigError unless `is_ours`: the model's layers are built here, not by a library's own
    class, which no device can divide. `width`, the tensor parallel size, is only named in the
    error."""
    refused = {
        "layers of transformers' own class, which are not divided": not is_ours,
    }
    for what, is_so in refused.items():
        if is_so:
            raise ConfigError(f"tp is {width}, and this model has {what}", remedy="--tp 1")


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's share of a model: part number `rank`, from 0, of `size` equal parts."""

    rank: int
    size: int

    def part(self, count: int) -> tuple[int, int]:
        """Return [first, last) of `count` items. Raises ConfigError if they do not divide
        evenly."""
        each, rest = divmod(count, self.size)
        if rest:
            raise ConfigError(
                f"tp is {self.size}, and a layer divides {count} elements, which is not a multiple of it",
                wanted="a divisor",
                remedy="set --tp to a divisor",
            )
        return self.rank * each, (self.rank + 1) * each

    def kv_heads(self, heads: int) -> tuple[int, int]:
        """Return [first, last) of the `heads` key and value heads that this part's query heads
        read. With fewer heads than parts, several parts return the same head. `heads` must be a
        multiple or a divisor of the number of parts; this is not checked here.
        """
        first = self.rank * heads // self.size
        return first, first + max(heads // self.size, 1)

    def vocabulary(self, rows: int) -> tuple[int, int]:
        """Return [first, last) of this rank's rows of a vocabulary of `rows`; all ranks have the
        same number of rows.

        Rows from `rows` on are padding.
        """
        each = -(-rows // self.size)
        return self.rank * each, (self.rank + 1) * each


def clipped(part: Range, whole: int) -> tuple[Range, ...]:
    """Return the part of a range that is below `whole`: one range, or none."""
    first, last = min(part[0], whole), min(part[1], whole)
    return ((first, last),) if last > first else ()
