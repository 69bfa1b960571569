"""Scores with a position bias, a slope for each head times the key's position, such as ALiBi
(Press, Smith and Lewis 2022, "Train Short, Test Long", section 3).

A term that is equal for all keys of a query cancels in the softmax, so the key's position in its
request suffices. A few more columns in queries and keys add the bias through their product:
backends, pages and graphs do not change. The columns are exact in every dtype: a position is two
digits of at most 256 in magnitude, a slope the sum of two bfloat16 numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

COLUMNS = 4
"""The columns added to queries and keys: two digits of a position for each of the two parts of a
slope."""
FARTHEST = 1 << 17
"""Positions below it have two digits."""
_BASE = 512


def key_columns(positions: Tensor) -> Tensor:
    """Positions int [T] below FARTHEST to float32 [T, COLUMNS]: their two digits in base 512, high
    and low, twice; the lower one is from -256 to 255."""
    high = (positions + _BASE // 2) // _BASE
    digits = torch.stack((high, positions - high * _BASE), -1)
    return torch.cat((digits, digits), -1).float()


def query_columns(slopes: Sequence[float], scaling: float) -> Tensor:
    """Slopes, one for each head, to float32 [heads, 1, COLUMNS], divided by `scaling`, with which
    scores are multiplied afterwards."""
    wanted = torch.tensor(slopes, dtype=torch.float64) / scaling
    first = wanted.bfloat16().double()
    second = (wanted - first).bfloat16().double()
    return torch.stack((first * _BASE, first, second * _BASE, second), -1).float()[:, None]


def widened(part: Tensor, columns: Tensor) -> Tensor:
    """Append columns [heads or 1, T or 1, COLUMNS] to heads [1, heads, T, dim]; returns [1, heads,
    T, dim + COLUMNS]."""
    return torch.cat((part, columns.expand(*part.shape[1:3], COLUMNS)[None]), -1)


def wide_head(head_dim: int) -> int:
    """Return the elements of a head with the columns, rounded up to a power of two, as backends
    require."""
    return 1 << (head_dim + COLUMNS - 1).bit_length()


def slopes_of(bias: Tensor, heads: int, times: float) -> tuple[float, ...] | None:
    """Return the slopes of a bias [..., heads, 1, P] for P keys, multiplied by `times`; None if it
    is not linear in the position, or not the same for all queries."""
    if bias.shape[-2] != 1 or bias.numel() != heads * bias.shape[-1]:
        return None
    rows = bias.double().view(heads, -1)
    rows = rows - rows[:, :1]
    slopes = rows[:, -1:] / (rows.shape[1] - 1)
    if not torch.allclose(rows, slopes * torch.arange(rows.shape[1]), rtol=1e-5, atol=0):
        return None
    return tuple((slopes[:, 0] * times).tolist())


class Places:
    """The columns that a position bias (ALiBi) adds to the keys of a forward, made from the
    positions by `begin`; all layers share them."""

    __slots__ = ("_dtype", "columns")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.columns = torch.empty(0)
        """[T, COLUMNS] once a forward has begun."""

    def begin(self, positions: Tensor) -> None:
        """Make the columns for the positions int [T] of a step's tokens in their requests."""
        self.columns = key_columns(positions).to(self._dtype)


class OnHost(TorchFunctionMode):
    """Torch function mode. Inside, tensors are made on the host instead of the meta device, and
    casts to another float type do nothing: numbers that depend on no weight have contents, not
    rounded to the model's dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; the device "meta" becomes the host, and a cast to another float type
        returns its input."""
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == torch.device("meta"):
            kwargs["device"] = torch.device("cpu")
        made = func(*args, **kwargs)
        is_rounded = func is Tensor.to and not args[0].is_meta and args[0].is_floating_point()
        return args[0] if is_rounded and made.is_floating_point() else made
