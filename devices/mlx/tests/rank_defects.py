"""Defects of ranks, planted in their processes: run as a module, this is a rank with a defect, by
name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import mlx.core as mx
import msgspec

from sglcore.checkpoint.parallel import tensor_parallel
from sglcore.engine.ranks import rank_process
from sglcore.engine.ranks.ranks_start import RankOptions
from sglcore.engine.ranks.spec import RankProcess, RankSpec
from sglcore_mlx.layers.cut import Cut
from sglcore_mlx.layers.linear import Embedding
from sglcore_mlx.parallel import build, layers
from sglcore_mlx.parallel.ranks import Ranks


def adds_biases_twice() -> None:
    """Every rank adds the bias before the results are summed."""
    build.ShardedBuild._once = lambda self, *names: None


def sums_nothing() -> None:
    """A block's result is this rank's part of it."""
    layers.Summed.__call__ = lambda self, x, *more: self._inner(x, *more)


def swaps_columns() -> None:
    """The parts of the vocabulary are side by side in another order."""
    right = Ranks.joined

    def swapped(self: Ranks, x: mx.array) -> mx.array:
        parts = list(mx.split(right(self, x), self.size, axis=1))
        return mx.concatenate(list(reversed(parts)), axis=1)

    Ranks.joined = swapped


def has_the_first_heads() -> None:
    """Every rank has the first part of what is divided."""
    tensor_parallel.Shard.part = lambda self, count: (0, count // self.size)


def cuts_a_row_too_late() -> None:
    """A rank's part of a weight's inputs begins one element late."""
    right = Cut.of

    def late(self: Cut, array: mx.array, own: Sequence[int]) -> mx.array:
        return right(self, mx.concatenate([array[:, 1:], array[:, :1]], axis=1) if self.dim == 1 else array, own)

    Cut.of = late


def finds_other_ids() -> None:
    """The embedding counts ids of its part from one too low a number."""
    right = layers.SharedEmbedding.__init__

    def shifted(self: layers.SharedEmbedding, own: Embedding, part: tuple[int, int], ranks: Ranks) -> None:
        right(self, own, (part[0] - (part[0] > 0), part[1] - (part[0] > 0)), ranks)

    layers.SharedEmbedding.__init__ = shifted


DEFECTS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        each.__name__: each
        for each in (
            adds_biases_twice,
            sums_nothing,
            swaps_columns,
            has_the_first_heads,
            cuts_a_row_too_late,
            finds_other_ids,
        )
    }
)


def with_defect(name: str) -> RankOptions:
    """Return options that start ranks with this defect."""
    return RankOptions(spawn=partial(_spawn, name))


def _spawn(name: str, spec: RankSpec) -> RankProcess:
    command = [sys.executable, "-m", "devices.mlx.tests.rank_defects", name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=dict(os.environ))
    assert process.stdin is not None
    with process.stdin as given:
        given.write(msgspec.json.encode(spec) + b"\n")
    return process


if __name__ == "__main__":
    DEFECTS[sys.argv[1]]()
    sys.exit(rank_process.main())
