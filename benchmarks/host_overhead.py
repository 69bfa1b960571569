"""Host time of one decode step with a model and a sampler that cost nothing.

Included: scheduling, isolation, staging into the registry, page-table differences, attention
planning, sampling bookkeeping, collect and finish. The agreement of data-parallel shards is
measured by itself, as a share of their steps. The model returns a constant, the sampler
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
from sglcore.runtime.graphs.graph_limits import MOST_CAPTURED, batch_sizes
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.sampler import Sampler, SamplingState
from sglcore.sampling.state import SampledTokens
from sglcore.schedule.data_parallel.dp_plan import agree, vote_of
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


def agreements(shards: int, batch_size: int) -> dict[str, float]:
    """Return microseconds, the median of a step's agreement of data-parallel shards that all
    decode: without captured graphs, and with the sizes from which a rank takes the one that all
    replay. Both are measured in turn."""
    batches = []
    for _ in range(shards):
        loop = make_loop(batch_size, greedy=True)
        for _ in range(3):
            loop.step()
        loop.drain()
        batches.append(loop.scheduler.next_batch())
    choices = {"without": (), "with": batch_sizes(MOST_CAPTURED)}
    times: dict[str, list[float]] = {name: [] for name in choices}
    for _ in range(STEPS):
        for name, sizes in choices.items():
            begin = time.perf_counter()
            plan = agree([vote_of(batch) for batch in batches]).replayed(sizes)
            times[name].append((time.perf_counter() - begin) * 1e6)
            if (plan.bucket is None) is (name == "with"):
                raise SystemExit(f"{shards} shards agreed on {plan}")
    return {name: float(np.median(found)) for name, found in times.items()}


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
    step = next(row["median_us"] for row in rows if row["batch"] == 8 and row["sampling"] == "greedy")
    agreed = []
    for shards in (2, 8):
        took = agreements(shards, 8)
        row = {
            "shards": shards,
            "without_graphs_us": round(took["without"], 1),
            "with_graphs_us": round(took["with"], 1),
            "share_of_steps": round(took["with"] / (shards * step), 3),
        }
        agreed.append(row)
        print(row)
    if chosen.json:
        write_results(
            chosen.json,
            {"benchmark": "host overhead of a decode step", "machine": machine(), "rows": rows, "agreements": agreed},
        )


if __name__ == "__main__":
    main()
