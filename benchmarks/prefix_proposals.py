"""Host time to look up draft tokens in the prefix cache, per step, for many requests that generate
cached texts.

Lower bound: a list slice and a byte comparison per request, and a dictionary lookup per page that
it fills.

    python benchmarks/prefix_proposals.py [--requests 64] [--tokens 4096] [--page-size 16]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from results import machine, write_results

from sglcore.sampling.params import SamplingParams
from sglcore.schedule.cache.prefix_proposals import PrefixProposals
from sglcore.schedule.cache.request_pages import Memory
from sglcore.schedule.request import Request
from sglcore.worker.model_worker import Limits

COUNT, PROMPT, ROUNDS = 4, 512, 5


def make_memory(texts: np.ndarray, page_size: int) -> Memory:
    """Make a memory with the full pages of texts, int32[B, M], in its prefix cache."""
    pages = texts.size // page_size + 1
    memory = Memory(Limits(texts.shape[1], len(texts), page_size, pages, 8192, 1 << 15), prefix_cache=True)
    page = 0
    for text in texts:
        node = memory.cache.root
        for index in range(len(text) // page_size):
            page += 1
            node = memory.cache.insert(node, memory.cache.key(text, index), page)
    return memory


def measure(texts: np.ndarray, page_size: int) -> list[float]:
    """Return microseconds of each lookup, when every request gains `COUNT` + 1 tokens per step."""
    memory, taken = make_memory(texts, page_size), []
    proposals = PrefixProposals(memory, COUNT)
    requests = [Request(f"r{row}", text[:PROMPT].copy(), SamplingParams()) for row, text in enumerate(texts)]
    for request in requests:
        path = memory.cache.match(request.prompt_ids)
        request.held.node, request.held.shared = path[-1], len(path)
    for end in range(PROMPT, texts.shape[1] - 2 * page_size, COUNT + 1):
        begin = time.perf_counter()
        found = proposals.propose(requests)
        taken.append((time.perf_counter() - begin) * 1e6)
        assert found is not None and (found == texts[:, end : end + COUNT]).all()
        for request, text in zip(requests, texts, strict=True):
            request.output_ids.extend(text[end : end + COUNT + 1].tolist())
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json")
    given = parser.parse_args()
    texts = np.random.default_rng(0).integers(0, 1 << 15, (given.requests, given.tokens)).astype(np.int32)
    best = min((measure(texts, given.page_size) for _ in range(ROUNDS)), key=np.median)
    middle, late = float(np.median(best)), float(np.quantile(best, 0.99))
    print(
        f"{given.requests} requests, {given.tokens} tokens: {middle:.0f} us a step, {late:.0f} at the 99th percentile"
    )
    if given.json:
        sizes = {"requests": given.requests, "tokens": given.tokens, "page_size": given.page_size}
        write_results(given.json, {"machine": machine(), **sizes, "microseconds": {"median": middle, "p99": late}})


if __name__ == "__main__":
    main()
