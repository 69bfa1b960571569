"""Random requests over random pages for the native attention kernels, in guarded memory, and their
expected results.

The pool holds NaN in every KV slot that belongs to no request. The oracle is dense attention in
float64.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from devices.cpu.tests.native.guarded import guarded, guarded_copy
from sglcore_cpu.kernels.attention import CELL_TYPES
from sglcore_cpu.kernels.kv_pool import read_int8
from sglcore_cpu.native import Engine
from tests.attention.rows import Heads, visible

FLOAT, HALF, BYTE = torch.float32, torch.bfloat16, torch.uint8
BOUNDS = {FLOAT: 2e-5, HALF: 1e-2}
"""Absolute and relative bound by the dtype of the result; for bf16 it covers the rounding of the
result and of the probabilities before it."""


@dataclass(frozen=True)
class Ask:
    """The parameters of a case. `rows`: (tokens before, tokens now) of each request, followed by
    `padding` rows of request slot 0 with one token each."""

    rows: Sequence[tuple[int, int]]
    heads: Heads = Heads()
    page_size: int = 4
    dtype: torch.dtype = FLOAT
    cells: torch.dtype = FLOAT
    padding: int = 0
    seed: int = 0


@dataclass
class Case:
    """All inputs of a kernel, and each request's keys and values [length, kv_heads, dim] as stored
    in its KV slots."""

    ask: Ask
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    slots: Tensor
    seq_lens: Tensor
    starts: Tensor
    sinks: Tensor | None = None
    visible: Tensor | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    checks: list[Callable[[], None]] = field(default_factory=list)

    def arguments(self, kernel: str, out: Tensor) -> dict[str, float]:
        """Return the arguments of `paged_decode` or `paged_prefill`."""
        heads = self.ask.heads
        more = {"visible": 0 if self.visible is None else self.visible.data_ptr()}
        more = {"starts": self.starts.data_ptr()} if kernel == "paged_prefill" else more
        return {
            "q": self.q.data_ptr(),
            "q_stride": self.q.stride(0),
            "q_type": CELL_TYPES[self.q.dtype],
            "keys": self.k_cache.data_ptr(),
            "values": self.v_cache.data_ptr(),
            "kv_type": CELL_TYPES[self.k_cache.dtype],
            "page_table": self.page_table.data_ptr(),
            "table_stride": self.page_table.stride(0),
            "slots": self.slots.data_ptr(),
            "seq_lens": self.seq_lens.data_ptr(),
            "out": out.data_ptr(),
            "rows": len(self.slots),
            "tokens": len(self.q),
            "heads": heads.heads,
            "kv_heads": heads.kv_heads,
            "dim": heads.dim,
            "page_size": self.ask.page_size,
            "window": heads.window or 0,
            "scaling": heads.scaling or heads.dim**-0.5,
            "softcap": heads.softcap or 0.0,
            "sinks": 0 if self.sinks is None else self.sinks.data_ptr(),
            "sinks_type": 0 if self.sinks is None else CELL_TYPES[self.sinks.dtype],
            **more,
        }

    def run(self, engine: Engine, kernel: str, **changes: float) -> Tensor:
        """Run the kernel, check the guards, and return its result [T, heads * dim]. `changes`
        replace the right arguments."""
        out, check = guarded(self.q.shape, self.q.dtype)
        engine.kernel(kernel).bind()(**self.arguments(kernel, out) | changes)
        for one in (check, *self.checks):
            one()
        return out

    def expected(self) -> Tensor:
        """Return the oracle's result, float64 [T, heads * dim]; zero for padding."""
        heads, outs, first = self.ask.heads, [], 0
        for row, ((_, new), keys, values) in enumerate(zip(self.ask.rows, self.keys, self.values, strict=True)):
            query = self.q[first : first + new].double().view(new, heads.heads, heads.dim)
            hidden = self.hidden(row)
            outs.append(dense(query, keys.double(), values.double(), heads, self.sinks, hidden).flatten(1))
            first += new
        outs.append(torch.zeros(len(self.q) - first, heads.heads * heads.dim, dtype=torch.float64))
        return torch.cat(outs)

    def hidden(self, row: int) -> list[int]:
        """Return the earlier tokens that the last token of a row does not see."""
        last = len(self.keys[row]) - 1
        word = -1 if self.visible is None else int(self.visible[row])
        return [last - back for back in range(1, min(32, last + 1)) if not word >> (31 - back) & 1]

    def make_tree(self, seed: int) -> None:
        """Make a draft tree: every row sees about half of the 31 tokens before its own; the KV
        slots of the hidden ones hold NaN."""
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(-(1 << 31), 0, (len(self.slots),), generator=generator, dtype=torch.int32)
        self.visible, check = guarded_copy(words, 0, 0)
        self.checks.append(check)
        size = self.ask.page_size
        for row in range(len(self.ask.rows)):
            pages = self.page_table[self.slots[row].item()].tolist()  # pyright: ignore[reportArgumentType]
            cells = [pages[token // size] * size + token % size for token in self.hidden(row)]
            for cache in (self.k_cache, self.v_cache):
                cache[cells] = foreign_cells(self.ask, len(cells))

    def check(self, found: Tensor) -> None:
        """Compare a result with the oracle's."""
        bound = BOUNDS[found.dtype]
        torch.testing.assert_close(found.double(), self.expected(), atol=bound, rtol=bound)


def dense(
    query: Tensor, keys: Tensor, values: Tensor, heads: Heads, sinks: Tensor | None, hidden: Sequence[int] = ()
) -> Tensor:
    """Attend with query [n, heads, dim] to keys and values [length, kv_heads, dim], except the
    `hidden` tokens; returns query's shape."""
    group = heads.heads // heads.kv_heads
    keys, values = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (keys, values))
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) * (heads.scaling or heads.dim**-0.5)
    if heads.softcap is not None:
        scores = torch.tanh(scores / heads.softcap) * heads.softcap
    seen = visible(keys.shape[1], len(query), heads.window)
    seen[:, list(hidden)] = False
    scores = scores.masked_fill(~seen, -torch.inf)
    ground = torch.full((heads.heads,), -torch.inf) if sinks is None else sinks
    scores = torch.cat([scores, ground.double()[:, None, None].expand(-1, len(query), 1)], -1)
    return (torch.softmax(scores, -1)[..., :-1] @ values).transpose(0, 1)


def make_case(ask: Ask) -> Case:
    """Make a case with random request slots and pages. Every buffer is guarded; rows of q may have
    gaps between them."""
    rng = random.Random(ask.seed)
    torch.manual_seed(ask.seed)
    needed = [math.ceil((prefix + new) / ask.page_size) for prefix, new in ask.rows]
    pages = rng.sample(range(1, sum(needed) + 4), sum(needed))
    slots = rng.sample(range(1, len(ask.rows) + 3), len(ask.rows))
    tokens = sum(new for _, new in ask.rows) + ask.padding
    width, checks = ask.heads.heads * ask.heads.dim, []

    def place(tensor: Tensor, gap: int = 0, offset: int = 0) -> Tensor:
        made, check = guarded_copy(tensor, offset, gap)
        checks.append(check)
        return made

    table = torch.zeros(len(ask.rows) + 3, max(needed, default=1), dtype=torch.int32)
    caches = [foreign_cells(ask, (sum(needed) + 4) * ask.page_size) for _ in range(2)]
    none = torch.empty(0)
    case = Case(ask, none, none, none, none, none, none, none, checks=checks)
    for (prefix, new), slot, count in zip(ask.rows, slots, needed, strict=True):
        own, pages = torch.tensor(pages[:count]), pages[count:]
        table[slot, :count] = own
        where = torch.arange(prefix + new)
        cells = own[where // ask.page_size] * ask.page_size + where % ask.page_size
        for cache, kept in zip(caches, (case.keys, case.values), strict=True):
            kept.append(fill(cache, cells, ask))
    new = torch.tensor([0, *(new for _, new in ask.rows), *[1] * ask.padding]).cumsum(0)
    lengths = [prefix + new for prefix, new in ask.rows] + [1] * ask.padding
    q = torch.randn(tokens, width).to(ask.dtype)
    q[tokens - ask.padding :] = torch.nan
    if ask.heads.has_sinks:
        case.sinks = place(3 * torch.randn(ask.heads.heads).to(rng.choice((FLOAT, HALF))))
    case.q = place(q, gap=rng.choice((0, 3, 16)), offset=rng.choice((0, 1, 8)))
    case.k_cache, case.v_cache = (place(cache) for cache in caches)
    case.page_table, case.starts = place(table), place(new.int())
    case.slots, case.seq_lens = (
        place(torch.tensor(values, dtype=torch.int32)) for values in (slots + [0] * ask.padding, lengths)
    )
    return case


def foreign_cells(ask: Ask, count: int) -> Tensor:
    """Return KV slots of NaN; 8-bit ones have random codes and a scale of NaN."""
    shape = (count, ask.heads.kv_heads, ask.heads.dim)
    if ask.cells is not BYTE:
        return torch.full(shape, torch.nan, dtype=ask.cells)
    return with_scales(torch.randint(-127, 128, shape, dtype=torch.int8), torch.full((*shape[:2], 1), torch.nan))


def fill(cache: Tensor, cells: Tensor, ask: Ask) -> Tensor:
    """Fill these KV slots with random elements; return them as attention reads them, float32."""
    shape = (len(cells), ask.heads.kv_heads, ask.heads.dim)
    if ask.cells is BYTE:
        cache[cells] = with_scales(torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(*shape[:2], 1) / 64)
        return read_int8(cache[cells])
    cache[cells] = torch.randn(shape).to(ask.cells)
    return cache[cells].float()


def with_scales(codes: Tensor, scales: Tensor) -> Tensor:
    """Return KV slots of bytes: codes followed by scales."""
    return torch.cat([codes.view(BYTE), scales.view(BYTE)], dim=-1)
