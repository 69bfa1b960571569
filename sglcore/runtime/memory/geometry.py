"""What each layer of a model keeps: cells of all tokens, cells of the last ones that its window sees, or a state of each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from sglcore.runtime.memory.states import KeepsState, state_bytes
from sglcore.step.sizing import Geometry

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.memory.pools import LayerShapes

CellBytes = Callable[["LayerShapes", torch.dtype], int]
"""Bytes of one token over layers, of a kind of pool."""


def keeps_window(layer: Attention, window: int) -> bool:
    """The layer keeps the last `window` tokens alone, which is as far as the longest of such layers looks (0: there are none)."""
    return layer.cached and layer.sliding_window is not None and layer.sliding_window <= window


def layer_shapes(
    layers: Sequence[Attention], kept: Callable[[Attention], bool] = lambda layer: layer.cached
) -> LayerShapes:
    """What a pool holds of each layer: nothing of those that are not `kept` there."""
    return tuple((layer.num_kv_heads if kept(layer) else 0, layer.head_dim) for layer in layers)


def geometry(
    layers: Sequence[Attention], states: Sequence[KeepsState], most: int, dtype: torch.dtype, cell_bytes: CellBytes
) -> Geometry:
    """Bytes by kind. Windows of `most` tokens and more are kept as all tokens are: dropping what they do not see frees
    nothing in time."""
    windows = [layer.sliding_window for layer in layers if layer.cached and layer.sliding_window is not None]
    window = max((each for each in windows if each < most), default=0)
    every = cell_bytes(layer_shapes(layers), dtype)
    of_windows = cell_bytes(layer_shapes(layers, lambda layer: keeps_window(layer, window)), dtype)
    return Geometry(every - of_windows, of_windows, window, state_bytes(states))
