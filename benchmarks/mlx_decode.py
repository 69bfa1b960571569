"""Decode speed of the `mlx` device beside mlx-lm on the embedded model, the same build of MLX, the same weights and dtype.

Greedy, tokens a second after the first token of every request. One request, against mlx-lm's `generate_step`; eight
requests at once, against mlx-lm's eight one after another and its own batches; and the worker alone, fed with the steps
of eight requests that a run before planned. Rounds are interleaved in one process; the order turns from round to round.
Floor of a row on MLX's processor build: 5.3 million weights by its scalar matrix product, about 2.4 ms in float32.

    python benchmarks/mlx_decode.py [--json FILE] [--tokens N] [--rounds N] [--dtype bfloat16 float32] [--graph KIND]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.utils import load_model
from results import machine, write_results

from sglcore.conformance.recording_worker import RecordingWorker
from sglcore.device.batch import ScheduleBatch
from sglcore.device.config import resolve_config
from sglcore.device.worker import ModelWorker
from sglcore.engine.start import embedded_model, start
from sglcore.engine.text import TextCodec
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.loop import Loop
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler

BATCH = 8
PROMPTS = (
    "Once upon a time",
    "One morning, Rosa found a",
    "Leo was a brave boy who",
    "The capital of France",
    "In a small village near the sea",
    "What is 11 times 12?",
    "A cat has four",
    "The old clock in the hall",
)


class Ours:
    """The started device, driven by the engine's scheduler with overlap, or with steps that were made before."""

    def __init__(self, worker: ModelWorker, prompts: list[list[int]], tokens: int) -> None:
        self.recorder = RecordingWorker(worker)
        self._prompts = prompts
        self._tokens = tokens
        self._planned: list[ScheduleBatch] = []

    def decode(self, count: int) -> float:
        """Tokens a second of `count` requests at once."""
        self.recorder.next_scheduler()
        scheduler = Scheduler(self.recorder.limits, prefix_cache=False)
        loop = Loop(scheduler, self.recorder)
        params = SamplingParams(temperature=0.0, max_tokens=self._tokens, ignore_eos=True)
        requests = [Request(f"r{i}", np.array(ids, np.int32), params) for i, ids in enumerate(self._prompts[:count])]
        for request in requests:
            scheduler.add(request)
        while not all(request.output_ids for request in requests):
            loop.step()
        first, begin = sum(len(request.output_ids) for request in requests), time.perf_counter()
        while loop.has_work:
            loop.step()
        seconds = time.perf_counter() - begin
        return (sum(len(request.output_ids) for request in requests) - first) / seconds

    def plan(self) -> None:
        """Keep the steps of all requests for `alone`."""
        self.recorder.keep = True
        self.decode(BATCH)
        self._planned = [batch for batch, _ in self.recorder.steps]
        self.recorder.keep, self.recorder.steps = False, []

    def alone(self) -> tuple[float, list[float]]:
        """Tokens a second of the worker fed with planned steps, one ahead; and the seconds of each submit."""
        worker, spent = self.recorder.worker, []
        steps = [batch.copy_for_forward() for batch in self._planned]
        prompts = [batch for batch in steps if not batch.forward_mode.is_decode]
        for batch in prompts:
            worker.collect(worker.submit(batch))
        running, count, begin = None, 0, time.perf_counter()
        for batch in steps[len(prompts) :]:
            before = time.perf_counter()
            queued = worker.submit(batch)
            spent.append(time.perf_counter() - before)
            count += batch.batch_size
            if running is not None:
                worker.collect(running)
            running = queued
        if running is not None:
            worker.collect(running)
        return count / (time.perf_counter() - begin), spent


class Theirs:
    """mlx-lm's model on the same prompts."""

    def __init__(self, dtype: str, prompts: list[list[int]], tokens: int) -> None:
        self._model, _ = load_model(embedded_model())
        self._model.set_dtype(getattr(mx, dtype))
        mx.eval(self._model.parameters())
        self._prompts = prompts
        self._tokens = tokens

    def decode(self, count: int) -> float:
        """Tokens a second of `count` requests one after another, without the time to the first token of each."""
        seconds = 0.0
        for ids in self._prompts[:count]:
            begin = 0.0
            for place, _ in enumerate(generate_step(mx.array(ids), self._model, max_tokens=self._tokens)):
                begin = begin if place else time.perf_counter()
            seconds += time.perf_counter() - begin
        return count * (self._tokens - 1) / seconds

    def batch(self) -> float:
        """Tokens a second of all requests in one batch of its own, from the moment when each has its first token."""
        made = BatchGenerator(self._model, max_tokens=self._tokens)
        waiting, begin, count = set(made.insert(self._prompts)), 0.0, 0
        while responses := made.next_generated():
            count += 0 if waiting else len(responses)
            if waiting:
                waiting -= {response.uid for response in responses}
                begin = time.perf_counter()
        seconds = time.perf_counter() - begin
        made.close()
        return count / seconds


def measure(dtype: str, tokens: int, rounds: int, graph: str) -> dict[str, Any]:
    """The result row of a dtype: tokens a second and ratios over interleaved rounds."""
    settings = {"device": "mlx", "dtype": dtype, "max_requests": BATCH, "graph": graph, "graph_buckets": (1, BATCH)}
    config = resolve_config({**settings, "model": str(embedded_model())}, {})
    started = start(config)
    codec = TextCodec(embedded_model())
    prompts = [codec.encode(text) for text in PROMPTS]
    ours, theirs = Ours(started.worker, prompts, tokens), Theirs(dtype, prompts, tokens)
    ours.plan()
    submits: list[float] = []

    def alone() -> float:
        speed, spent = ours.alone()
        submits.extend(spent)
        return speed

    kinds: dict[str, Callable[[], float]] = {
        "ours_1": lambda: ours.decode(1),
        "mlx_lm_1": lambda: theirs.decode(1),
        "ours_8": lambda: ours.decode(BATCH),
        "mlx_lm_8_in_turn": lambda: theirs.decode(BATCH),
        "mlx_lm_8_batched": theirs.batch,
        "worker_8": alone,
    }
    speeds = run_rounds(kinds, rounds)
    started.worker.close()
    chosen = [row for row in started.ledger.rows if row.topic in ("graph", "attention", "threads", "compute")]
    return {
        "dtype": dtype,
        "decisions": {row.topic: row.effective for row in chosen},
        "tokens_per_s": {name: round(float(np.median(found)), 1) for name, found in speeds.items()},
        "ratios": {
            "one request": spread(speeds["ours_1"] / speeds["mlx_lm_1"]),
            "eight against one after another": spread(speeds["ours_8"] / speeds["mlx_lm_8_in_turn"]),
            "eight against batches": spread(speeds["ours_8"] / speeds["mlx_lm_8_batched"]),
            "the scheduler's share of eight": spread(speeds["ours_8"] / speeds["worker_8"]),
        },
        "submit_us_at_8": {"median": _us(submits, 50), "p90": _us(submits, 90)},
    }


def run_rounds(kinds: dict[str, Callable[[], float]], rounds: int) -> dict[str, np.ndarray]:
    """Each kind once a round, in turning order; the first round only warms up."""
    found: dict[str, list[float]] = {name: [] for name in kinds}
    names = list(kinds)
    for number in range(rounds + 1):
        order = names[number % len(names) :] + names[: number % len(names)]
        for name in order:
            speed = kinds[name]()
            if number:
                found[name].append(speed)
    return {name: np.array(speeds) for name, speeds in found.items()}


def spread(ratios: np.ndarray) -> dict[str, float]:
    """Median, least and greatest."""
    values = {"median": np.median(ratios), "min": ratios.min(), "max": ratios.max()}
    return {name: round(float(value), 2) for name, value in values.items()}


def _us(seconds: list[float], percent: int) -> float:
    return round(float(np.percentile(seconds, percent)) * 1e6, 1)


def main() -> None:
    """Measure, print the ratios, write the results."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--json", default=None)
    arguments.add_argument("--tokens", type=int, default=96)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    arguments.add_argument("--graph", default="auto")
    chosen = arguments.parse_args()
    rows = [measure(dtype, chosen.tokens, chosen.rounds, chosen.graph) for dtype in chosen.dtype]
    for row in rows:
        print(row)
    if chosen.json:
        where = {**machine(), **{name: version(name) for name in ("mlx", "mlx-lm")}}
        content = {"benchmark": "decode on MLX, beside mlx-lm", "machine": where, "tokens": chosen.tokens, "rows": rows}
        write_results(chosen.json, {**content, "rounds": chosen.rounds})


if __name__ == "__main__":
    main()
