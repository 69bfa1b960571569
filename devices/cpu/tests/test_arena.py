"""Memory for weights: aligned, zero, freed with its last tensor; and the system's huge page
setting."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from sglcore_cpu.arena import HUGE_PAGE, SETTING, huge_empty, huge_pages
from sglcore_cpu.ledger_rows import pages_row


@pytest.mark.parametrize("size", [0, 1, 100, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 17])
def test_memory_is_zero_of_the_size_asked_and_aligned_where_large(size: int) -> None:
    memory = huge_empty(size)
    assert memory.numel() == size
    assert not memory.any()
    if size >= HUGE_PAGE:
        assert memory.data_ptr() % HUGE_PAGE == 0
    memory.fill_(255)
    assert int(memory.sum()) == 255 * size


def test_memory_outlives_the_tensor_that_was_given_as_long_as_a_view_is_there() -> None:
    memory = huge_empty(HUGE_PAGE)
    memory[-1] = 7
    view, gone = memory[-1:], weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is None
    assert view.tolist() == [7]


@pytest.mark.parametrize(
    ("text", "granted"),
    [("always [madvise] never", True), ("[always] madvise never", True), ("always madvise [never]", False)],
)
def test_the_systems_own_words_say_whether_pages_are_huge(tmp_path: Path, text: str, granted: bool) -> None:
    file = tmp_path / SETTING
    file.parent.mkdir(parents=True)
    file.write_text(f"{text}\n")
    assert huge_pages(tmp_path) == (granted, f"/{SETTING} contains {text}")
    row = pages_row(tmp_path)
    assert not row.downgrade
    assert row.effective == ("huge" if granted else "4 KiB")


def test_a_system_without_the_setting_is_named(tmp_path: Path) -> None:
    assert huge_pages(tmp_path) == (False, f"/{SETTING} is not there")
