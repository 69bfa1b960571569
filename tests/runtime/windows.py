"""A tiny model with sliding-window layers in a pool of their own, and the host that hands out their
pages.

Freed window pages are filled with NaN at once, so that any later read of them is seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sglcore.runtime.attention.contract import AttentionBackend, AttentionShape
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.attention.windowed import WindowedAttention
from sglcore.runtime.memory.geometry import keeps_window, layer_shapes
from sglcore.runtime.memory.pools import MHATokenToKVPool, ReqToTokenPool, WindowTable
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from tests.runtime.tiny import HEAD_DIM, HEADS, KV_HEADS, PAGE, SLOTS, Desk, Site, TinyModel, ints, make_site, offsets

STEP = 9
"""The most tokens of a step."""

Part = Callable[..., AttentionBackend]


def make_windowed(
    windows: tuple[int | None, ...] = (None, 3),
    *,
    num_pages: int = 24,
    full: Part = ReferenceAttention,
    window: Part = ReferenceAttention,
    **options: Any,
) -> Site:
    """A site with two pools; the pool of the sliding-window layers is filled with NaN. `full` and
    `window` make the two backends."""
    model, longest = TinyModel(windows=windows), max(each for each in windows if each is not None)
    table = WindowTable(SLOTS, longest, STEP, PAGE, "cpu")

    def attention(shape: AttentionShape, main: ReqToTokenPool, cells: MHATokenToKVPool, kernels: Any) -> Any:
        kept = [layer for layer in model.attention_layers if keeps_window(layer, longest)]
        shapes = layer_shapes(model.attention_layers, lambda layer: layer in kept)
        pool = MHATokenToKVPool(num_pages, PAGE, shapes, torch.float32, "cpu")
        forget(pool, list(range(1, num_pages + 1)))
        each = ((KV_HEADS, HEAD_DIM),)
        of_window = AttentionShape(HEADS, each * len(kept), tuple(layer.sliding_window for layer in kept))
        of_full = AttentionShape(HEADS, each, (None,))
        rest = None if len(kept) == len(windows) else full(of_full, main, cells, kernels)
        part = window(of_window, table, pool, kernels)
        return WindowedAttention(shape, main, cells, part, rest, [layer.layer_id for layer in kept])

    return make_site(model, attention=attention, window_table=table, **options)


def forget(pool: MHATokenToKVPool, pages: Sequence[int]) -> None:
    """Fill these pages with NaN in every layer."""
    cells = [page * pool.page_size + place for page in pages for place in range(pool.page_size)]
    for layer in range(pool.num_layers):
        for part in pool.kv(layer):
            part[cells] = torch.nan


class WindowDesk(Desk):
    """A desk that also hands out window pages, and reuses each as soon as no later token sees
    it."""

    def __init__(self, site: Site, window: int, seed: int = 0, num_pages: int = 24) -> None:
        super().__init__(seed)
        self.window, self.site = window, site
        self.free_windows = list(range(1, num_pages + 1))
        random.Random(seed + 1).shuffle(self.free_windows)
        self.starts: dict[int, int] = {}
        self.windows: dict[int, list[int]] = {}
        self.drops = 0

    def leave(self, slot: int) -> None:
        """Free the window pages of a request that ends."""
        super().leave(slot)
        self.starts.pop(slot)
        self._give(self.windows.pop(slot))

    def batch(self, rows: Mapping[int, Sequence[int]], mode: ForwardMode, **values: Any) -> ScheduleBatch:
        """The step, with the window page lists that changed."""
        before = {slot: self.lens.get(slot, 0) for slot in rows}
        made = super().batch(rows, mode, **values)
        lists = [self._advance(slot, before[slot]) for slot in rows]
        made.window_starts = ints([self.starts[slot] for slot in rows])
        if any(lists):
            made.window_offsets = offsets([len(pages) for pages in lists])
            made.window_pages = ints([page for pages in lists for page in pages])
        return made

    def dead(self, length: int) -> int:
        """The number of pages that the next token of a request with `length` tokens does not
        see."""
        return max(0, length - self.window + 1) // PAGE

    def _advance(self, slot: int, before: int) -> list[int]:
        """The slot's new page list; empty if it did not change."""
        pages, start = self.windows.setdefault(slot, []), self.starts.setdefault(slot, 0)
        gone = self.dead(before) - start // PAGE
        self._give(pages[:gone])
        del pages[:gone]
        self.drops += gone
        self.starts[slot] = start = start + gone * PAGE
        new = -(-(self.lens[slot] - start) // PAGE) - len(pages)
        pages += [self.free_windows.pop() for _ in range(new)]
        return list(pages) if gone or new else []

    def _give(self, pages: list[int]) -> None:
        backend = self.site.attention
        assert isinstance(backend, WindowedAttention)
        pool = backend.window.token_to_kv_pool
        assert isinstance(pool, MHATokenToKVPool)
        forget(pool, pages)
        self.free_windows += pages
