"""Configuration of hashed n-gram tables and of residual streams, read from `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice
from math import isqrt

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """Tables with an embedding of the n-gram that ends at each token, for n from 2 to `order`. Each
    n-gram has `heads` rows, each at a hash of its own. `ngram_config` makes it."""

    order: int
    """The tokens of the longest n-gram."""
    heads: int
    """Rows of a table for each n-gram."""
    layers: tuple[int, ...]
    """The layers that have a table, from 0, ascending."""
    embed_dim: int
    """Elements of all rows of a token, concatenated."""
    taps: int
    """Tokens that the convolution after a table reads, each `order` tokens before the next."""
    base: int
    """The lower bound of the sizes of the parts of a table."""
    divisor: int
    """The rows of a table are padded to a multiple of this."""
    files: int
    """The tensors into which a checkpoint divides a table."""
    stop: int
    """The token that ends an n-gram: tokens up to it count as this token."""

    @property
    def columns(self) -> int:
        """The rows of a table that each token reads."""
        return (self.order - 1) * self.heads

    def sizes(self, place: int) -> tuple[int, ...]:
        """Return the sizes of the parts of table `place`, one for each column: distinct primes from
        `base` on, over all tables."""
        primes = filter(_is_prime, count(self.base))
        return tuple(islice(primes, place * self.columns, (place + 1) * self.columns))

    def rows(self, place: int) -> int:
        """Return the number of rows of table `place`, padding included."""
        return -(-sum(self.sizes(place)) // self.divisor) * self.divisor

    def file_rows(self, place: int) -> tuple[int, ...]:
        """Return the rows of each tensor of table `place` in a checkpoint."""
        rows = self.rows(place)
        each = -(-rows // self.files)
        return tuple(min(each, rows - first) for first in range(0, rows, each))


def _is_prime(value: int) -> bool:
    return value > 1 and all(value % divisor for divisor in range(2, isqrt(value) + 1))


def ngram_config(config: ModelConfig) -> NgramConfig | None:
    """Return the configuration of the n-gram tables; None for a model without any. Defaults are
    those of Qwen4-Exp. Raises `ConfigError` for sizes that do not fit together, for a layer that
    does not exist, and for a file without an end-of-sequence token."""
    words, layers = config.words, sorted(set(config.words.get("ple_layer_ids", ())))
    if not layers:
        return None
    stop = words.get("eos_token_id")
    stop = stop[0] if isinstance(stop, list) and stop else stop
    if type(stop) is not int:
        raise ConfigError(f"{config.file} has n-gram tables and eos_token_id {stop!r}", wanted="a token id")
    found = NgramConfig(
        order=words.get("ngram_size", 3),
        heads=words.get("heads_per_ngram", 8),
        layers=tuple(layer - 1 for layer in layers),
        embed_dim=words.get("ple_embed_dim", config.hidden_size),
        taps=words.get("ple_conv_kernel_size", 4),
        base=words.get("ngram_vocab_size_base", 20_000_000),
        divisor=words.get("make_ngram_vocab_size_divisible_by", 128),
        files=words.get("split_ngram_parts", 512),
        stop=stop,
    )
    if found.order < 2 or found.embed_dim % found.columns:
        raise ConfigError(
            f"{config.file} gives {found.embed_dim} elements to {found.columns} rows of n-grams",
            wanted="a multiple of at least one row",
        )
    if not 0 <= found.layers[0] <= found.layers[-1] < config.num_hidden_layers:
        raise ConfigError(
            f"{config.file} has ple_layer_ids {layers}", wanted=f"layers from 1 to {config.num_hidden_layers}"
        )
    return found


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Gated residual streams: their number, and the rank of the weights that mix them."""

    count: int
    rank: int


def stream_config(config: ModelConfig) -> StreamConfig:
    """Return the configuration of the streams; defaults are those of Qwen4-Exp."""
    return StreamConfig(config.words.get("hc_count", 4), config.words.get("hc_lowrank", 320))
