"""Scores to which a class of transformers adds a slope of each head times a place, such as ALiBi's
(Press, Smith and Lewis 2022, "Train Short, Test Long", section 3).

What is one for all keys of a query falls out of the softmax, so that a key's place in its request
is enough, and the product of a few columns more, in queries and in keys, adds it: backends, pages
and graphs know nothing of it. The columns are exact in every type: a place is two digits of at most
256 either way, and a slope two numbers of bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

COLUMNS = 4
"""So much wider queries and keys are: two digits of a place, for each half of a slope."""
FARTHEST = 1 << 17
"""Places below it have two digits."""
_BASE = 512


def key_columns(positions: Tensor) -> Tensor:
    """int [T] to float32 [T, COLUMNS]: the digits, of which the lower one is from -256 to 255."""
    high = (positions + _BASE // 2) // _BASE
    digits = torch.stack((high, positions - high * _BASE), -1)
    return torch.cat((digits, digits), -1).float()


def query_columns(slopes: Sequence[float], scaling: float) -> Tensor:
    """Slopes of heads to float32 [heads, 1, COLUMNS], for scores that are scaled afterwards."""
    wanted = torch.tensor(slopes, dtype=torch.float64) / scaling
    first = wanted.bfloat16().double()
    second = (wanted - first).bfloat16().double()
    return torch.stack((first * _BASE, first, second * _BASE, second), -1).float()[:, None]


def widened(part: Tensor, columns: Tensor) -> Tensor:
    """Heads [1, heads, T, dim] and columns [heads or 1, T or 1, COLUMNS] to [1, heads, T, dim +
    COLUMNS]."""
    return torch.cat((part, columns.expand(*part.shape[1:3], COLUMNS)[None]), -1)


def wide_head(head_dim: int) -> int:
    """Elements of such heads: the next power of two, which backends take."""
    return 1 << (head_dim + COLUMNS - 1).bit_length()


def slopes_of(bias: Tensor, heads: int, times: float) -> tuple[float, ...] | None:
    """Those of a bias [..., heads, 1, P] of P keys, in `times` its size; None where it is another
    one."""
    if bias.shape[-2] != 1 or bias.numel() != heads * bias.shape[-1]:
        return None
    rows = bias.double().view(heads, -1)
    rows = rows - rows[:, :1]
    slopes = rows[:, -1:] / (rows.shape[1] - 1)
    if not torch.allclose(rows, slopes * torch.arange(rows.shape[1]), rtol=1e-5, atol=0):
        return None
    return tuple((slopes[:, 0] * times).tolist())


class Places:
    """The columns of a forward's keys, which all layers share."""

    __slots__ = ("_dtype", "columns")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.columns = torch.empty(0)
        """[T, COLUMNS] once a forward has begun."""

    def begin(self, positions: Tensor) -> None:
        """Of a step's tokens, int [T], each in its request."""
        self.columns = key_columns(positions).to(self._dtype)


class OnHost(TorchFunctionMode):
    """Inside, what is made on the meta device is made on the host: numbers that depend on no weight
    have contents, which are not rounded to the type of the model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The same, elsewhere."""
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == torch.device("meta"):
            kwargs["device"] = torch.device("cpu")
        made = func(*args, **kwargs)
        is_rounded = func is Tensor.to and not args[0].is_meta and args[0].is_floating_point()
        return args[0] if is_rounded and made.is_floating_point() else made
