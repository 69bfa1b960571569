"""Gives sglcore's conformance kit access to the KV cache of a started device as host arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from sglcore_mlx.pool import DeviceState, store
from sglcore_mlx.thread import StreamThread


class Cells:
    """The kit's `HostCells` over a worker's KV cache. Every method runs on the stream thread and
    waits."""

    def __init__(self, built: Mapping[str, Any]) -> None:
        """`built`: the results of the bring-up steps, by step name. Raises IndexError for a model
        without a KV cache."""
        self._state: DeviceState = built["pools"]
        self._thread: StreamThread = built["stream_thread"]
        self.page_size: int = built["sizes"].page_size
        self.num_cells = self._state.cells[0].shape[0]
        self.num_layers = len(self._state.cells)
        self.dtype = str(self._state.cells[0].dtype).rpartition(".")[2]

    def read_cells(self, layer_id: int, cells: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return copies of keys and values, each float32 [N, kv_heads, head_dim], of the KV slots
        `cells`, int32 [N]."""
        found = self._thread.call(self._read, layer_id, cells)
        return found[:, 0].copy(), found[:, 1].copy()

    def write_cells(self, layer_id: int, cells: NDArray[Any], keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Write keys and values [N, kv_heads, head_dim] to the KV slots `cells`, int32 [N], cast to
        the cache's dtype as in a forward."""
        self._thread.call(self._write, layer_id, cells, keys, values)

    def _read(self, layer_id: int, cells: NDArray[Any]) -> NDArray[Any]:
        return np.array(self._state.cells[layer_id][mx.array(cells)].astype(mx.float32))

    def _write(self, layer_id: int, cells: NDArray[Any], keys: NDArray[Any], values: NDArray[Any]) -> None:
        held = self._state.cells
        held[layer_id] = store(held[layer_id], mx.array(cells), mx.array(keys), mx.array(values))
        mx.eval(held[layer_id])
