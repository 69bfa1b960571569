"""Host time of one decode step with a model and a sampler that cost nothing.

Included: scheduling, isolation, staging into the registry, page-table differences, attention
planning, sampling bookkeeping, collect and finish. The model returns a constant, the sampler
constant tokens. Lower bound: about 40 tensor-library calls of 0.5 to 1 microsecond at batch 1.

    python benchmarks/host_overhead.py [--json FILE]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from results import machine, write_results
from torch import Tensor

from sglcore.config.engine_config import resolve_config
from sglcore.engine.start import start
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.sampler import Sampler, SamplingState
from sglcore.sampling.state import SampledTokens
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.step_loop import Loop

STEPS = 600


class NoModel:
    """A model that returns hidden states and logits made in advance."""

    def __init__(self, model: object, rows: int) -> None:
        self.attention_layers = model.attention_layers  # pyright: ignore
        self._hidden = torch.zeros(rows, 8)
        self._logits = torch.zeros(rows, 16)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Return zeros [T, 8]."""
        return self._hidden[: batch.num_tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return zeros [N, 16]."""
        return self._logits[: hidden.shape[0]]

    def embed_ids(self, ids: Tensor) -> Tensor:
        """Return zeros [T, 8]."""
        return self._hidden[: ids.shape[0]]


class NoDraw(Sampler):
    """A sampler that returns token 5 for every request."""

    def __init__(self, rows: int) -> None:
        super().__init__(16, "cpu")
        self._tokens = SampledTokens(torch.full((rows,), 5, dtype=torch.int32), torch.zeros(rows, dtype=torch.bool))

    def sample(self, logits: Tensor, state: SamplingState) -> SampledTokens[Tensor]:
        """Return the constant tokens."""
        count = logits.shape[0]
        return SampledTokens(self._tokens.token_ids[:count], self._tokens.bad_rows[:count])


def make_loop(batch_size: int, greedy: bool) -> Loop:
    """Make a loop with `batch_size` requests over the no-op model."""
    config = resolve_config({"max_requests": batch_size, "max_model_len": 1024, "max_batch_tokens": 4096, "threads": 1})
    worker = start(config).worker
    assert isinstance(worker, TpModelWorker)
    model = NoModel(worker.runner.model, 4096)
    runner = worker.runner
    quiet = ModelRunner(model, runner.attn_backend, runner.decode_registry, runner.prefill_registry, runner.token_table)
    worker = TpModelWorker(quiet, runner.token_table, worker.limits)
    worker.sampling.sampler = NoDraw(4096)
    scheduler = Scheduler(worker.limits)
    params = SamplingParams(max_tokens=1000, temperature=0.0 if greedy else 0.8, ignore_eos=True)
    for index in range(batch_size):
        prompt = np.arange(10, 18, dtype=np.int32) + index
        scheduler.add(Request(f"r{index}", prompt, params, seed=index, stop_ids=frozenset({3})))
    return Loop(scheduler, worker)


def measure(batch_size: int, greedy: bool) -> np.ndarray:
    """Return microseconds of each decode step after a warm-up."""
    loop = make_loop(batch_size, greedy)
    for _ in range(30):
        loop.step()
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        loop.step()
        times.append((time.perf_counter() - begin) * 1e6)
    if loop.scheduler.stats().running != batch_size:
        raise SystemExit(f"of {batch_size} requests {loop.scheduler.stats().running} were still running at the end")
    return np.array(times)


def main() -> None:
    """Measure, print, and write the results."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--json", default=None)
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    rows = []
    for batch_size, limit in ((1, 60), (8, 60), (32, 100), (64, 150), (256, 300)):
        for greedy in (True, False):
            times = measure(batch_size, greedy)
            row = {
                "batch": batch_size,
                "sampling": "greedy" if greedy else "temperature",
                "median_us": round(float(np.median(times)), 1),
                "p10_us": round(float(np.percentile(times, 10)), 1),
                "p90_us": round(float(np.percentile(times, 90)), 1),
                "limit_us": limit,
            }
            rows.append(row)
            print(row)
    if chosen.json:
        write_results(chosen.json, {"benchmark": "host overhead of a decode step", "machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
