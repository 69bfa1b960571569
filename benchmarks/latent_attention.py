"""Decode attention over latent (MLA) KV entries on one accelerator, compared with its memory
bandwidth: DeepSeek-V4's window and selected blocks, V3.2's selected entries, V3's whole context,
and the indexer that selects.

Minimum bytes of a case: the KV entries that a token reads, once for all heads, plus q and the
result; or the keys that the indexer scores, plus its scores. The bound is their time at the
bandwidth of a copy of 1 GiB, measured first. Goal: at batch 64 and 32,768 tokens of context,
attention reaches at least 60 % of it. Caches are cleared between rounds. A case counts only if the
first token's result agrees with the reference.

    python benchmarks/latent_attention.py DEVICE [--json FILE] [--batch N] [--context N]
        [--rounds N]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from results import machine, write_results
from torch import Tensor
from triton.testing import do_bench

from sglcore.conformance.laws.laws_kernels import relative_error
from sglcore.device.discovery import discover
from sglcore.device.package import resolve
from sglcore.runtime.kernels import reference_sparse
from sglcore.runtime.kernels.row_codec import RowCodec
from sglcore.runtime.kernels.table import KernelTable

GOAL = 0.6
PAGE = 64
WINDOW = 128
CLOSE = 2e-2
BY_TOKEN = frozenset({"q", "weights", "logits", "chosen", "more_chosen", "token_slots", "lens"})
"""Arguments with one row per token."""


@dataclass(frozen=True)
class Case:
    """A call of a kernel entry. Its first argument and its result have one row per token; `floor`:
    the minimum bytes that it moves."""

    name: str
    entry: str
    args: tuple[Any, ...]
    floor: int

    def run(self, table: Any) -> Tensor:
        """Call the entry of a kernel table or of the reference module."""
        return getattr(table, self.entry)(*self.args)

    def error(self, table: KernelTable) -> float:
        """Return the relative error of the first token's result."""
        names = KernelTable.declared()[self.entry].parameters
        first = [
            arg[:1] if name in BY_TOKEN and arg is not None else arg for name, arg in zip(names, self.args, strict=True)
        ]
        wanted = getattr(reference_sparse, self.entry)(*first)
        return relative_error(self.run(table)[:1].float().cpu(), wanted.float().cpu())


def size_of(*tensors: Tensor) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


class Rows:
    """Pools and index lists with random values for `batch` requests of `context` tokens each."""

    def __init__(self, batch: int, context: int, device: str) -> None:
        self.batch, self.context, self.device = batch, context, device
        torch.manual_seed(5)
        self.slots = torch.arange(batch, dtype=torch.int32, device=device)

    def values(self, *shape: int) -> Tensor:
        """Return normal values in bfloat16."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def pool(self, ratio: int, size: int, codec: RowCodec | None) -> Tensor:
        """Return a pool with one entry per `ratio` tokens of every request."""
        rows = self.values(self.batch * self.context // ratio, size)
        return rows if codec is None else torch.cat([codec.encode(part) for part in rows.split(1 << 16)])

    def chosen(self, rows: int, count: int) -> Tensor:
        """Return sorted selected entries, int32 [batch, count]; each request has its own."""
        own = rows // self.batch
        picks = [torch.randperm(own, device=self.device)[:count].sort()[0] + own * row for row in range(self.batch)]
        return torch.stack(picks).int()

    def pages(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return a page table in random order, and full lengths."""
        table = torch.randperm(rows // PAGE, device=self.device).int().view(self.batch, -1)
        return table, torch.full((self.batch,), rows // self.batch, dtype=torch.int32, device=self.device)

    def blocks(self, heads: int, top_k: int, codec: RowCodec | None) -> Case:
        """Return V4's case: a sliding window, and selected blocks of four tokens."""
        q, window, rows = self.values(self.batch, heads, 512), self.pool(32, 512, codec), self.pool(4, 512, codec)
        lists = self.chosen(window.shape[0], WINDOW), self.chosen(rows.shape[0], top_k)
        floor = self.batch * (WINDOW + top_k) * size_of(rows[0]) + 2 * size_of(q)
        sinks = torch.randn(heads, device=self.device)
        args = q, window, lists[0], rows, lists[1], sinks, 512**-0.5, 512, codec
        form = " in 8 bits" if codec else ""
        return Case(f"window and {top_k} blocks{form}, {heads} heads", "sparse_mqa", args, floor)

    def latent(self, heads: int, top_k: int) -> Case:
        """Return V3.2's case with `top_k` selected entries, or V3's with all (`top_k` 0)."""
        q, rows = self.values(self.batch, heads, 576), self.pool(1, 576, None)
        floor = self.batch * (top_k or self.context) * size_of(rows[0]) + size_of(q) + size_of(q[..., :512])
        if top_k:
            args: tuple[Any, ...] = q, rows, self.chosen(rows.shape[0], top_k), None, None, None, 192**-0.5, 512, None
            return Case(f"{top_k} latent rows, {heads} heads", "sparse_mqa", args, floor)
        table, lens = self.pages(rows.shape[0])
        args = q, rows, table, self.slots, lens, PAGE, 192**-0.5, 512, None
        return Case(f"all latent rows, {heads} heads", "paged_mqa", args, floor)

    def scores(self, ratio: int, codec: RowCodec | None) -> Case:
        """Return the case of 64 indexer heads that score all keys."""
        q, keys = self.values(self.batch, 64, 128), self.pool(ratio, 128, codec)
        table, lens = self.pages(keys.shape[0])
        width = self.context // ratio
        args = q, self.values(self.batch, 64), keys, table, self.slots, lens, PAGE, 1.0, width, codec
        form = " in 8 bits" if codec else ""
        return Case(f"scores of {width} keys{form}", "index_logits", args, size_of(q, keys) + 4 * self.batch * width)

    def choice(self, ratio: int, top_k: int) -> Case:
        """Return the case that selects the highest scores."""
        width = self.context // ratio
        logits = torch.randn(self.batch, width, device=self.device)
        table, lens = self.pages(self.batch * width)
        args = logits, lens, table, self.slots, PAGE, top_k
        return Case(f"{top_k} of {width} scores", "index_top_k", args, size_of(logits) + 4 * self.batch * top_k)

    def cases(self) -> Iterator[Callable[[], Case]]:
        """Yield functions that make one case each, because the pools are large."""
        for heads, top_k, codec in ((64, 512, None), (64, 512, RowCodec(512, exact=64)), (128, 1024, None)):
            yield lambda heads=heads, top_k=top_k, codec=codec: self.blocks(heads, top_k, codec)
        for heads, top_k in ((16, 2048), (128, 2048), (16, 0)):
            yield lambda heads=heads, top_k=top_k: self.latent(heads, top_k)
        for ratio, codec in ((4, None), (4, RowCodec(128)), (1, None)):
            yield lambda ratio=ratio, codec=codec: self.scores(ratio, codec)
        for ratio, top_k in ((4, 512), (1, 2048)):
            yield lambda ratio=ratio, top_k=top_k: self.choice(ratio, top_k)


def seconds(run: Callable[[], object], rounds: int) -> float:
    """Return the median device seconds of a call."""
    found = do_bench(run, warmup=100, rep=max(100, rounds * 5), return_mode="median")
    assert isinstance(found, float)
    return found / 1e3


def bandwidth(device: str, rounds: int) -> float:
    """Return bytes per second, read plus written, of a copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size_of(source) / seconds(lambda: target.copy_(source), rounds)


def main() -> None:
    """Measure, print a line for each case, write the results."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("device", help="a device package, as --device calls it")
    arguments.add_argument("--json", default=None)
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--context", type=int, default=32768)
    arguments.add_argument("--rounds", type=int, default=50)
    chosen = arguments.parse_args()
    package = next(each.loaded() for each in discover() if each.name == chosen.device)
    table: KernelTable = resolve(next(iter(package.kernels.values())), package.name)()
    where = resolve(package.facts, package.name)(0).tensor_device
    bound = bandwidth(where, chosen.rounds)
    print(f"{bound / 1e9:,.0f} GB/s by a copy; batch {chosen.batch}, context {chosen.context:,}")
    found: list[dict[str, object]] = []
    for make in Rows(chosen.batch, chosen.context, where).cases():
        case = make()
        error = case.error(table)
        if not error <= CLOSE:
            raise SystemExit(f"{case.name}: off by {error:.3g}, {CLOSE:g} is allowed")
        took = seconds(lambda case=case: case.run(table), chosen.rounds)
        share = case.floor / bound / took
        verdict = (
            "" if case.entry not in ("sparse_mqa", "paged_mqa") else "; goal reached" if share >= GOAL else "; below"
        )
        print(f"{case.name:42} {took * 1e6:9.1f} us, {case.floor / 1e6:8.1f} MB, {share:5.0%} of the bound{verdict}")
        found.append({"case": case.name, "seconds": took, "floor_bytes": case.floor, "share": share, "error": error})
    if chosen.json:
        setting = {"device": str(where), "bandwidth": bound, "batch": chosen.batch, "context": chosen.context}
        write_results(chosen.json, {"machine": machine(), **setting, "rows": found})


if __name__ == "__main__":
    main()
