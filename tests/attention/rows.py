"""Random requests over random pages, and the expected attention output, computed one request at a
time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from sglcore.runtime.attention.contract import AttentionShape
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.pools import MHATokenToKVPool, ReqToTokenPool
from sglcore.worker.schedule_batch import ForwardMode

CONTEXT, SLOTS = 48, 6


@dataclass(frozen=True)
class Heads:
    """Sizes of one attention layer."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    window: int | None = None
    scaling: float | None = None
    softcap: float | None = None
    has_sinks: bool = False


@dataclass
class Case:
    """A batch with the keys and values of each row. The pool holds the rows' own KV slots and NaN
    everywhere else."""

    backend: ReferenceAttention
    layer: Attention
    batch: ForwardBatch
    cells: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    queries: list[Tensor]

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of this step's tokens, flattened to [tokens, heads * dim]."""
        new = [len(query) for query in self.queries]
        parts = (
            self.queries,
            [keys[-count:] for keys, count in zip(self.keys, new, strict=True)],
            [values[-count:] for values, count in zip(self.values, new, strict=True)],
        )
        q, k, v = (torch.cat(part).flatten(1) for part in parts)
        return q, k, v

    def run(self, *given: Tensor) -> Tensor:
        """Plan, store and attend, with the step's own q, k and v unless others are given."""
        self.batch.mark_forward_metadata_ready(self.backend.plan(self.batch))
        q, k, v = given or self.inputs
        return self.backend.forward(q, k, v, self.layer, self.batch)

    def dense(self) -> Tensor:
        """The oracle: each request alone through torch's attention, with K/V heads repeated for
        each query head. Softcap and sinks use a transformers model's eager attention, because
        torch's has neither."""
        outs = []
        words = [-1] * len(self.keys) if self.batch.visible is None else self.batch.visible.tolist()
        for query, keys, values, word in zip(self.queries, self.keys, self.values, words, strict=True):
            group = query.shape[1] // keys.shape[1]
            k, v = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (keys, values))
            mask = visible(len(keys), len(query), self.layer.sliding_window)
            for back in range(min(32, len(keys))):
                mask[-1, -1 - back] &= bool(word >> (31 - back) & 1)
            q = query.transpose(0, 1)
            if self.layer.softcap is not None or self.layer.sinks is not None:
                outs.append(eager_of_transformers(q, k, v, mask, self.layer))
            else:
                outs.append(sdpa(q, k, v, attn_mask=mask, scale=self.layer.scaling).transpose(0, 1))
        return torch.cat(outs).flatten(1)


def eager_of_transformers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, layer: Attention) -> Tensor:
    """q [heads, n, dim], k and v [heads, s, dim], mask bool [n, s]: returns [n, heads, dim] from
    the eager attention of Gemma 2 (softcap) or of gpt-oss (sinks). No model has both."""
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.gpt_oss import modeling_gpt_oss

    assert layer.softcap is None or layer.sinks is None
    module: Any = SimpleNamespace(num_key_value_groups=1, training=False, sinks=layer.sinks)
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    if layer.sinks is None:
        forward = partial(modeling_gemma2.eager_attention_forward, softcap=layer.softcap)
    else:
        forward = modeling_gpt_oss.eager_attention_forward
    return forward(module, q[None], k[None], v[None], bias, scaling=layer.scaling)[0][0]


def visible(length: int, new: int, window: int | None) -> Tensor:
    """bool[new, length]: which tokens each of the last `new` tokens sees, written out token by
    token."""
    mask = torch.zeros(new, length, dtype=torch.bool)
    for row in range(new):
        last = length - new + row
        first = 0 if window is None else max(0, last - window + 1)
        mask[row, first : last + 1] = True
    return mask


def make_case(
    rows: Sequence[tuple[int, int]],
    heads: Heads = Heads(),
    page_size: int = 4,
    seed: int = 0,
    decode: bool = False,
    kind: type[ReferenceAttention] = ReferenceAttention,
    windows: tuple[int | None, ...] | None = None,
    context: int = CONTEXT,
) -> Case:
    """Make a case from (tokens before, tokens now) of each request, at most `context` together;
    request slots and pages are random."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_pages = SLOTS * math.ceil(context / page_size)
    layers = ((heads.kv_heads, heads.dim),)
    table = ReqToTokenPool(SLOTS, context, page_size, "cpu")
    pool = MHATokenToKVPool(num_pages, page_size, layers, torch.float32, "cpu")
    extras = {"softcap": heads.softcap, "sinks": torch.randn(heads.heads) if heads.has_sinks else None}
    layer = Attention(0, heads.heads, heads.kv_heads, heads.dim, heads.scaling, heads.window, **extras)
    shape = AttentionShape(heads.heads, layers, windows or (heads.window,))
    k_cache, v_cache = pool.kv(0)
    k_cache[:], v_cache[:] = torch.nan, torch.nan
    slots = rng.sample(range(1, SLOTS + 1), len(rows))
    free = rng.sample(range(1, num_pages + 1), num_pages)
    cells, keys, values, queries = [], [], [], []
    for slot, (prefix, new) in zip(slots, rows, strict=True):
        length = prefix + new
        pages = torch.tensor([free.pop() for _ in range(math.ceil(length / page_size))])
        table.page_table[slot, : len(pages)] = pages
        where = torch.arange(length)
        cells.append(pages[where // page_size] * page_size + where % page_size)
        keys.append(torch.randn(length, heads.kv_heads, heads.dim))
        values.append(torch.randn(length, heads.kv_heads, heads.dim))
        queries.append(torch.randn(new, heads.heads, heads.dim))
        k_cache[cells[-1][:prefix]], v_cache[cells[-1][:prefix]] = keys[-1][:prefix], values[-1][:prefix]
    batch = make_batch(rows, slots, cells, decode)
    return Case(kind(shape, table, pool, KernelTable()), layer, batch, cells, keys, values, queries)


def make_batch(
    rows: Sequence[tuple[int, int]], slots: Sequence[int], cells: Sequence[Tensor], decode: bool
) -> ForwardBatch:
    """Make the batch fields that attention reads."""
    lengths = np.array([new for _, new in rows], dtype=np.int32)
    seq_lens = np.array([prefix + new for prefix, new in rows], dtype=np.int32)
    none = torch.zeros(0, dtype=torch.int64)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE if decode else ForwardMode.MIXED,
        batch_size=len(rows),
        num_tokens=int(lengths.sum()),
        req_pool_indices=torch.tensor(slots, dtype=torch.int32),
        seq_lens=torch.from_numpy(seq_lens.copy()),
        seq_lens_cpu=seq_lens,
        extend_seq_lens_cpu=None if decode else lengths,
        out_cache_loc=torch.cat([none, *(own[prefix:] for own, (prefix, _) in zip(cells, rows, strict=True))]),
    )
