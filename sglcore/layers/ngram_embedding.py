"""Embeddings of n-grams, which are added to the residual streams of a layer: rows of a hashed
table, gates, and a convolution with gaps (Qwen4-Exp's per-layer embedding)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from sglcore.checkpoint.ngram_config import NgramConfig
from sglcore.core.errors import ConfigError
from sglcore.layers.build_scope import Scope
from sglcore.layers.gated_residual import StreamNorm
from sglcore.layers.linear import Linear
from sglcore.layers.recurrent_layers import CausalConv
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.states import PoolRows, StateTensor
from sglcore.runtime.state_layer import ReplayedStates

LEAST_GATE = 1e-6
"""The least absolute value of a gate before its square root."""


class NgramTable:
    """A hashed table: each token reads `NgramConfig.columns` rows, `heads` for each n-gram that
    ends at the token.

    An n-gram's hash is the exclusive or of its tokens, each times the multiplier of its place; the
    row is the remainder by the size of the column's part.
    """

    def __init__(self, build: Scope, net: NgramConfig, place: int) -> None:
        """Declare the weights of this scope. `place`: its number among the model's tables, from
        0."""
        files, width = net.file_rows(place), net.embed_dim // net.columns
        names = [f"ngram_embedding.shard_{number}.weight" for number in range(len(files))]
        self.weight = build.stacked(tuple(zip(names, files, strict=True)), width)
        whole = f"{build.prefix}ngram_embedding.weight"
        build.weights.stacks[whole] = self.weight, tuple(build.prefix + name for name in names)
        int64 = torch.int64
        self.multipliers = build.parameter("layer_multipliers", net.order, dtype=int64)
        self.sizes = build.parameter("ngram_heads_vocab_sizes", net.columns, dtype=int64)
        self.offsets = build.parameter("ngram_heads_offsets", net.columns, dtype=int64)
        build.weights.derived.append(self._check)
        self._net, self._rows, self._name = net, sum(files), build.prefix
        self._embedding = build.kernel(KernelTable.embedding, build.indices(), self.weight)

    def __call__(self, ids: Tensor, previous: Tensor) -> Tensor:
        """Return [T, embed_dim]: the rows of each token, concatenated. Arguments as `rows_of`."""
        rows = self.rows_of(ids, previous).flatten().int()
        return self._embedding(rows, self.weight).view(ids.shape[0], self._net.embed_dim)

    def rows_of(self, ids: Tensor, previous: Tensor) -> Tensor:
        """Return int64 [T, columns]: the rows that tokens `ids` int32[T] read, those of n = 2
        first. `previous` int32[T, order - 1]: the tokens before each, the nearest first, -1 before
        the text. No host reads."""
        heads, stop = self._net.heads, self._net.stop
        mixed, found, last = ids.long() * self.multipliers[0], [], ids
        for back in range(1, self._net.order):
            token = previous[:, back - 1]
            ends = (token < 0) if back == 1 else (token < 0) | (last == stop)
            last = torch.where(ends, stop, token)
            mixed = mixed ^ (last.long() * self.multipliers[back])
            part = self.sizes[(back - 1) * heads : back * heads]
            found.append(torch.remainder(mixed.unsqueeze(1), part))
        return torch.cat(found, dim=1) + self.offsets

    def _check(self) -> None:
        """Raise `ConfigError` for parts that are not apart from each other in the table. Waits."""
        firsts, sizes = self.offsets.tolist(), self.sizes.tolist()
        ends = [first + size for first, size in zip(firsts, sizes, strict=True)]
        is_apart = all(end <= first for end, (_, first) in zip(ends, pairwise(firsts), strict=False))
        if min(sizes) < 1 or firsts[0] < 0 or ends[-1] > self._rows or not is_apart:
            raise ConfigError(
                f"{self._name} has parts of {sizes} rows from {firsts} on, in a table of {self._rows} rows",
                wanted="parts in ascending order that do not overlap",
                remedy="download the checkpoint again",
            )


class NgramEmbedding(ReplayedStates):
    """What a layer adds to its residual streams: the value of each token's n-grams, times a gate
    for each stream, plus a convolution of the gated values. The convolution's inputs are its state;
    the n-grams come from the tokens before each token (`NgramEmbeddingInfo.previous_ids`)."""

    def __init__(self, build: Scope, layer_id: int, net: NgramConfig, place: int, streams: int) -> None:
        """`layer_id` counts the layers with states, `place` the tables. Raises `ConfigError` for a
        device without 64-bit integers."""
        size = build.config.hidden_size
        if build.index_dtype is torch.int32:
            raise ConfigError(
                f"{build.config.architecture} hashes n-grams with 64-bit integers, which this device does not have",
                remedy="choose another device, such as --device cpu",
            )
        self._shape = streams, size
        self.table = NgramTable(build.at("ple_embedding"), net, place)
        self.projection = Linear(build, (("key_proj", streams * size), ("value_proj", size)), net.embed_dim)
        names = ("norm_key", "norm_query", "norm_conv")
        self.norm_key, self.norm_query, self.norm_conv = (StreamNorm(build.at(name), streams) for name in names)
        self.conv = CausalConv(build, "conv1d", streams * size, net.taps, gap=net.order)
        super().__init__(layer_id, {"conv": self.conv.tail}, StateTensor((streams * size,), build.dtype))

    def mix(self, hidden: Tensor, batch: ForwardBatch, states: Mapping[str, Tensor]) -> Tensor:
        """Return what is added to the streams `hidden` [T, n, H], in the same shape; updates the
        convolution's state. Decode steps run inside graphs: no host reads."""
        info = batch.ngram_embedding_info
        assert info is not None and info.previous_ids is not None
        embedded = self.table(batch.input_ids, info.previous_ids)
        taken = self.gated(hidden, embedded)
        return self.replayed(taken.flatten(1), batch, states).view_as(hidden)

    def gated(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return [T, n, H]: the values of embeddings [T, embed_dim], times the gate of each stream
        of `hidden` [T, n, H]."""
        streams, size = self._shape
        keys, values = self.projection(embedded).split([streams * size, size], dim=1)
        keys = self.norm_key(keys.unflatten(1, (streams, size)))
        gate = (keys * self.norm_query(hidden)).sum(-1, keepdim=True) / math.sqrt(size)
        gate = gate.abs().clamp_min(LEAST_GATE).sqrt() * gate.sign()
        return torch.sigmoid(gate) * values.unsqueeze(1)

    def advance(self, taken: Tensor, rows: PoolRows, states: Mapping[str, Tensor]) -> Tensor:
        """Map gated values `taken` [T, n * H] to their convolution [T, n * H] and update `states`,
        only "conv", in the slots of `rows`, in place. Runs inside graphs: no host reads."""
        normed = self.norm_conv(taken.unflatten(1, self._shape))
        return self.conv(normed.flatten(1), states["conv"], rows)

    def finish(self, mixed: Tensor, taken: Tensor) -> Tensor:
        """Return [T, n * H]: the convolution `mixed` plus the gated values `taken`."""
        return taken + mixed
