"""Detects which rotary convention a function of transformers uses, by comparing it with the kernel
on random input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from sglcore.runtime.kernels import reference_kernels

TurnFunction = Callable[..., tuple[Tensor, Tensor]]
"""(queries, keys [1, heads, T, D], cosines, sines [1, T, R]) to rotated queries and keys."""

Doubling = Literal["halves", "neighbours", "none"]
"""How R cosines hold R / 2 angles. `halves`: the second half repeats the first. `neighbours`: each
value is repeated next to itself. `none`: there are only R / 2 cosines."""

WAYS: Sequence[Doubling] = ("neighbours", "halves", "none")
"""In the order of trial: `none` fits all angles."""

FORMS: Sequence[tuple[Doubling, Doubling]] = (
    ("halves", "halves"),
    ("halves", "neighbours"),
    ("neighbours", "neighbours"),
    ("none", "halves"),
)
"""(how angles are doubled, which elements form a pair) in the known functions."""

LENGTHS = (5, 1, 260)
"""Numbers of tokens in the trials of a function."""
SIZES = (1.0, 1e3, 1e-2)
"""The scale of a token's elements, cyclic over the tokens."""


def turns(
    function: TurnFunction,
    head_dim: int,
    size: int,
    doubling: Doubling = "halves",
    pairs: Doubling = "halves",
    lengths: Sequence[int] = LENGTHS,
) -> bool:
    """Return whether a function, given angles doubled as `doubling`, rotates the first `size`
    elements of each head as the kernel does. `pairs`: an element forms a pair with the same one of
    the other half ("halves"), or with its neighbour ("neighbours").

    Compares the results for random heads and angles of `lengths` tokens with the scales `SIZES`.
    With more than two rotated elements, no two forms agree. A function that raises counts as False.
    """
    return all(_turns(function, head_dim, size, doubling, pairs, tokens) for tokens in lengths)


def _turns(function: TurnFunction, head_dim: int, size: int, doubling: Doubling, pairs: Doubling, tokens: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor(SIZES)[torch.arange(tokens) % len(SIZES), None]
    q, k = (torch.randn(1, heads, tokens, head_dim, generator=generator) * sizes for heads in (3, 2))
    table = torch.randn(tokens, size, generator=generator)
    cos, sin = (_doubled(half, doubling)[None] for half in table.chunk(2, dim=-1))
    order = halves_first(head_dim, head_dim, size) if pairs == "neighbours" else torch.arange(head_dim)

    def rows(part: Tensor) -> Tensor:
        return part[0].transpose(0, 1)[..., order].reshape(tokens, -1)

    wanted = reference_kernels.rotary(rows(q), rows(k), torch.arange(tokens), table, head_dim)
    try:
        found = function(q, k, cos, sin)
        return all(
            torch.allclose(rows(part) / sizes, each / sizes, rtol=1e-5, atol=2e-6)
            for part, each in zip(found, wanted, strict=True)
        )
    except (TypeError, RuntimeError, AttributeError, ValueError, LookupError, AssertionError):
        return False


def _doubled(angles: Tensor, doubling: Doubling) -> Tensor:
    if doubling == "none":
        return angles
    return angles.repeat_interleave(2, dim=-1) if doubling == "neighbours" else torch.cat((angles, angles), dim=-1)


def halves_first(rows: int, head_dim: int, size: int) -> Tensor:
    """Return int64 [rows], the source row of each row, so that the neighbour pairs of the first
    `size` elements of each head become halves."""
    head = torch.arange(head_dim)
    one = torch.cat((head[:size:2], head[1:size:2], head[size:]))
    return (torch.arange(0, rows, head_dim)[:, None] + one).flatten()
