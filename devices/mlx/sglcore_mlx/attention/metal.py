"""Paged decode attention on Apple GPUs: one launch, or two if the page table has more than one part
per row.

A threadgroup processes one part (`PART` positions) of one row for query heads that share a KV head.
It reads each key and value once; its simdgroups take blocks of positions in turn. The bits of a
row's result depend only on its own queries and KV, not on other rows or the width of the page
table, because the parts and the order of sums follow from its own length.

Lower bound of a row: it reads 2 * seq_len * kv_heads * head_dim * itemsize bytes of K and V (4096
positions of 8 heads of 128 in 2 bytes: 16.8 MB). Memory bandwidth limits long rows. Few short rows
are limited by the number of threadgroups (B * kv_heads * parts) and by one `simd_sum` per position
and query head. With more than one part, 8 * heads * (head_dim + 2) bytes per part are written and
read in addition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx

from sglcore.core.errors import ConfigError
from sglcore_mlx.attention import metal_source

LANES = 32
"""Threads per simdgroup on every Apple GPU."""
SIMDGROUPS = 8
"""Simdgroups per threadgroup. Constant, because it determines the order of sums of a row."""
PART = 256
"""Positions per threadgroup. Constant, because it determines the order of sums of a row."""
MAX_BLOCK = 4
"""The most positions for which a simdgroup computes scores before it rescales."""
MAX_QUERIES = 8
"""The most query heads per threadgroup."""
MAX_REGISTERS = 32
"""The most query elements in registers of one thread; the accumulators take the same number
again."""
MAX_THREADS = 1024
"""Metal's limit of threads per threadgroup."""
MAX_THREADGROUP_BYTES = 32 * 1024
"""Metal's limit of threadgroup memory in bytes."""
LOG2_E = math.log2(math.e)
"""Factor for scores in base 2."""
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
"""Element types that the kernels support."""


@dataclass(frozen=True, slots=True)
class Program:
    """A Metal kernel, as `program` makes it: its name, the names of its input and output arrays, in
    order, its Metal source, and `kernel`, MLX's kernel object."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    kernel: Callable[..., list[mx.array]]


def program(name: str, inputs: Sequence[str], outputs: Sequence[str], source: str) -> Program:
    """Make a kernel from its body `source`; MLX adds the signature, and the header of
    `metal_source`. Works on machines without Metal, where only a launch fails."""
    kernel = mx.fast.metal_kernel(
        name=name, input_names=list(inputs), output_names=list(outputs), source=source, header=metal_source.HEADER
    )
    return Program(name, tuple(inputs), tuple(outputs), source, cast("Callable[..., list[mx.array]]", kernel))


_WALKED = ("queries", "kv", "page_table", "seq_lens", "scale", "softcap", "sinks", "visible")
_PARTIAL = ("part_values", "part_tops", "part_sums")
DECODE = program("sglcore_paged_decode", _WALKED, ("out",), metal_source.DECODE)
PARTS = program("sglcore_paged_parts", _WALKED, _PARTIAL, metal_source.PARTS)
COMBINE = program("sglcore_paged_combine", (*_PARTIAL, "seq_lens"), ("out",), metal_source.COMBINE)


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch of one kernel, not yet run: `grid` (all threads) and `threadgroup`, both in
    threads; `template`: the constants of its source, as (name, value); shapes and dtypes of its
    outputs."""

    program: Program
    template: tuple[tuple[str, Any], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]


Launcher = Callable[[Launch, Sequence[Any]], list[mx.array]]
"""Runs a launch on its inputs; returns its outputs."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes and types of one call of `paged_decode`, which determine its launches. Making one
    raises ConfigError if the kernels do not support them."""

    rows: int
    """Number of queries (decode rows)."""
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
    """Whether scores have a softcap."""
    has_sinks: bool = False
    """Whether heads have sinks."""
    has_visible: bool = False
    """Whether each row has a word that says which of its last positions it sees."""

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes and types that the kernels do not support."""
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
        """Query heads per threadgroup, at least 1: the largest divisor of the query heads per KV
        head that fits into registers."""
        shared = self.heads // self.kv_heads
        most = max(1, min(MAX_QUERIES, MAX_REGISTERS * LANES // self.head_dim))
        return max(count for count in range(1, most + 1) if shared % count == 0)

    @property
    def block(self) -> int:
        """Positions that a simdgroup (warp) processes at once: 1, 2 or 4, a divisor of the page
        size."""
        return math.gcd(self.page_size, MAX_BLOCK)

    @property
    def parts(self) -> int:
        """Threadgroups along one row: enough parts of `PART` positions for a row that fills its
        pages, or its window if that is shorter."""
        longest = self.pages * self.page_size
        return -(-min(longest, self.window or longest) // PART)

    @property
    def threadgroup_bytes(self) -> int:
        """Bytes of threadgroup memory: for each simdgroup the values of one query, and maximum and
        sum of each query."""
        return 4 * SIMDGROUPS * (self.head_dim + 2 * MAX_QUERIES)


def metal_available() -> bool:
    """Return whether there is a GPU that runs Metal; without one, evaluating a launch of
    `paged_decode` raises MLX's error."""
    return mx.metal.is_available()


def launch_on_metal(launch: Launch, inputs: Sequence[Any]) -> list[mx.array]:
    """Queue a launch on the GPU's stream; returns lazy arrays, does not wait. Raises RuntimeError
    (MLX) without Metal."""
    return launch.program.kernel(
        inputs=list(inputs),
        template=list(launch.template),
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=list(launch.output_shapes),
        output_dtypes=list(launch.output_dtypes),
    )


def walk_launch(shape: Shape) -> Launch:
    """Return the launch of the kernel that reads the KV cache: DECODE, which writes the result, if
    a row has one part, otherwise PARTS, with three float32 outputs for `combine_launch`."""
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
        "HAS_VISIBLE": int(shape.has_visible),
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
    """Return the launch of the kernel that combines the three outputs of PARTS into [rows, heads,
    head_dim]."""
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
    visible: mx.array | None = None,
    launcher: Launcher = launch_on_metal,
) -> mx.array:
    """Attention of one query per row over the paged KV cache; lazy, does not wait, works under
    `mx.compile`.

    `q` [B, heads, D], `kv` [cells, 2, kv_heads, D] (the KV slots of a page are consecutive, K then
    V), `page_table` int32 [B, n], `seq_lens` int32 [B]. Row b attends to positions [0,
    seq_lens[b]), or to the last `window` of them; position p is KV slot `page_table[b, p //
    page_size] * page_size + p % page_size`. `softcap` and `sinks` [heads] as in `LayerShape`.
    `visible` int32 [B] as in `ForwardInputs`: positions that it hides are read, but do not count.
    The caller must ensure 1 <= seq_lens <= n * page_size; this is not checked. KV slots and page
    table entries beyond a row's length or before its window are not read. Returns [B, heads, D] in
    `q`'s type, computed in float32. Raises ConfigError for unsupported sizes or types.
    """
    shape = shape_of(q, kv, page_table, seq_lens, page_size=page_size, window=window)
    has = {"has_softcap": softcap is not None, "has_sinks": sinks is not None, "has_visible": visible is not None}
    shape = replace(shape, **has)
    if sinks is not None and tuple(sinks.shape) != (shape.heads,):
        raise _unfit(f"sinks of shape {tuple(sinks.shape)}", f"({shape.heads},) with q of shape {tuple(q.shape)}")
    # The kernel needs arrays for sinks and visible words; without them these are not read.
    extras = (softcap or 0.0) * LOG2_E, seq_lens if sinks is None else sinks, seq_lens if visible is None else visible
    walked = launcher(walk_launch(shape), (q, kv, page_table, seq_lens, scale * LOG2_E, *extras))
    if shape.parts == 1:
        return walked[0]
    return launcher(combine_launch(shape), (*walked, seq_lens))[0]


def shape_of(
    q: mx.array, kv: mx.array, page_table: mx.array, seq_lens: mx.array, *, page_size: int, window: int | None
) -> Shape:
    """Return the sizes of a call of `paged_decode`, without softcap and sinks. Raises ConfigError
    if the arrays' shapes do not match, if table or lengths are not int32, or if the kernels do not
    support the sizes."""
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
