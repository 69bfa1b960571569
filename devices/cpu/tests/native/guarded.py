"""Guarded memory: it detects a kernel that writes out of bounds, and one that reads out of bounds
gets NaN.

Every tensor is surrounded by elements of a pattern (NaN for floats). A new tensor is filled with
the pattern too, so elements that a kernel leaves unwritten do not compare equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sglcore_cpu.native import BoundKernel, Engine, recorder

GUARD_BYTES = 1024
"""Guard before and after each tensor; a multiple of a cache line, so a tensor without an offset
starts on one."""
INTEGER = 1
"""The pattern of integers: a kernel that uses a guard as an index stays inside this process's
memory."""


def guarded(
    shape: Sequence[int], dtype: torch.dtype, offset_elements: int = 0, row_gap: int = 0
) -> tuple[Tensor, Callable[[], None]]:
    """Return (tensor, check): a tensor that starts `offset_elements` after a multiple of 64 bytes,
    filled with the pattern.

    Rows are its last dimension; `row_gap` guard elements follow each row. `check()` raises
    AssertionError if an element outside the tensor was written.
    """
    width = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    guard = GUARD_BYTES // dtype.itemsize
    count = rows * (width + row_gap)
    whole = _aligned(2 * guard + offset_elements + count, dtype)
    _fill(whole)
    start = whole.storage_offset() + guard + offset_elements
    view = whole.as_strided(tuple(shape), _strides(shape, width + row_gap), start)
    return view, lambda: _check(whole, view)


def guarded_copy(tensor: Tensor, offset_elements: int = 0, row_gap: int = 0) -> tuple[Tensor, Callable[[], None]]:
    """Return `guarded` memory with the values of `tensor`; the strides are `guarded`'s, not the
    tensor's."""
    view, check = guarded(tensor.shape, tensor.dtype, offset_elements, row_gap)
    return view.copy_(tensor), check


class GuardedResults:
    """A context manager that puts the results of every engine in guarded memory, and checks the
    guards at its end."""

    def __init__(self) -> None:
        self._checks: list[Callable[[], None]] = []

    def add(self, engine: Engine, kernel: int, arguments: bytes) -> None:
        """Run the call at once, as without a recorder."""
        token = recorder.set(None)
        engine.call(kernel, arguments)
        recorder.reset(token)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return guarded memory for `Engine.empty`."""
        view, check = guarded(shape, dtype)
        self._checks.append(check)
        return view

    def kernel(self, name: str) -> BoundKernel | None:
        """Not used."""
        raise NotImplementedError

    def host(self, function: Callable[..., object], *arguments: object) -> None:
        """Make the call at once."""
        function(*arguments)

    def __enter__(self) -> GuardedResults:
        self._token = recorder.set(self)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        recorder.reset(self._token)
        if error is None:
            for check in self._checks:
                check()


def _aligned(count: int, dtype: torch.dtype) -> Tensor:
    line = 64 // dtype.itemsize
    held = torch.empty(count + line, dtype=dtype)
    skip = -held.data_ptr() % 64 // dtype.itemsize
    return held[skip : skip + count]


def _fill(cells: Tensor) -> None:
    cells.fill_(torch.nan if cells.dtype.is_floating_point else INTEGER)


def _strides(shape: Sequence[int], row: int) -> tuple[int, ...]:
    outer = [row * math.prod(shape[place + 1 : -1]) for place in range(len(shape) - 1)]
    return (*outer, 1) if shape else ()


def _check(whole: Tensor, view: Tensor) -> None:
    now = whole.clone()
    inside = now.as_strided(view.shape, view.stride(), view.storage_offset() - whole.storage_offset())
    _fill(inside)
    expected = torch.empty_like(now)
    _fill(expected)
    wrong = (now.view(torch.uint8) != expected.view(torch.uint8)).nonzero()
    if len(wrong):
        place = int(wrong[0]) // whole.element_size() - (view.storage_offset() - whole.storage_offset())
        raise AssertionError(f"{len(wrong)} guard bytes were overwritten, the first at element {place} of {view.shape}")
