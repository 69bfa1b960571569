"""Batches for attention: requests over random pages, in a pool with NaN in every KV slot that no
request owns.

The pool may have any layout: the cases use only its own `read_cells` and `write_cells`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglcore.conformance.harness import Harness
from sglcore.runtime.attention.backend_attention import BackendAttention
from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory.pools import TokenToKVPool
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch, offsets_of

Rows = tuple[tuple[int, int], ...]
"""(tokens before this step, tokens of this step) of each request."""

MODES: Mapping[str, tuple[ForwardMode, tuple[Rows, ...]]] = MappingProxyType(
    {
        "decode": (
            ForwardMode.DECODE,
            (((0, 1),), ((15, 1), (16, 1), (3, 1)), ((127, 1), (1, 1), (64, 1), (31, 1), (8, 1), (99, 1))),
        ),
        "extend": (
            ForwardMode.EXTEND,
            (((0, 7),), ((5, 3), (0, 18), (16, 16)), ((40, 1), (0, 1), (13, 20)), ((0, 65), (64, 33), (1, 2))),
        ),
        "mixed": (ForwardMode.MIXED, (((9, 1), (30, 1), (0, 12), (7, 5)), ((100, 1), (17, 40)))),
    }
)


EXTRAS = ("softcap", "sinks")
"""Features that a layer may request of a backend that declares them; no model of the kit uses
them."""
TREE = "tree_mask"
"""The feature of a backend that lets decode rows skip single KV slots. Batches request it, not
layers."""
LIFT = 90.0
"""Offset of all scaled scores in these cases. Scores of this size lose their fractions in float16
and bfloat16, so a backend must compute them in float32."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of a case, on the host in float32, made by `draw_contents`. For each request: its
    (earlier, new) tokens (`rows`), slot, pages, and keys and values [length, kv_heads, dim] of all
    its tokens; `queries` [T, heads * dim] of this step's tokens."""

    rows: Rows
    slots: list[int]
    pages: list[list[int]]
    keys: list[Tensor]
    values: list[Tensor]
    queries: Tensor

    def new(self, parts: list[Tensor]) -> Tensor:
        """Return the keys or values of this step's tokens, [T, kv_heads * dim], from `parts`: this
        object's `keys` or `values`."""
        return torch.cat([part[before:] for part, (before, _) in zip(parts, self.rows, strict=True)]).flatten(1)


@dataclass(frozen=True, slots=True)
class Seen:
    """What `attend` returns, one attention step's result on the host: its output, the pool's keys
    and values after it, and `again`, the outputs of the same step run in other ways, by what the
    way is called; one that could not run is left out."""

    out: Tensor
    keys: Tensor
    values: Tensor
    again: Mapping[str, Tensor]


def draw_contents(seed: int, rows: Rows, *harnesses: Harness, lift: float = 0.0) -> Contents:
    """Return random contents for these rows that fit the smallest of several harnesses with one
    model and page size; equal seeds and rows give equal ones. Values are exact in bfloat16. `lift`
    is added to every scaled score; the scores differ as much as without it."""
    harness = min(harnesses, key=lambda item: item.limits.num_pages)
    layer: BackendAttention = harness.started.built["runner"].model.attention_layers[0]
    rng = np.random.default_rng(seed)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    size = harness.limits.page_size
    free = rng.permutation(harness.limits.num_pages).tolist()
    lengths = [before + new for before, new in rows]
    shape = (layer.num_kv_heads, layer.head_dim)

    def values(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device="cpu").bfloat16().float()

    contents = Contents(
        rows,
        (1 + rng.permutation(harness.limits.max_requests)[: len(rows)]).tolist(),
        [[1 + free.pop() for _ in range(-(-length // size))] for length in lengths],
        [values(length, *shape) for length in lengths],
        [values(length, *shape) for length in lengths],
        values(sum(new for _, new in rows), layer.num_heads * layer.head_dim),
    )
    if lift:
        for keys in contents.keys:
            keys[..., 0] = 8.0
        contents.queries[:, :: layer.head_dim] = torch.tensor(lift / (8.0 * layer.scaling)).bfloat16().float()
    return contents


def without_hidden(contents: Contents) -> Contents:
    """Write NaN into those keys and values of the contents that tree rows do not see
    (`words_of_trees`), in place; return the contents."""
    for word, (before, _), keys, values in zip(
        words_of_trees(len(contents.rows)).tolist(), contents.rows, contents.keys, contents.values, strict=True
    ):
        for back in range(1, min(32, before + 1)):
            if not word >> (31 - back) & 1:
                keys[before - back] = values[before - back] = torch.nan
    return contents


class Probe:
    """Stands in for a runner's model: a callable from a batch to the output of one attention layer
    on the contents' queries, keys and values, under the runner's own plan and context. `view` is
    the batch of the last call, None before the first."""

    def __init__(self, layer: BackendAttention, contents: Contents, device: str, dtype: torch.dtype) -> None:
        parts = (contents.queries, contents.new(contents.keys), contents.new(contents.values))
        self._inputs = tuple(part.to(dtype).to(device) for part in parts)
        self._layer = layer
        self.attention_layers = (layer,)
        self.view: ForwardBatch | None = None

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Keep the batch as `view` and run the layer on the given rows; returns its output [T,
        heads * dim]."""
        self.view = batch
        return self._layer(*self._inputs)


def asking_for(layer: BackendAttention, extra: str, device: str) -> BackendAttention:
    """Return a copy of the layer that also requests `extra`, "softcap" or "sinks"; an unchanged
    copy for any other text."""
    changed = copy(layer)
    if extra == "softcap":
        changed.softcap = LIFT / 0.6
    if extra == "sinks":
        changed.sinks = (LIFT - 2.0 + torch.arange(layer.num_heads, device="cpu") % 6).to(device)
    return changed


def rebuilt(backend: AttentionBackend, layer: BackendAttention) -> AttentionBackend:
    """Return a new backend of the same class and with the same pools, for a model with this layer's
    softcap and features. Raises what the class raises if it does not serve them."""
    shape = replace(backend.shape, softcaps=(layer.softcap,), features=backend.shape.features | layer.features)
    parts = backend.req_to_token_pool, backend.token_to_kv_pool, backend.kernels, backend.hisparse
    return type(backend)(shape, *parts)


def attend(
    harness: Harness,
    mode: ForwardMode,
    contents: Contents,
    again: Mapping[str, Callable[[Any, Probe], Tensor | None]] = MappingProxyType({}),
    extra: str = "",
) -> Seen:
    """Run one step of attention on a harness, in a pool with NaN in every KV slot that the contents
    do not fill; wait, and return what came out.

    `again`: functions of (backend, probe) that run the same step in another way, or return None
    where that is impossible, by what the way is called. `extra` is one of `EXTRAS` or `TREE`,
    requested in addition to what the model does, or empty.
    """
    runner = copy(harness.started.built["runner"])
    pool = harness.pool
    device, dtype = harness.facts.tensor_device, getattr(torch, harness.geometry.dtype)
    layer = asking_for(runner.model.attention_layers[0], extra, device)
    probe = Probe(layer, contents, device, dtype)
    runner.model = probe
    if extra in EXTRAS:
        runner.attn_backend = rebuilt(runner.attn_backend, layer)
    with torch.inference_mode():
        cells = every_cell(harness)
        earlier = [before for before, _ in contents.rows]
        held = [
            expected_cells(contents, parts, earlier, pool).to(dtype).to(device)
            for parts in (contents.keys, contents.values)
        ]
        pool.write_cells(0, cells, *held)
        harness.settle()
        staged = runner.init_batch(schedule_batch(contents, mode, harness.limits.page_size))
        if extra == TREE:
            staged.visible = words_of_trees(len(contents.rows)).to(device)
        out = runner.run_eager(staged).to("cpu", copy=True)
        keys, values = (part.to("cpu", copy=True) for part in pool.read_cells(0, cells))
        outputs = {name: way(runner.attn_backend, probe) for name, way in again.items()}
        found = {name: each.to("cpu", copy=True) for name, each in outputs.items() if each is not None}
        return Seen(out, keys, values, found)


def words_of_trees(rows: int) -> Tensor:
    """Return random words int32 [rows], the same for equal `rows`: bit 31 - k says whether a row
    sees the KV slot k before its own. Bit 31, its own, is always set; the others are set with
    probability 1/2."""
    generator = torch.Generator(device="cpu").manual_seed(rows)
    return torch.randint(-(1 << 31), 0, (rows,), generator=generator, dtype=torch.int32, device="cpu")


def every_cell(harness: Harness) -> Tensor:
    """Return the indices of all KV slots of a device, in the device's index dtype, on the device
    that its pool reads from."""
    dtype = getattr(torch, harness.facts.index_dtype)
    return torch.arange(harness.pool.num_cells, dtype=dtype, device=harness.cell_device)


def cells_of(contents: Contents, page_size: int) -> list[Tensor]:
    """Return int64 [length] for each request: the KV slot of each of its tokens."""
    found: list[Tensor] = []
    for pages, keys in zip(contents.pages, contents.keys, strict=True):
        where = torch.arange(len(keys), device="cpu")
        found.append(torch.tensor(pages, device="cpu")[where // page_size] * page_size + where % page_size)
    return found


def expected_cells(contents: Contents, parts: list[Tensor], lengths: list[int], pool: TokenToKVPool) -> Tensor:
    """Return the keys or values (`parts`) that a whole pool should hold, float32 [KV slots,
    kv_heads, dim]: the first `lengths[i]` tokens of request i in their KV slots, NaN everywhere
    else."""
    host = torch.full((pool.num_cells, *parts[0].shape[1:]), float("nan"), device="cpu")
    for where, part, length in zip(cells_of(contents, pool.page_size), parts, lengths, strict=True):
        host[where[:length]] = part[:length]
    return host


def schedule_batch(contents: Contents, mode: ForwardMode, page_size: int) -> ScheduleBatch:
    """Return the step as a scheduler would send it, with every page new to the device; all token
    ids are 3, because attention does not read them."""
    before = np.array([before for before, _ in contents.rows], np.int32)
    new = np.array([count for _, count in contents.rows], np.int32)
    zeros = np.zeros(len(new), np.int32)
    return ScheduleBatch(
        step=1,
        forward_mode=mode,
        slots=np.array(contents.slots, np.int32),
        seq_lens=before + new,
        prefix_lens=before,
        token_offsets=offsets_of(new),
        input_ids=np.full(int(new.sum()), 3, np.int32),
        page_counts=zeros,
        new_page_offsets=offsets_of([len(pages) for pages in contents.pages]),
        new_pages=np.array([page for pages in contents.pages for page in pages], np.int32),
        emits=np.ones(len(new), np.bool_),
    )
