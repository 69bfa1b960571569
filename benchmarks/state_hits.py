"""A prefix hit of a hybrid model: what its state costs to restore, and what of the prompt's computation it saves.

A Qwen 3 Next by transformers' class, random and narrow, with three layers of the gated delta rule to each one of attention,
gets a prompt, and then the same prompt again: all but its last tokens are cached cells, and a snapshot of the state behind them.

    python benchmarks/state_hits.py [--layers N] [--json FILE]
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
from sglcore.runtime.memory.states import state_bytes
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.loop import Loop
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler

TOKENS, TAIL, PAGE = 4096, 5, 16
ROUNDS, RESTORES = 3, 200
WANTED = 5.0
"""Milliseconds that the restore may take."""


def write_checkpoint(folder: Path, layers: int) -> None:
    """Every fourth layer attends; heads of the recurrence are as wide as the published model's, and there are fewer."""
    kinds = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)]
    config = transformers.Qwen3NextConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        layer_types=kinds,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        vocab_size=512,
        max_position_embeddings=2 * TOKENS,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Served:
    """A worker and its scheduler."""

    def __init__(self, folder: Path) -> None:
        given: dict[str, Any] = {"model": str(folder), "device": "cpu", "model_impl": "transformers", "page_size": PAGE}
        config = resolve_config({**given, "max_requests": 4, "dtype": "float32", "kv_cache_memory": 256 << 20}, {})
        self.worker: Any = start(config).worker
        self.scheduler = Scheduler(self.worker.limits)
        self.loop = Loop(self.scheduler, self.worker, overlap=False)

    def first_token(self, prompt: list[int]) -> float:
        """Milliseconds from a request's arrival to its only token."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        begun = time.perf_counter()
        self.scheduler.add(Request(f"{begun}", np.array(prompt, np.int32), params))
        while self.loop.has_work:
            self.loop.step()
        return (time.perf_counter() - begun) * 1e3

    def restore(self) -> float:
        """Milliseconds in which one snapshot becomes a slot's state."""
        pool = self.worker.runner.state_pool
        rows = {"state_sources": [self.worker.limits.max_requests + 1], "state_restored": [1]}
        arrived = {name: torch.tensor(each, dtype=torch.int32) for name, each in rows.items()}
        times = []
        for _ in range(RESTORES):
            begun = time.perf_counter()
            pool.copy_in(arrived)
            times.append((time.perf_counter() - begun) * 1e3)
        return median(times)


def measure(layers: int) -> dict[str, Any]:
    """Medians over prompts of their own."""
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), layers)
        served = Served(Path(name))
    rng, cold, hit = np.random.default_rng(0), [], []
    for _ in range(ROUNDS):
        prompt = rng.integers(3, 512, TOKENS + TAIL).tolist()
        cold.append(served.first_token(prompt))
        before = served.scheduler.stats()
        hit.append(served.first_token(prompt))
        after = served.scheduler.stats()
        assert after.hit_tokens - before.hit_tokens == TOKENS, "the hit ends at the snapshot"
    pool = served.worker.runner.state_pool
    found = {
        "layers": layers,
        "prompt_tokens": TOKENS + TAIL,
        "hit_tokens": TOKENS,
        "state_mib": round(state_bytes(pool.layers) / 2**20, 2),
        "cold_ms": round(median(cold), 1),
        "hit_ms": round(median(hit), 1),
        "restore_ms": round(served.restore(), 3),
        "wanted_restore_ms": WANTED,
    }
    served.worker.close()
    return found


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    found = measure(options.layers)
    for name, value in found.items():
        print(f"{name:18} {value}")
    if options.json:
        write_results(options.json, {"machine": machine(), **found})


if __name__ == "__main__":
    main()
