"""Engines that fill freed window pages with NaN at once, so that any later read shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sglcore.runtime.attention.windowed import WindowedAttention
from sglcore.runtime.memory.pools import CELL_MAJOR, TokenToKVPool
from sglcore.runtime.streams import Streams
from sglcore.schedule.cache.free_pages import PagePool
from tests.laws.engine import TokenEngine


class ForgettingPool(PagePool):
    """Overwrites freed pages on the device, after all submitted steps and before later ones."""

    __slots__ = ("cells", "given", "streams")

    def __init__(self, num_pages: int, cells: TokenToKVPool, streams: Streams) -> None:
        super().__init__(num_pages)
        self.cells, self.streams, self.given = cells, streams, 0
        self._forget(list(range(1, num_pages + 1)))

    def give(self, pages: list[int]) -> None:
        """Give pages back, and overwrite them."""
        super().give(pages)
        self.given += len(pages)
        self._forget(pages)

    def _forget(self, pages: list[int]) -> None:
        size = self.cells.page_size if self.cells.layout == CELL_MAJOR else 1
        with self.streams.running(), torch.inference_mode():
            for layer in range(self.cells.num_layers):
                for part in self.cells.kv(layer):
                    for page in pages:
                        part[page * size : (page + 1) * size].fill_(torch.nan)


class WindowEngine(TokenEngine):
    """An engine with few tokens per step; the model's windows are far shorter than its texts."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(
            folder, **{"max_batch_tokens": 8, "graph_token_buckets": (8,), "max_model_len": 96, **settings}
        )
        windows, runner = self.scheduler.running.memory.windows, self.worker.runner
        backend = runner.attn_backend
        assert isinstance(backend, WindowedAttention)
        self.freed = ForgettingPool(windows.num_pages, backend.window.token_to_kv_pool, runner.streams)
        windows._pool = self.freed
