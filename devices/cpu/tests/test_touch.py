"""Cells get their memory while the processor is idle: all of it, with what was written, until they are gone."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from sglcore_cpu import touch
from sglcore_cpu.arena import HUGE_PAGE, huge_zeros
from sglcore_cpu.touch import NAME, touch_when_idle

PLENTY = 1 << 40
needs_smaps = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs the kernel's account of memory")


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the mapping that has this tensor's first byte which memory stands behind."""
    found, address = False, tensor.data_ptr()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(word, 16) for word in head.split("-"))
            found = first <= address < last
        elif found and head == "Rss:":
            return int(line.split()[1]) << 10
    raise AssertionError("the tensor lies in no mapping")


def wait() -> None:
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(60)


@needs_smaps
def test_all_memory_stands_behind_the_cells_and_keeps_what_was_written() -> None:
    cells = [huge_zeros((5, HUGE_PAGE // 2), torch.bfloat16) for _ in range(2)]
    cells[0][3, 7] = 5.0
    assert resident(cells[0]) <= HUGE_PAGE
    assert touch_when_idle(cells, PLENTY) == (True, "in advance, while cores are idle")
    wait()
    assert all(resident(part) >= part.nbytes for part in cells)
    assert cells[0][3, 7] == 5.0 and cells[0].count_nonzero() == 1 and not cells[1].any()


@needs_smaps
def test_it_ends_when_cells_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, kept = huge_zeros((HUGE_PAGE,), torch.uint8), huge_zeros((4, HUGE_PAGE), torch.uint8)
    may_begin, begin = threading.Event(), touch._touch_all

    def late(references: Any) -> None:
        may_begin.wait(60)
        begin(references)

    monkeypatch.setattr(touch, "_touch_all", late)
    assert touch_when_idle([gone, kept], PLENTY)[0]
    del gone
    gc.collect()
    may_begin.set()
    wait()
    assert resident(kept) == 0


@pytest.mark.parametrize(("num_bytes", "available"), [(4096, PLENTY), (4 * HUGE_PAGE, 15 * HUGE_PAGE)])
def test_few_cells_and_too_many_get_memory_as_they_are_used(num_bytes: int, available: int) -> None:
    cells = huge_zeros((num_bytes,), torch.uint8)
    does, why = touch_when_idle([cells], available)
    assert not does and "as they are used" in why
    assert not [thread for thread in threading.enumerate() if thread.name == NAME]
