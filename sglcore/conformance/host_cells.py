"""KV slots of a device that does not run on the torch runtime, as arrays on the host, and as the
pool that laws use."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor


class HostCells(Protocol):
    """Access to the KV slots of a started device, as `cells` of a package's `conformance.toml`
    returns it. Every call waits.

    Keys and values are float32 [N, kv_heads, head_dim] and exact in `dtype`, a name such as
    "bfloat16"; `cells` are KV slots, int [N].
    """

    page_size: int
    num_cells: int
    num_layers: int
    dtype: str

    def read_cells(self, layer_id: int, cells: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return copies of the keys and values of the KV slots `cells` in one layer."""
        ...

    def write_cells(self, layer_id: int, cells: NDArray[Any], keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Write keys and values into the KV slots `cells` of one layer, as a forward of this device
        stores them."""
        ...


class HostPool:
    """`HostCells` as a `TokenToKVPool` with host tensors, for laws that read and write KV slots. No
    forward uses it."""

    generation = 0
    layout: ClassVar[str] = "host"

    def __init__(self, cells: HostCells) -> None:
        self._cells = cells
        self.page_size, self.num_cells, self.num_layers = cells.page_size, cells.num_cells, cells.num_layers

    def kv(self, layer_id: int) -> HostCells:
        """Return the access to the KV slots, the same for every layer, not tensors as other pools
        do."""
        return self._cells

    def store(self, layer_id: int, key: Tensor, value: Tensor, out_cache_loc: Tensor) -> None:
        """Write keys and values [N, kv_heads, head_dim] to the KV slots `out_cache_loc` as
        `write_cells` does: this pool has no other way to write."""
        self.write_cells(layer_id, out_cache_loc, key, value)

    def read_cells(self, layer_id: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values [N, kv_heads, head_dim] of the KV slots `cells` int
        [N], on the host, in the dtype of the device's KV slots."""
        dtype: torch.dtype = getattr(torch, self._cells.dtype)
        keys, values = self._cells.read_cells(layer_id, cells.numpy())
        return torch.from_numpy(keys).to(dtype), torch.from_numpy(values).to(dtype)

    def write_cells(self, layer_id: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [N, kv_heads, head_dim] of any floating dtype, on the host, into
        the KV slots `cells` int [N]."""
        self._cells.write_cells(layer_id, cells.numpy(), keys.float().numpy(), values.float().numpy())
