"""Host time of a decode step that verifies proposals, over that of a plain step, when forward, draw and drafter cost nothing.

Counted is what benchmarks/host_overhead.py counts, and the runs: widening, placing, accepting, taking in several tokens.
Asked: at most 1.3 times a plain step at batch 64, and 0.4 times for each token that comes.

    python benchmarks/speculative_overhead.py [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median

import numpy as np
import torch
from host_overhead import NoDraw, NoModel
from results import machine, write_results
from torch import Tensor

from sglcore.device.config import resolve_config
from sglcore.engine.start import start
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.runtime.speculative.worker import SpeculativeWorker
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.loop import Loop
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler

TOKENS, STEPS, BLOCKS = 4, 60, 9


class Constant:
    """Proposes the token that is drawn, or another."""

    tokens, lookahead, reads_history = TOKENS, 1, False

    def __init__(self, is_right: bool) -> None:
        self._proposals = torch.full((256, TOKENS), 5 if is_right else 6, dtype=torch.int32)

    def advance(self, rows: DraftRows) -> Tensor:
        """Made before."""
        return self._proposals[: len(rows.slots)]

    def close(self) -> None:
        """Nothing to free."""


def make_loop(batch_size: int, kind: str) -> Loop:
    """A running engine of `batch_size` decoding requests over the no-op model."""
    given = {"max_requests": batch_size, "max_model_len": 1024, "max_batch_tokens": 4096, "threads": 1}
    speculative = {} if kind == "plain" else {"speculative": "ngram", "draft_tokens": TOKENS}
    made = start(resolve_config({**given, **speculative})).worker
    assert isinstance(made, TpModelWorker)
    runner, rows = made.runner, 256 * (TOKENS + 1)
    model = NoModel(runner.model, max(rows, 4096))
    quiet = ModelRunner(model, runner.attn_backend, runner.decode_registry, runner.prefill_registry, runner.token_table)
    worker = TpModelWorker(quiet, runner.token_table, made.limits)
    if kind != "plain":
        limits = replace(made.limits, keeps_history=False)
        worker = SpeculativeWorker(quiet, runner.token_table, limits, Constant(kind == "right"))
    worker._sampling._sampler = NoDraw(max(rows, 4096))
    scheduler = Scheduler(worker.limits)
    params = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    for index in range(batch_size):
        prompt = np.arange(10, 18, dtype=np.int32) + index
        scheduler.add(Request(f"r{index}", prompt, params, seed=index, stop_ids=frozenset({3})))
    loop = Loop(scheduler, worker)
    for _ in range(5):
        loop.step()
    return loop


def timed(loop: Loop, steps: int) -> float:
    """Microseconds of a step: processor time, which others' work does not lengthen much."""
    begin = time.process_time()
    for _ in range(steps):
        loop.step()
    return (time.process_time() - begin) / steps * 1e6


def main() -> None:
    """Measure by turns, print, and write the results."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--json", default=None)
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    rows = []
    for batch_size in (1, 8, 64, 256):
        found: dict[str, list[float]] = {"plain": [], "right": [], "wrong": []}
        for _ in range(BLOCKS):
            for kind, values in found.items():
                # What is always right ends after 1,000 tokens, so each block begins anew.
                values.append(timed(make_loop(batch_size, kind), STEPS))
        figures = {kind: median(values) for kind, values in found.items()}
        row = {"batch": batch_size, **{f"{kind}_us": round(value, 1) for kind, value in figures.items()}}
        row["step_ratio"] = round(figures["wrong"] / figures["plain"], 2)
        row["right_step_ratio"] = round(figures["right"] / figures["plain"], 2)
        row["token_ratio"] = round(figures["right"] / figures["plain"] / (TOKENS + 1), 2)
        rows.append(row)
        print(row)
    if chosen.json:
        write_results(chosen.json, {"benchmark": "host overhead of verification", "machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
