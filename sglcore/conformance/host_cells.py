"""Cells of a device that does not run on the torch runtime, as arrays on the host, and as the pool
that laws work on."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor


class HostCells(Protocol):
    """What `cells` of a package's `conformance.toml` gives of a started device. Everything waits.

    Keys and values are float32 [N, kv_heads, head_dim] and exact in `dtype`; `cells` are int [N].
    """

    page_size: int
    num_cells: int
    num_layers: int
    dtype: str

    def read_cells(self, layer_id: int, cells: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values of some cells."""
        ...

    def write_cells(self, layer_id: int, cells: NDArray[Any], keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Keys and values into some cells, as a forward of this device stores them."""
        ...


class HostPool:
    """They as a `TokenToKVPool`."""

    generation = 0
    layout: ClassVar[str] = "host"

    def __init__(self, cells: HostCells) -> None:
        self._cells = cells
        self.page_size, self.num_cells, self.num_layers = cells.page_size, cells.num_cells, cells.num_layers

    def kv(self, layer_id: int) -> HostCells:
        """What reads and writes them."""
        return self._cells

    def store(self, layer_id: int, key: Tensor, value: Tensor, out_cache_loc: Tensor) -> None:
        """The device has one way."""
        self.write_cells(layer_id, out_cache_loc, key, value)

    def read_cells(self, layer_id: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        """In the type of the cells."""
        dtype: torch.dtype = getattr(torch, self._cells.dtype)
        keys, values = self._cells.read_cells(layer_id, cells.numpy())
        return torch.from_numpy(keys).to(dtype), torch.from_numpy(values).to(dtype)

    def write_cells(self, layer_id: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """By the device."""
        self._cells.write_cells(layer_id, cells.numpy(), keys.float().numpy(), values.float().numpy())
