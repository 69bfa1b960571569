"""Attention of decode rows over the paged cells, on Apple GPUs: one launch, or two where a page
table may be long.

A threadgroup takes one part (`PART` positions) of one row for the query heads that share a KV head,
reads each K and V of it once, and its simdgroups walk the positions in turn. A row's numbers depend
on its own queries and cells only: not on the other rows, nor on the width of the page table, for
cuts and order of sums follow from its own length.

Floor of a row: 2 * seq_len * kv_heads * head_dim * itemsize bytes of K and V are read (4096
positions of 8 heads of 128 in two bytes: 16.8 MB). Memory bandwidth limits long rows; a few short
rows are limited by how many threadgroups there are (B * kv_heads * parts), and by one `simd_sum`
per position and query head. More than one part adds 8 * heads * (head_dim + 2) bytes a part,
written and read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx

from sglcore.device.errors import ConfigError
from sglcore_mlx.attention import metal_source

LANES = 32
"""Threads of a simdgroup, on every Apple GPU."""
SIMDGROUPS = 8
"""Simdgroups of a threadgroup. Part of a row's order of sums: the same for every batch."""
PART = 256
"""Positions of one threadgroup. Part of a row's order of sums: the same for every batch."""
MAX_BLOCK = 4
"""Positions whose scores a simdgroup works out before it rescales."""
MAX_QUERIES = 8
"""Query heads of one threadgroup, at most."""
MAX_REGISTERS = 32
"""Elements of the queries that one thread keeps, at most (as many again for what it adds up)."""
MAX_THREADS = 1024
"""Threads of a threadgroup that Metal allows."""
MAX_THREADGROUP_BYTES = 32 * 1024
"""Bytes of memory that a threadgroup may have."""
LOG2_E = math.log2(math.e)
"""Scores are kept in base 2."""
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
"""Element types that the kernels read and write."""


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel's text and the names of its arrays, in order; `kernel` is what MLX made of it (no
    device was asked)."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    kernel: Callable[..., list[mx.array]]


def program(name: str, inputs: Sequence[str], outputs: Sequence[str], source: str) -> Program:
    """A kernel from its body; works on machines without Metal, where only a launch fails."""
    kernel = mx.fast.metal_kernel(
        name=name, input_names=list(inputs), output_names=list(outputs), source=source, header=metal_source.HEADER
    )
    return Program(name, tuple(inputs), tuple(outputs), source, cast("Callable[..., list[mx.array]]", kernel))


_WALKED = ("queries", "kv", "page_table", "seq_lens", "scale", "softcap", "sinks")
_PARTIAL = ("part_values", "part_tops", "part_sums")
DECODE = program("sglcore_paged_decode", _WALKED, ("out",), metal_source.DECODE)
PARTS = program("sglcore_paged_parts", _WALKED, _PARTIAL, metal_source.PARTS)
COMBINE = program("sglcore_paged_combine", (*_PARTIAL, "seq_lens"), ("out",), metal_source.COMBINE)


@dataclass(frozen=True, slots=True)
class Launch:
    """How one kernel runs: `grid` and `threadgroup` count threads, `template` the constants of its
    text."""

    program: Program
    template: tuple[tuple[str, Any], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]


Launcher = Callable[[Launch, Sequence[Any]], list[mx.array]]
"""Runs a launch on its inputs, and gives its outputs."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes and types of one call, on which its launches depend. Checked when made
    (ConfigError).
    """

    rows: int
    """Decode rows."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Heads of keys and values."""
    head_dim: int
    """Elements of a head."""
    pages: int
    """Pages in a row of the page table."""
    page_size: int
    """Positions in a page."""
    window: int | None
    """The sliding window in positions. None: full attention."""
    dtype: mx.Dtype
    """The type of queries and output."""
    kv_dtype: mx.Dtype
    """The type of keys and values."""
    has_softcap: bool = False
    """Scores are bent to a bound."""
    has_sinks: bool = False
    """Heads have sinks."""

    def __post_init__(self) -> None:
        """Refuse what the kernels do not compute."""
        fits = self.head_dim > 0 and self.head_dim % LANES == 0 and self.head_dim <= MAX_THREADS
        if not fits or self.threadgroup_bytes > MAX_THREADGROUP_BYTES:
            raise _unfit(f"heads of {self.head_dim} elements", f"a multiple of {LANES} up to {_largest_head_dim()}")
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise _unfit(f"{self.heads} query heads over {self.kv_heads} KV heads", "a whole number for each KV head")
        if self.page_size < 1 or self.pages < 1:
            raise _unfit(f"tables of {self.pages} pages of {self.page_size} positions", "at least one of each")
        if self.window is not None and self.window < 1:
            raise _unfit(f"a window of {self.window} positions", "at least 1, or None")
        for dtype in (self.dtype, self.kv_dtype):
            if dtype not in FLOATS:
                raise _unfit(f"elements of {dtype}", "float32, float16 or bfloat16")

    @property
    def queries(self) -> int:
        """Query heads of one threadgroup: the largest divisor of those that share a KV head which
        registers hold."""
        shared = self.heads // self.kv_heads
        most = max(1, min(MAX_QUERIES, MAX_REGISTERS * LANES // self.head_dim))
        return max(count for count in range(1, most + 1) if shared % count == 0)

    @property
    def block(self) -> int:
        """Positions that a simdgroup takes at once: a power of two that divides a page."""
        return math.gcd(self.page_size, MAX_BLOCK)

    @property
    def parts(self) -> int:
        """Threadgroups along one row: enough for a row that fills its pages, or its window."""
        longest = self.pages * self.page_size
        return -(-min(longest, self.window or longest) // PART)

    @property
    def threadgroup_bytes(self) -> int:
        """Bytes of threadgroup memory: one query's values, and the top and sum of each query, of
        each simdgroup."""
        return 4 * SIMDGROUPS * (self.head_dim + 2 * MAX_QUERIES)


def metal_available() -> bool:
    """Whether this process has a GPU that runs Metal; elsewhere `paged_decode` raises what MLX
    raises."""
    return mx.metal.is_available()


def launch_on_metal(launch: Launch, inputs: Sequence[Any]) -> list[mx.array]:
    """The launch as lazy arrays on the GPU's stream; waits for nothing. RuntimeError (MLX) without
    Metal."""
    return launch.program.kernel(
        inputs=list(inputs),
        template=list(launch.template),
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=list(launch.output_shapes),
        output_dtypes=list(launch.output_dtypes),
    )


def walk_launch(shape: Shape) -> Launch:
    """The kernel that reads the cells: DECODE where one part is a whole row, PARTS otherwise."""
    rows, heads, parts, queries = shape.rows, shape.heads, shape.parts, shape.queries
    split = parts > 1
    template = {
        "T": shape.dtype,
        "KV": shape.kv_dtype,
        "HEADS": heads,
        "KV_HEADS": shape.kv_heads,
        "HEAD_DIM": shape.head_dim,
        "PAGE_SIZE": shape.page_size,
        "WINDOW": shape.window or 0,
        "HAS_SOFTCAP": int(shape.has_softcap),
        "HAS_SINKS": int(shape.has_sinks),
        "QUERIES": queries,
        "SIMDGROUPS": SIMDGROUPS,
        "BLOCK": shape.block,
        "PART": PART,
    }
    partial = ((rows, heads, parts, shape.head_dim), (rows, heads, parts), (rows, heads, parts))
    return Launch(
        program=PARTS if split else DECODE,
        template=tuple(template.items()),
        grid=(SIMDGROUPS * LANES * parts, heads // queries, rows),
        threadgroup=(SIMDGROUPS * LANES, 1, 1),
        output_shapes=partial if split else ((rows, heads, shape.head_dim),),
        output_dtypes=(mx.float32,) * 3 if split else (shape.dtype,),
    )


def combine_launch(shape: Shape) -> Launch:
    """The kernel that adds up what PARTS wrote."""
    template = {
        "T": shape.dtype,
        "HEADS": shape.heads,
        "HEAD_DIM": shape.head_dim,
        "WINDOW": shape.window or 0,
        "PART": PART,
    }
    return Launch(
        program=COMBINE,
        template=tuple(template.items()),
        grid=(shape.head_dim, shape.heads, shape.rows),
        threadgroup=(shape.head_dim, 1, 1),
        output_shapes=((shape.rows, shape.heads, shape.head_dim),),
        output_dtypes=(shape.dtype,),
    )


def paged_decode(
    q: mx.array,
    kv: mx.array,
    page_table: mx.array,
    seq_lens: mx.array,
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    launcher: Launcher = launch_on_metal,
) -> mx.array:
    """Attention of one new query per row over its cells; lazy, waits for nothing, works under
    `mx.compile`.

    `q` [B, heads, D], `kv` [cells, 2, kv_heads, D] (a page's cells lie together, K then V),
    `page_table` int32 [B, n], `seq_lens` int32 [B]. Row b attends to positions [0, seq_lens[b]), or
    to the last `window` of them; position p is cell `page_table[b, p // page_size] * page_size + p
    % page_size`. `softcap` and `sinks` [heads] are those of `LayerShape`. 1 <= seq_lens <= n *
    page_size must hold: lengths are not read here. Nothing beyond a row's length or before its
    window is read, neither cells nor pages. Returns [B, heads, D] in `q`'s type, computed in
    float32. ConfigError: sizes or types that the kernels do not compute.
    """
    shape = shape_of(q, kv, page_table, seq_lens, page_size=page_size, window=window)
    shape = replace(shape, has_softcap=softcap is not None, has_sinks=sinks is not None)
    if sinks is not None and tuple(sinks.shape) != (shape.heads,):
        raise _unfit(f"sinks of shape {tuple(sinks.shape)}", f"({shape.heads},) with q of shape {tuple(q.shape)}")
    # The text names an array of sinks; where there are none it is not read.
    extras = (softcap or 0.0) * LOG2_E, seq_lens if sinks is None else sinks
    walked = launcher(walk_launch(shape), (q, kv, page_table, seq_lens, scale * LOG2_E, *extras))
    if shape.parts == 1:
        return walked[0]
    return launcher(combine_launch(shape), (*walked, seq_lens))[0]


def shape_of(
    q: mx.array, kv: mx.array, page_table: mx.array, seq_lens: mx.array, *, page_size: int, window: int | None
) -> Shape:
    """The sizes of a call of `paged_decode`; ConfigError where the arrays do not belong
    together."""
    if q.ndim != 3:
        raise _unfit(f"q of shape {tuple(q.shape)}", "rows, heads and elements")
    rows, kv_heads = q.shape[0], kv.shape[2] if kv.ndim == 4 else 0
    wanted = {
        "kv": (kv.shape, (*kv.shape[:1], 2, kv_heads, q.shape[-1])),
        "page_table": (page_table.shape, (rows, *page_table.shape[1:2])),
        "seq_lens": (seq_lens.shape, (rows,)),
    }
    for name, (found, want) in wanted.items():
        if tuple(found) != want:
            raise _unfit(f"{name} of shape {tuple(found)}", f"{want} with q of shape {tuple(q.shape)}")
    for name, array in (("page_table", page_table), ("seq_lens", seq_lens)):
        if array.dtype != mx.int32:
            raise _unfit(f"{name} of {array.dtype}", "mlx.core.int32")
    pages = page_table.shape[1]
    return Shape(rows, q.shape[1], kv_heads, q.shape[2], pages, page_size, window, q.dtype, kv.dtype)


def _largest_head_dim() -> int:
    elements = MAX_THREADGROUP_BYTES // (4 * SIMDGROUPS) - 2 * MAX_QUERIES
    return min(MAX_THREADS, elements) // LANES * LANES


def _unfit(found: str, wanted: str) -> ConfigError:
    return ConfigError(
        f"{found} in paged decode attention", wanted=wanted, remedy="choose the attention backend 'gathered'"
    )
