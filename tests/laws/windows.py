"""Engines that fill freed pages with NaN at once, so that any later read shows: window pages, and
the others too where both kinds share memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sglcore.runtime.attention.windowed import WindowedAttention
from sglcore.runtime.memory.pools import CELL_MAJOR, TokenToKVPool
from sglcore.runtime.streams import Streams
from sglcore.schedule.cache.free_pages import PagePool
from sglcore.schedule.cache.shared_pages import FullEnd, SharedPages, WindowEnd
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
        forget(self.cells, self.streams, pages)


def forget(cells: TokenToKVPool, streams: Streams, pages: list[int]) -> None:
    """Fill these pages of all layers with NaN."""
    size = cells.page_size if cells.layout == CELL_MAJOR else 1
    with streams.running(), torch.inference_mode():
        for layer in range(cells.num_layers):
            for part in cells.kv(layer):
                for page in pages:
                    part[page * size : (page + 1) * size].fill_(torch.nan)


class ForgettingFull(FullEnd):
    """Shared pages of all tokens: overwrites those that are freed."""

    __slots__ = ("cells", "given", "streams")

    def __init__(self, shared: SharedPages, cells: TokenToKVPool, streams: Streams) -> None:
        super().__init__(shared)
        self.cells, self.streams, self.given = cells, streams, 0
        forget(cells, streams, shared.free_pages())

    def give(self, pages: list[int]) -> None:
        """Give pages back, and overwrite them."""
        super().give(pages)
        self.given += len(pages)
        forget(self.cells, self.streams, pages)


class ForgettingWindows(WindowEnd):
    """Shared window pages: overwrites those that are freed."""

    __slots__ = ("cells", "given", "streams")

    def __init__(self, shared: SharedPages, cells: TokenToKVPool, streams: Streams) -> None:
        super().__init__(shared)
        self.cells, self.streams, self.given = cells, streams, 0

    def give(self, pages: list[int]) -> None:
        """Give window pages back, and overwrite them."""
        super().give(pages)
        self.given += len(pages)
        forget(self.cells, self.streams, pages)


class WindowEngine(TokenEngine):
    """An engine with few tokens per step; the model's windows are far shorter than its texts."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(
            folder, **{"max_batch_tokens": 8, "graph_token_buckets": (8,), "max_model_len": 96, **settings}
        )
        memory, runner = self.scheduler.running.memory, self.worker.runner
        backend = runner.attn_backend
        assert isinstance(backend, WindowedAttention)
        cells = backend.window.token_to_kv_pool
        if memory.shared is None:
            self.freed = ForgettingPool(memory.windows.num_pages, cells, runner.streams)
        else:
            self.freed = ForgettingWindows(memory.shared, cells, runner.streams)
            memory.pool = self.freed_full = ForgettingFull(memory.shared, backend.token_to_kv_pool, runner.streams)
        memory.windows._pool = self.freed
