"""What verifying proposals costs a model that keeps states, beside its forward: states take in what was right once that is known.

A Qwen 3 Next by transformers' class, random, with three layers of the gated delta rule to each one of attention. Each step verifies
so many proposals of each request; as the weights are random, hardly one is right.

Floor, in bytes of states: a plain step reads and writes each once. A verification reads them, and taking in reads and writes them, and
reads no weight: so one and a half times the plain step's.

    python benchmarks/state_verification.py [--layers N] [--requests N] [--json FILE]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from results import machine, write_results

from sglcore.device.config import resolve_config
from sglcore.engine.start import start
from sglcore.runtime.memory.states import StatePool
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.loop import Loop
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler

STEPS, WARM, PROMPT = 40, 8, 16
WIDTHS = (0, 2, 4)
"""Proposals of a step; 0: a plain engine."""


def write_checkpoint(folder: Path, layers: int) -> None:
    """Every fourth layer attends."""
    kinds = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)]
    config = transformers.Qwen3NextConfig(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        layer_types=kinds,
        mlp_only_layers=list(range(layers)),
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=4096,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)


class TimedPool(StatePool):
    """Notes how long taking in takes, milliseconds."""

    taken: list[float]

    def take_in(self, slots: Any, counts: Any, width: int) -> None:
        begin = time.perf_counter()
        super().take_in(slots, counts, width)
        self.taken.append((time.perf_counter() - begin) * 1e3)


def measured(folder: Path, requests: int, tokens: int) -> dict[str, float]:
    """Median milliseconds of a decode step of all requests, and of its parts."""
    given: dict[str, Any] = {"model": str(folder), "device": "cpu", "max_requests": requests, "threads": 2}
    proposing = {"speculative": "ngram", "draft_tokens": tokens} if tokens else {}
    config = resolve_config({**given, "kv_cache_memory": 256 << 20, **proposing}, {})
    worker: Any = start(config).worker
    pool = worker.runner.state_pool
    if tokens:
        pool.__class__, pool.taken = TimedPool, []
        worker._proposals_here = None  # as wide as asked for, whatever was found
    scheduler = Scheduler(worker.limits)
    loop = Loop(scheduler, worker, overlap=False)
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=(tokens + 1) * (STEPS + WARM), ignore_eos=True)
    for index in range(requests):
        scheduler.add(Request(f"r{index}", rng.integers(3, 4096, PROMPT).astype(np.int32), params))
    took = list[float]()
    while loop.has_work and len(took) < STEPS + WARM:
        begin = time.perf_counter()
        loop.step()
        took.append((time.perf_counter() - begin) * 1e3)
    parts = {"taking in": round(median(pool.taken[WARM:]), 3)} if tokens else {}
    worker.close()
    return {"step": round(median(took[WARM:]), 3), **parts}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), given.layers)
        for tokens in WIDTHS:
            found[str(tokens)] = measured(Path(folder), given.requests, tokens)
            print(f"{tokens} proposals: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in found[str(tokens)].items()))
    if given.json:
        sizes = {"layers": given.layers, "requests": given.requests}
        write_results(given.json, {"machine": machine(), **sizes, "milliseconds_by_proposals": found})


if __name__ == "__main__":
    main()
