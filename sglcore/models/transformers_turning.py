"""What a function of transformers does that turns queries and keys, found by trying it against the
kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from sglcore.runtime.kernels import reference

TurnFunction = Callable[..., tuple[Tensor, Tensor]]
"""Of queries and keys [1, heads, T, D], cosines and sines [1, T, R]: both, turned."""

Doubling = Literal["halves", "neighbours", "none"]
"""How R cosines are those of R / 2 angles: the second half repeats the first, or each has its like
beside it. None: there are R / 2 of them."""

WAYS: Sequence[Doubling] = ("neighbours", "halves", "none")
"""The last is that of all angles which are in no other."""

FORMS: Sequence[tuple[Doubling, Doubling]] = (
    ("halves", "halves"),
    ("halves", "neighbours"),
    ("neighbours", "neighbours"),
    ("none", "halves"),
)
"""How angles are doubled, and which elements are a pair, in functions that turn."""

LENGTHS = (5, 1, 260)
"""Tokens of texts that a function is tried with."""
SIZES = (1.0, 1e3, 1e-2)
"""About how large the elements of a token are, and those of the next ones."""


def turns(
    function: TurnFunction,
    head_dim: int,
    size: int,
    doubling: Doubling = "halves",
    pairs: Doubling = "halves",
    lengths: Sequence[int] = LENGTHS,
) -> bool:
    """Whether a function, of angles doubled so, turns the first `size` elements of each head as the
    kernel does: an element with that of the other half, or with its neighbour.

    The evidence is random heads and angles of texts of `lengths`, whose tokens have `SIZES`. No two
    forms are one function where more than two elements are turned.
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

    wanted = reference.rotary(rows(q), rows(k), torch.arange(tokens), table, head_dim)
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
    """int64 [rows]: which row comes to each place, so that the pairs of the first `size` of each
    head become halves."""
    head = torch.arange(head_dim)
    one = torch.cat((head[:size:2], head[1:size:2], head[size:]))
    return (torch.arange(0, rows, head_dim)[:, None] + one).flatten()
