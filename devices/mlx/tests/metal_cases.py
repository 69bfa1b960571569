"""Test cases of paged decode attention with their expected results: scattered pages, and NaN in
every KV slot that must not be read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

NO_PAGE = 1_000_000
"""Page table entry where a row has no page; far out of range of the KV cache."""


@dataclass(frozen=True, slots=True)
class Case:
    """The sizes of one call, and the seed of its data. `strength` multiplies the queries; `pages`
    is the minimum width of the page table."""

    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 16
    pages: int = 0
    window: int | None = None
    dtype: mx.Dtype = mx.float32
    kv_dtype: mx.Dtype = mx.float32
    strength: float = 1.0
    seed: int = 0
    softcap: float | None = None
    has_sinks: bool = False
    has_visible: bool = False

    @property
    def width(self) -> int:
        """Columns of the page table: `pages`, or more if the longest row needs more."""
        return max(self.pages, -(-max(self.lengths) // self.page_size))

    @property
    def scale(self) -> float:
        """The softmax scale, 1 / sqrt(head_dim)."""
        return self.head_dim**-0.5

    def read(self, row: int) -> np.ndarray:
        """Return the positions that a row may read."""
        length = self.lengths[row]
        return np.arange(max(0, length - (self.window or length)), length)

    @property
    def words(self) -> np.ndarray:
        """Random words int32 [B], as `ForwardInputs.visible`: a row always sees itself."""
        rng = np.random.default_rng([self.seed, 2])
        drawn = rng.integers(0, 2**31, len(self.lengths)) & rng.integers(0, 2**31, len(self.lengths))
        return (drawn - 2**31).astype(np.int32)

    def visible(self, row: int) -> np.ndarray:
        """Return the positions to which a row attends."""
        places = self.read(row)
        if not self.has_visible:
            return places
        before, word = self.lengths[row] - 1 - places, int(self.words[row]) % 2**32
        return places[[each > 31 or bool(word >> (31 - int(each)) & 1) for each in before]]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arrays of a call of `paged_decode`, in argument order, and the sinks."""

    q: mx.array
    kv: mx.array
    page_table: mx.array
    seq_lens: mx.array
    sinks: mx.array | None = None
    visible: mx.array | None = None

    @property
    def all(self) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """The positional arguments."""
        return self.q, self.kv, self.page_table, self.seq_lens


def drawn(seed: int) -> Case:
    """Return a random case: sizes, lengths, an optional window, dtypes."""
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.choice([1, 2, 3]))
    types = (mx.float32, mx.float16, mx.bfloat16)
    dtype = types[int(rng.integers(3))]
    lengths = tuple(int(n) for n in np.where(rng.random(3) < 0.5, rng.integers(1, 20, 3), rng.integers(1, 301, 3)))
    return Case(
        lengths=lengths[: int(rng.integers(1, 4))],
        heads=kv_heads * int(rng.integers(1, 9)),
        kv_heads=kv_heads,
        head_dim=32 * int(rng.choice([1, 2, 3, 4, 5, 8])),
        page_size=int(rng.choice([8, 16, 32])),
        pages=int(rng.integers(0, 40)),
        window=None if rng.random() < 0.5 else int(rng.integers(1, 301)),
        dtype=dtype,
        kv_dtype=dtype if rng.random() < 0.7 else mx.bfloat16,
        seed=seed,
        softcap=None if rng.random() < 0.5 else float(rng.choice([0.7, 50.0])),
        has_sinks=bool(rng.random() < 0.5),
        has_visible=bool(seed % 2),
    )


def row_of(case: Case, row: int, pages: int = 0) -> Case:
    """Return the case with only this row; `one_row` gives the matching inputs."""
    return replace(case, lengths=case.lengths[row : row + 1], pages=pages)


def one_row(inputs: Inputs, row: int, width: int) -> Inputs:
    """Return one row of a call as a batch of one, with a page table of `width` columns."""
    at = slice(row, row + 1)
    return Inputs(
        inputs.q[at],
        inputs.kv,
        mx.contiguous(inputs.page_table[at, :width]),
        inputs.seq_lens[at],
        inputs.sinks,
        None if inputs.visible is None else inputs.visible[at],
    )


def made(case: Case) -> Inputs:
    """Return the case's arrays. Pages are in random order; unused KV slots hold NaN, unused page
    table entries NO_PAGE."""
    rng = np.random.default_rng([case.seed, 1])
    rows, width, size = len(case.lengths), case.width, case.page_size
    pages = 1 + rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    kv = np.full(((rows * width + 1) * size, 2, case.kv_heads, case.head_dim), np.nan, np.float32)
    table = np.full((rows, width), NO_PAGE, np.int32)
    for row in range(rows):
        positions = case.read(row)
        table[row, positions // size] = pages[row, positions // size]
        cells = pages[row, positions // size] * size + positions % size
        kv[cells] = rng.standard_normal((len(cells), *kv.shape[1:]))
    q = rng.standard_normal((rows, case.heads, case.head_dim)) * case.strength
    return Inputs(
        mx.array(q.astype(np.float32)).astype(case.dtype),
        mx.array(kv).astype(case.kv_dtype),
        mx.array(table),
        mx.array(np.array(case.lengths, np.int32)),
        mx.array(rng.standard_normal(case.heads).astype(np.float32)).astype(case.dtype) if case.has_sinks else None,
        mx.array(case.words) if case.has_visible else None,
    )


def expected(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Return the expected result in float64 [B, heads, D], and the error bound that float32 and the
    result's dtype allow."""
    q, kv = _float64(inputs.q), _float64(inputs.kv)
    table = np.array(inputs.page_table)
    right, bound = np.empty_like(q), np.empty_like(q)
    for row in range(len(case.lengths)):
        positions = case.visible(row)
        cells = table[row, positions // case.page_size] * case.page_size + positions % case.page_size
        for head in range(case.heads):
            keys, values = np.moveaxis(kv[cells, :, head // (case.heads // case.kv_heads)], 1, 0)
            scores = keys @ q[row, head] * case.scale
            if case.softcap is not None:
                scores = case.softcap * np.tanh(scores / case.softcap)
            sink = -np.inf if inputs.sinks is None else _float64(inputs.sinks)[head]
            most = max(sink, scores.max())
            weights = np.exp(scores - most)
            right[row, head] = weights @ values / (weights.sum() + np.exp(sink - most))
            bound[row, head] = 2.0**-21 * (2 + np.abs(scores).max()) * np.abs(values).max()
    digits = {mx.float32: 24, mx.float16: 11, mx.bfloat16: 8}[case.dtype]
    return right, bound + 2.0**-digits * np.abs(right)


def assert_right(case: Case, inputs: Inputs, got: mx.array) -> None:
    """Compare a result with `expected`; the AssertionError names the case and the worst
    element."""
    right, bound = expected(case, inputs)
    assert got.dtype == case.dtype and got.shape == right.shape, (got.dtype, got.shape, case)
    excess = np.nan_to_num(np.abs(_float64(got) - right), nan=np.inf) - bound
    worst = np.unravel_index(excess.argmax(), excess.shape)
    assert excess.max() <= 0, f"off by {excess[worst]:.3g} more than allowed at {worst}, seed {case.seed}: {case}"


def _float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)
