"""Decode speed at batch 1 of the embedded model, beside transformers' `generate` on the same weights, interleaved.

Greedy, with a KV cache on both sides, the same prompt, the same dtype, the same number of tokens. The peer runs with one
thread and with torch's own default; the ratio is to the better of the two.
Floor: 11 MB of weights a token, 0.4 ms at 30 GB/s; both sides are bound by host time far above it.

    python benchmarks/decode_vs_transformers.py [--json FILE] [--graph compiled] [--threads N]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from results import machine, write_results

from sglcore import LLM, SamplingParams
from sglcore.engine.start import embedded_model

TOKENS = 128
ROUNDS = 7


def ours(llm: LLM, ids: list[int]) -> float:
    """Tokens per second after the first token."""
    output = llm.engine.add(ids, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))
    while not output.outputs[0].token_ids:
        llm.engine.step()
    begin = time.perf_counter()
    start = len(output.outputs[0].token_ids)
    while not output.finished:
        llm.engine.step()
    seconds = time.perf_counter() - begin
    return (len(output.outputs[0].token_ids) - start) / seconds


def theirs(model: torch.nn.Module, ids: list[int]) -> float:
    """Tokens per second after the first token: the time of N tokens less the time of one."""
    prompt = torch.tensor([ids])
    options = {"do_sample": False, "use_cache": True, "eos_token_id": None, "pad_token_id": 0}
    begin = time.perf_counter()
    model.generate(prompt, max_new_tokens=1, **options)  # pyright: ignore
    first = time.perf_counter()
    model.generate(prompt, max_new_tokens=TOKENS, **options)  # pyright: ignore
    return (TOKENS - 1) / ((time.perf_counter() - first) - (first - begin))


def main() -> None:
    """Measure, print the ratio, write the results."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--json", default=None)
    arguments.add_argument("--graph", default="off")
    arguments.add_argument("--threads", type=int, default=None)
    chosen = arguments.parse_args()
    from transformers import AutoModelForCausalLM

    default_threads = torch.get_num_threads()
    llm = LLM(graph=chosen.graph, graph_buckets=(1,), max_requests=1, threads=chosen.threads)
    model = AutoModelForCausalLM.from_pretrained(embedded_model(), dtype=torch.bfloat16).eval()
    ids = llm.engine.codec.encode("Once upon a time")
    mine = torch.get_num_threads()
    peers = sorted({1, default_threads})

    def round_of_all() -> list[float]:
        speeds = [ours(llm, ids)]
        for threads in peers:
            torch.set_num_threads(threads)
            speeds.append(theirs(model, ids))
        torch.set_num_threads(mine)
        return speeds

    round_of_all()
    speeds = np.array([round_of_all() for _ in range(ROUNDS)])
    best = 1 + int(np.median(speeds[:, 1:], axis=0).argmax())
    ratios = speeds[:, 0] / speeds[:, best]
    row = {
        "graph": chosen.graph,
        "threads": mine,
        "ours_tokens_per_s": round(float(np.median(speeds[:, 0])), 1),
        "transformers_tokens_per_s": {
            f"{threads} threads": round(float(np.median(speeds[:, 1 + i])), 1) for i, threads in enumerate(peers)
        },
        "ratio_median": round(float(np.median(ratios)), 2),
        "ratio_min": round(float(ratios.min()), 2),
        "ratio_max": round(float(ratios.max()), 2),
        "wanted": 1.5,
    }
    print(row)
    if chosen.json:
        write_results(chosen.json, {"benchmark": "decode at batch 1", "machine": machine(), "rows": [row]})


if __name__ == "__main__":
    main()
