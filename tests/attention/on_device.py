"""Runs cases of `rows.py` on a device in half precision, eagerly and captured with padding rows,
and compares with the dense oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend, AttentionPlan, Bucket
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.pools import MHATokenToKVPool, ReqToTokenPool
from sglcore.worker.schedule_batch import ForwardMode
from tests.attention.rows import CONTEXT, SLOTS, Case, Heads, make_case

PAGE_SIZE = 16
BOUNDS = {torch.float16: 4e-3, torch.bfloat16: 3e-2}

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures a step and returns its replay."""


@dataclass
class Placed:
    """A case with its KV slots, tables and batch on a device, and the backend over them."""

    case: Case
    backend: AttentionBackend
    batch: ForwardBatch
    device: str
    dtype: torch.dtype

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of this step's tokens."""
        q, k, v = (part.to(self.dtype).to(self.device) for part in self.case.inputs)
        return q, k, v

    def run(self, *given: Tensor) -> Tensor:
        """Plan and attend eagerly; returns float32 on the host."""
        self.batch.mark_forward_metadata_ready(self.backend.plan(self.batch))
        q, k, v = given or self.inputs
        out = self.backend.forward(q, k, v, self.case.layer, self.batch)
        return out.cpu().float()

    def check(self, found: Tensor) -> None:
        """Compare with the dense oracle, within the bound of the dtype."""
        bound = BOUNDS[self.dtype]
        torch.testing.assert_close(found, self.case.dense(), atol=bound, rtol=bound)


def place(
    rows: Sequence[tuple[int, int]],
    backend: type[AttentionBackend],
    heads: Heads,
    device: str,
    dtype: torch.dtype = torch.float16,
    page_size: int = PAGE_SIZE,
    decode: bool = False,
    seed: int = 0,
    windows: tuple[int | None, ...] | None = None,
    context: int = CONTEXT,
) -> Placed:
    """Make a random case on a device; keys, values and queries are rounded to `dtype`."""
    case = make_case(rows, heads, page_size, seed, decode, windows=windows, context=context)
    for parts in (case.keys, case.values, case.queries):
        parts[:] = [part.to(dtype).float() for part in parts]
    host = case.backend
    table = ReqToTokenPool(SLOTS, context, page_size, device)
    table.page_table.copy_(host.req_to_token_pool.page_table)
    k_host, v_host = host.token_to_kv_pool.kv(0)
    pages = k_host.shape[0] // page_size - 1
    cells = MHATokenToKVPool(pages, page_size, ((heads.kv_heads, heads.dim),), dtype, device)
    for mine, theirs in zip(cells.kv(0), (k_host, v_host), strict=True):
        mine.copy_(theirs.to(dtype))
    made = backend(host.shape, table, cells, KernelTable())
    return Placed(case, made, batch_on(case.batch, device), device, dtype)


def over_the_same_pools(
    first: Placed, rows: Sequence[tuple[int, int]], heads: Heads, seed: int, context: int = CONTEXT
) -> Placed:
    """Make another decode case and copy its KV slots and page table over those of the first, which
    a graph reads."""
    mine = first.backend
    pages = mine.token_to_kv_pool.page_size
    other = place(rows, type(mine), heads, first.device, page_size=pages, decode=True, seed=seed, context=context)
    theirs = other.backend
    mine.req_to_token_pool.page_table.copy_(theirs.req_to_token_pool.page_table)
    for cells, given in zip(mine.token_to_kv_pool.kv(0), theirs.token_to_kv_pool.kv(0), strict=True):
        cells.copy_(given)
    return other


def batch_on(batch: ForwardBatch, device: str) -> ForwardBatch:
    """Copy the batch with its tensors on a device, and with the prefill lengths on host and
    device."""
    tensors = ("req_pool_indices", "seq_lens", "out_cache_loc")
    moved = {name: getattr(batch, name).to(device) for name in tensors}
    lengths = batch.extend_seq_lens_cpu
    if lengths is not None:
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32)
        moved["extend_seq_lens"] = torch.from_numpy(lengths.copy()).to(device)
        moved["extend_start_loc"] = torch.from_numpy(starts).to(device)
    return ForwardBatch(
        forward_mode=batch.forward_mode,
        batch_size=batch.batch_size,
        num_tokens=batch.num_tokens,
        seq_lens_cpu=batch.seq_lens_cpu,
        extend_seq_lens_cpu=lengths,
        **moved,
    )


class Captured:
    """One decode bucket of a backend, captured over static buffers; `run` pads a batch into it and
    replays."""

    def __init__(self, placed: Placed, size: int, capture: Capture) -> None:
        heads, device = placed.case.layer, placed.device
        self._placed, self._size = placed, size
        self.plan: AttentionPlan = placed.backend.capture_plan(Bucket(size, size))
        widths = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        self._q, self._k, self._v = (
            torch.zeros(size, width * heads.head_dim, dtype=placed.dtype, device=device) for width in widths
        )
        self.batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            num_tokens=size,
            req_pool_indices=torch.zeros(size, dtype=torch.int32, device=device),
            seq_lens=torch.ones(size, dtype=torch.int32, device=device),
            seq_lens_cpu=np.ones(size, np.int32),
            out_cache_loc=torch.zeros(size, dtype=torch.int64, device=device),
        )
        self.batch.mark_forward_metadata_ready(self.plan)
        self._out: list[Any] = []
        self._step()
        self._out.clear()
        self._replay = capture(self._step)

    def _step(self) -> None:
        out = self._placed.backend.forward(self._q, self._k, self._v, self._placed.case.layer, self.batch)
        self._out.append(out)

    def run(self, placed: Placed) -> Tensor:
        """Replay for a case over the same pools, with at most as many rows as the bucket has;
        returns float32 on the host."""
        given, count = placed.batch, placed.batch.batch_size
        assert given.seq_lens_cpu is not None
        for name, idle in (("req_pool_indices", 0), ("seq_lens", 1), ("out_cache_loc", 0)):
            buffer = getattr(self.batch, name)
            buffer.fill_(idle)
            buffer[:count].copy_(getattr(given, name))
        for buffer, value in zip((self._q, self._k, self._v), placed.inputs, strict=True):
            buffer[:count].copy_(value)
        self.batch.seq_lens_cpu = given.seq_lens_cpu
        assert self._placed.backend.refresh(self.plan, self.batch) is None
        self._replay()
        return self._out[-1][:count].cpu().float()
