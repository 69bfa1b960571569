"""Time to plan DeepSeek-V4's attention (sliding window and compressed blocks) for a decode step at
8k tokens.

The geometry is DeepSeek-V4-Flash's: a window of 128, blocks of 4 and of 128 tokens. The pool is not
read. `plan` makes new tensors, `refresh` writes into a graph's tensors, `steps` plans four draft
steps at once. Lower bound: fill each of the plan's tensors once, with one call per tensor.

    python benchmarks/sparse_plan.py [--requests 256] [--tokens 8192] [--kernels native]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from results import machine, write_results

from sglcore.checkpoint.compressed_config import CompressedConfig, Compression
from sglcore.checkpoint.model_config import RopeConfig
from sglcore.device.package import resolve
from sglcore.runtime.attention.contract import AttentionShape, Bucket
from sglcore.runtime.attention.sparse.compressed import CompressedPlan, DeepseekV4AttnBackend
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.deepseek_v4_rows import DeepSeekV4TokenToKVPool, kept_rows
from sglcore.runtime.memory.kv_rows import RowCounts
from sglcore.runtime.memory.pools import ReqToTokenPool, WindowTable
from sglcore.worker.schedule_batch import ForwardMode
from sglcore_cpu import package

PAGE, WINDOW, REPEATS, DRAFTS = 256, 128, 200, 4
LAYERS = (None, Compression(4, True), Compression(128, False))
ROPE = RopeConfig(10000.0, "default", 0.125, 4096, {})
NET = CompressedConfig(
    64, 512, 64, 1024, 8, 1024, WINDOW, 64, 128, 512, LAYERS, ROPE, ROPE, (False,) * 3, 4, 20, 1e-6, 10.0
)


def make_backend(requests: int, tokens: int, kernels: KernelTable) -> DeepseekV4AttnBackend:
    """Make a backend over a pool on the meta device, which has no memory."""
    table = ReqToTokenPool(requests, tokens + PAGE, PAGE, "cpu")
    windows = WindowTable(requests, WINDOW, PAGE, PAGE, "cpu")
    for each in (table, windows):
        each.page_table[1:] = 1 + torch.randperm(requests * each.max_pages, dtype=torch.int32).view(requests, -1)
    counts = RowCounts(requests * table.max_pages, requests * windows.max_pages, requests)
    rows = [kept_rows(NET, each, torch.bfloat16) for each in LAYERS]
    pool = DeepSeekV4TokenToKVPool(rows, PAGE, counts, "meta", window_table=windows)
    return DeepseekV4AttnBackend(AttentionShape(64, ((1, 512),) * 3, (WINDOW,)), table, pool, kernels)


def make_batch(requests: int, tokens: int) -> ForwardBatch:
    """Make a decode batch of requests with about `tokens` tokens, at different page offsets."""
    lens = tokens - torch.arange(requests, dtype=torch.int32) % (PAGE // 2)
    starts = (lens - WINDOW).clamp(min=0) // PAGE * PAGE
    cells = torch.arange(requests)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=requests,
        num_tokens=requests,
        req_pool_indices=torch.arange(1, requests + 1, dtype=torch.int32),
        seq_lens=lens,
        positions=lens - 1,
        out_cache_loc=cells,
        window_seq_lens=lens - starts,
        window_positions=lens - starts - 1,
        window_cache_loc=cells,
        seq_lens_cpu=lens.numpy(),
    )


def tensors(plan: CompressedPlan) -> list[torch.Tensor]:
    """Return the tensors of a plan."""
    events = [(each.reads, each.block_positions, each.out_rows, each.writes) for each in plan.completed.values()]
    return [plan.window, plan.window_out, *plan.blocks.values(), *(each for event in events for each in event)]


def microseconds(run: Callable[[], object]) -> dict[str, float]:
    """Return microseconds of one call: median and 90th percentile."""
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        taken.append((time.perf_counter() - start) * 1e6)
    return {"p50": round(float(np.percentile(taken, 50)), 1), "p90": round(float(np.percentile(taken, 90)), 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--kernels", default="native", choices=("native", "reference"))
    parser.add_argument("--json")
    asked = parser.parse_args()
    kernels = KernelTable() if asked.kernels == "reference" else resolve(package.kernels["native"])()
    backend, batch = make_backend(asked.requests, asked.tokens, kernels), make_batch(asked.requests, asked.tokens)
    captured, made = backend.capture_plan(Bucket(asked.requests, asked.requests)), backend.plan(batch)
    with torch.inference_mode():
        found = {
            "plan": microseconds(lambda: backend.plan(batch)),
            "refresh": microseconds(lambda: backend.refresh(captured, batch)),
            f"{DRAFTS} steps": microseconds(lambda: backend.plan_steps(batch, DRAFTS)),
            "floor of plan": microseconds(lambda: [each.zero_() for each in tensors(made)]),
            "floor of refresh": microseconds(lambda: [each.zero_() for each in tensors(captured)]),
        }
    for name, each in found.items():
        print(f"{name:18} p50 {each['p50']:8.1f} us   p90 {each['p90']:8.1f} us")
    if asked.json:
        sizes = {"requests": asked.requests, "tokens": asked.tokens, "kernels": asked.kernels}
        write_results(asked.json, {"machine": machine(), **sizes, "microseconds": found})


if __name__ == "__main__":
    main()
