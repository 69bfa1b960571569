"""The pages of a KV pool as host bytes, for transfer to another engine."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.memory.pools import MHATokenToKVPool
from sglcore.runtime.streams import Streams
from sglcore.worker.page_transfer import Bytes, Ints, Region

KINDS = ("keys", "values")


class PoolPages:
    """Implements `PageMemory` for a pool in which the keys, and the values, of a page are
    contiguous bytes.
    """

    def __init__(self, pool: MHATokenToKVPool, streams: Streams) -> None:
        self._pool, self._streams = pool, streams
        self.page_size = pool.page_size
        self.cells = pool.layout
        self._kept = [
            (layer, place) for layer in range(pool.num_layers) for place in range(2) if pool.kv(layer)[place].nbytes
        ]
        self.regions = tuple(self._region(*each) for each in self._kept)

    def _region(self, layer: int, place: int) -> Region:
        tensor = self._pool.kv(layer)[place]
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Region(layer, KINDS[place], tensor.data_ptr(), tensor.nbytes // self._count, self._count, dtype)

    @property
    def _count(self) -> int:
        return self._pool.num_cells // self.page_size

    def read(self, region: int, pages: Ints) -> Bytes:
        """Implements `PageMemory.read`: gather the pages `pages` int [N] of a region on the forward
        stream and return them on the host, uint8 [N, bytes of a page]. Waits.
        """
        with self._streams.running():
            tensor = self._bytes(region)
            return tensor.index_select(0, self._places(pages, tensor)).cpu().numpy()

    def write(self, region: int, pages: Ints, data: NDArray[np.uint8]) -> None:
        """Implements `PageMemory.write`: copy `data` uint8 [N, bytes of a page] to the device and
        scatter it to the pages `pages` int [N] of a region, on the forward stream.
        """
        with self._streams.running():
            tensor = self._bytes(region)
            tensor.index_copy_(0, self._places(pages, tensor), torch.from_numpy(data).to(tensor.device))

    def _bytes(self, region: int) -> Tensor:
        layer, place = self._kept[region]
        return self._pool.kv(layer)[place].view(self._count, -1).view(torch.uint8)

    def _places(self, pages: Ints, tensor: Tensor) -> Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(tensor.device)
