"""Lists of rows and plans of compression, over random sequences of requests, compared with slow
loops and with the contents of the rows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sglcore.runtime.kernels import reference_sparse
from tests.kernels.guards import mutated

PAGE, PAGES, SLOTS = 8, 9, 4
WINDOW = 13


class Layout(NamedTuple):
    """The compression ratio, whether blocks overlap, and where the tokens before a block's last are
    kept (by page or in a ring). Up to `drafts` tokens of a step may be rolled back; the ring has
    the smallest size that allows it."""

    ratio: int
    overlaps: bool
    by_page: bool
    drafts: int

    @property
    def span(self) -> int:
        return self.ratio * (1 + self.overlaps)

    @property
    def ring(self) -> int:
        return self.span + self.drafts - 2


LAYOUTS = (Layout(4, True, True, 1), Layout(4, True, True, 3), Layout(8, False, False, 4), Layout(2, False, True, 2))


@dataclass
class Request:
    """The tokens of a request, each with a unique number, and its pages."""

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class Life:
    """Runs requests that arrive, share pages, continue in chunks, and roll tokens back."""

    def __init__(self, kernels: ModuleType, layout: Layout, seed: int) -> None:
        self._kernels, self._layout, self._random = kernels, layout, random.Random(seed)
        self._slots: dict[int, Request] = {}
        self._state: dict[int, int] = {}
        self._numbers = iter(range(1, 10**6))
        self._free_pages = iter(range(1, 10**6))

    def run(self, steps: int) -> None:
        """Run random steps, and check each."""
        for _ in range(steps):
            for slot in range(1, SLOTS):
                if slot not in self._slots or self._random.random() < 0.1:
                    self._slots[slot] = self._arrived()
            singles = self._random.random() < 0.4
            batch = self._random.sample(sorted(self._slots), self._random.randint(1, SLOTS - 1))
            room = {slot: PAGE * PAGES - len(self._slots[slot].tokens) for slot in batch}
            chunks = {slot: 1 if singles else min(self._random.choice((1, 2, 3, 7, 25)), room[slot]) for slot in batch}
            self._step({slot: count for slot, count in chunks.items() if room[slot] and count}, singles)

    def _arrived(self) -> Request:
        """Return a new request, or one that shares whole pages with another."""
        donor = self._random.choice([Request(), *self._slots.values()])
        shared = self._random.randint(0, len(donor.tokens) // PAGE)
        return Request(donor.tokens[: shared * PAGE], donor.pages[:shared])

    def _step(self, chunks: dict[int, int], singles: bool) -> None:
        begins = {slot: len(self._slots[slot].tokens) for slot in chunks}
        for slot, count in chunks.items():
            request = self._slots[slot]
            request.tokens += [next(self._numbers) for _ in range(count)]
            request.pages += [
                next(self._free_pages) for _ in range(-(-len(request.tokens) // PAGE) - len(request.pages))
            ]
        made = Step(self._layout, self._slots, begins)
        self._check_lists(made)
        plan = made.planned(self._kernels, with_lengths=True)
        if singles:
            for one, other in zip(plan, made.planned(self._kernels, with_lengths=False), strict=True):
                assert torch.equal(one[: len(other)], other)
        self._check_events(made, *plan[:3])
        self._write(made, plan[3])
        for slot, count in chunks.items():
            kept = max(1, count - self._random.randint(0, self._layout.drafts - 1))
            del self._slots[slot].tokens[begins[slot] + kept :]

    def _check_lists(self, made: Step) -> None:
        ratio, lists = self._layout.ratio, made.lists(self._kernels)
        for token, (slot, place) in enumerate(made.places):
            pages = self._slots[slot].pages
            window = [pages[p // PAGE] * PAGE + p % PAGE for p in range(max(0, place - WINDOW + 1), place + 1)]
            rows = PAGE // ratio
            blocks = [pages[b // rows] * rows + b % rows for b in range((place + 1) // ratio)]
            for found, wanted in zip(lists, (window, blocks), strict=True):
                assert found[token].tolist() == wanted + [-1] * (found.shape[1] - len(wanted))

    def _check_events(self, made: Step, reads: Tensor, block_positions: Tensor, out_rows: Tensor) -> None:
        ratio, span, rows = self._layout.ratio, self._layout.span, PAGE // self._layout.ratio
        places = [(slot, place) for slot, place in made.places if (place + 1) % ratio == 0]
        assert len(places) <= len(reads)
        for event, (slot, place) in enumerate(places):
            request, block = self._slots[slot], place // ratio
            wanted = [request.tokens[p] if p >= 0 else None for p in range(place - span + 1, place + 1)]
            assert [self._content(made, read) for read in reads[event].tolist()] == wanted
            assert block_positions[event] == block * ratio
            assert out_rows[event] == request.pages[block // rows] * rows + block % rows
        rest = slice(len(places), None)
        assert (reads[rest] == -1).all() and not block_positions[rest].any() and not out_rows[rest].any()

    def _content(self, made: Step, read: int) -> int | None:
        """Return the token at an index of `reads`: a token of this step, a kept one, or None."""
        if read == -1:
            return None
        slot, place = made.places[read] if read >= 0 else (0, 0)
        return self._slots[slot].tokens[place] if slot else self._state.get(-2 - read, 0)

    def _write(self, made: Step, writes: Tensor) -> None:
        kept = [row for row in writes.tolist() if row]
        assert len(kept) == len(set(kept)) and not writes[len(made.places) :].any()
        for (slot, place), row in zip(made.places, writes.tolist(), strict=False):
            if row:
                self._state[row] = self._slots[slot].tokens[place]


class Step:
    """The tensors of one step: the rows in order, then one padding row, and one padding token after
    the rows' tokens."""

    def __init__(self, layout: Layout, slots: dict[int, Request], begins: dict[int, int]) -> None:
        self._layout = layout
        self.places = [(slot, p) for slot, begin in begins.items() for p in range(begin, len(slots[slot].tokens))]
        counts = [len(slots[slot].tokens) - begin for slot, begin in begins.items()]
        self._slots = int32(*begins, 0)
        self._seq_lens = int32(*(len(slots[slot].tokens) for slot in begins), PAGE)
        self._lengths = int32(*counts, 1)
        self._starts = int32(*(sum(counts[:row]) for row in range(len(counts))), 0)
        self._tokens = (
            int32(*(slot for slot, _ in self.places), 0),
            int32(*(place for _, place in self.places), PAGE - 1),
        )
        self._offsets = int32(*(max(0, begin - layout.span) // PAGE * PAGE for begin in begins.values()), 0)
        self._table, self._state_table = (torch.zeros(SLOTS, PAGES, dtype=torch.int32) for _ in range(2))
        for slot, offset in zip(begins, self._offsets.tolist(), strict=False):
            pages = slots[slot].pages
            self._table[slot, : len(pages)] = int32(*pages)
            self._state_table[slot, : len(pages) - offset // PAGE] = int32(*pages[offset // PAGE :])

    def lists(self, kernels: ModuleType) -> tuple[Tensor, Tensor]:
        """Return for each token the rows of its sliding window and the rows of its complete
        blocks."""
        count, ratio = len(self._tokens[0]), self._layout.ratio
        window = torch.empty(count, WINDOW, dtype=torch.int32)
        blocks = torch.empty(count, PAGES * PAGE // ratio, dtype=torch.int32)
        kernels.window_rows(self._table, *self._tokens, WINDOW, PAGE, window)
        kernels.block_rows(self._table, *self._tokens, ratio, PAGE, blocks)
        return window, blocks

    def planned(self, kernels: ModuleType, with_lengths: bool) -> list[Tensor]:
        """Return the outputs of `compress_plan` for the largest possible number of blocks."""
        count, ratio = len(self._tokens[0]), self._layout.ratio
        events = min(count, count // ratio + len(self._slots))
        shapes = (events, self._layout.span), (events,), (events,), (count,)
        out = [torch.full(shape, -7, dtype=torch.int32) for shape in shapes]
        rows = self._slots, self._seq_lens, *((self._lengths, self._starts) if with_lengths else (None, None))
        by_page = (self._state_table, self._offsets) if self._layout.by_page else (None, None)
        kernels.compress_plan(*rows, *self._tokens, self._table, *by_page, PAGE, ratio, self._layout.ring, *out)
        return out


def int32(*values: int) -> Tensor:
    """Make an int32 vector."""
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@torch.inference_mode()
def test_every_row_that_a_plan_reads_holds_the_token_that_is_meant(layout: Layout) -> None:
    for seed in range(4):
        print(f"seed {seed}")
        Life(reference_sparse, layout, seed).run(15)


def test_what_is_no_event_names_no_row_behind_the_table() -> None:
    """Two requests near the end of their pages; neither completes a block."""
    table, out = int32(0, 0, 1, 2, 3, 4).view(3, 2), [torch.full(size, -7) for size in ((2, 8), (2,), (2,), (2,))]
    tokens = int32(1, 2), int32(12, 12)
    reference_sparse.compress_plan(
        int32(1, 2), int32(13, 13), None, None, *tokens, table, table, None, PAGE, 4, 8, *out
    )
    reads, places, out_rows, writes = out
    assert (reads == -1).all() and not places.any() and not out_rows.any()
    assert writes.tolist() == [2 * 8 + 4, 4 * 8 + 4]


MUTANTS = (
    ("place + ring >= end", "place + ring > end"),
    ("(place // page_size + 1) * page_size", "end"),
    ("right=True", "right=False"),
    ("source >= begin", "source > begin"),
    ("source < 0", "source <= 0"),
    ("slots > 0, ends", "slots >= 0, ends"),
    ("(own > 0) & ", ""),
    ("(position - offset) // page_size", "position // page_size"),
    ("positions.unsqueeze(1) - window + 1", "positions.unsqueeze(1) - window"),
    ("(positions + 1) // ratio", "positions // ratio"),
)


@pytest.mark.parametrize(("old", "new"), MUTANTS)
def test_a_defect_is_caught(old: str, new: str, tmp_path: Path) -> None:
    defect = mutated(reference_sparse, tmp_path, old, new)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        for layout in LAYOUTS:
            for seed in range(4):
                Life(defect, layout, seed).run(15)
