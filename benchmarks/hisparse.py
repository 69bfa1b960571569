"""Cost of keeping KV entries of sparse attention in host memory (hisparse): decode throughput
compared with all entries on the device, at the measured hit rate.

On the simulated accelerator a decode step keeps the device busy for --step milliseconds, and with
hisparse also for the time of the copies of missed entries: a token reads --rows entries of
--row-bytes bytes in each of --layers layers, and entries that are not on the device come over a bus
of --bus gigabytes per second; no copy overlaps with computation. All times are multiplied by
--stretch, so that a step does not wait for the slow host of a simulation. The engine is complete,
with graphs. Each of its requests stands for --times requests, and the random model has one layer:
its share of missed entries is applied to the entries of all --layers layers. The device has 16
times less memory for entries than a full context takes.

Weights and text decide which entries attention selects; with random weights each token selects
other entries. Here all tokens share one part of their embeddings, which queries see and keys do
not. `own`, the size of the other part, thus sets the hit rate, which is measured; the results have
a row for each `own`. `needed` is the hit rate at which the cost model of copies alone gives 0.8 of
the throughput with all entries on the device.

It also measures the host time to plan such a step for 256 requests, with and without hisparse:
minimum CPU time of many calls, on the CPU device.

    python benchmarks/hisparse.py [--device KIND] [--requests 4] [--times 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from made_models import make_model
from results import machine, write_results
from safetensors.torch import load_file, save_file
from torch import Tensor

import sglcore_sim
from sglcore.config.engine_config import resolve_config
from sglcore.engine.metered_worker import Meter
from sglcore.engine.start import start
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.hisparse.hisparse_coordinator import HiSparseCoordinator
from sglcore.runtime.hisparse.hisparse_shape import SwapShape
from sglcore.runtime.memory.kv_rows import KeptRows, Place
from sglcore.runtime.model_runner import Model
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.step_loop import Loop
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch

OWN = (0.02, 0.1, 0.3)
SMALLER, TOP_K, PAGE, VOCAB = 16, 16, 16, 4000
CONTEXT = SMALLER * 2 * TOP_K
STEPS, WARM, PLANNED, REPEATS, WANTED = 16, 4, 256, 300, 0.8
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": TOP_K,
    "index_head_dim": 64,
    "index_n_heads": 16,
    "initializer_range": 0.125,
}
BUFFERS = json.dumps({"device_buffer_size": 2 * TOP_K, "host_to_device_ratio": 64})


@dataclass(frozen=True, slots=True)
class Copies:
    """Cost model of a step: a token reads `rows` entries of `row_bytes` bytes in each of `layers`
    layers over `bus` gigabytes per second; the engine's requests count `times` times. `step`:
    milliseconds of a step without copies. `stretch`: factor of simulated times."""

    rows: int
    row_bytes: int
    layers: int
    bus: float
    step: float
    stretch: float
    times: int

    def milliseconds(self, missed: float) -> float:
        """Return milliseconds of copies if `missed` tokens (may be a fraction) have none of their
        entries on the device."""
        return missed * self.times * self.rows * self.layers * self.row_bytes / self.bus / 1e6

    def needed(self, requests: int) -> float:
        """Return the hit rate at which a step of `requests` requests takes 1 / WANTED of the time
        of a step without copies."""
        return 1 - self.step * (1 / WANTED - 1) / self.milliseconds(requests)


class Busy:
    """Wraps a model; each forward keeps the device busy for `copies.step` milliseconds plus its
    copies. This happens at the output layer, which runs once per forward, after the graph."""

    def __init__(self, model: Model, sim: sglcore_sim.Simulator, copies: Copies, hisparse: HiSparseCoordinator | None):
        self._model, self._sim, self._copies, self._hisparse = model, sim, copies, hisparse
        self.copying: list[float] = []

    @property
    def attention_layers(self) -> tuple[Attention, ...]:
        """The model's."""
        return self._model.attention_layers

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """The model's."""
        return self._model(batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """Keep the device busy, then return the model's logits."""
        copying = 0.0
        if self._hisparse is not None:
            missed = self._sim.host_view(self._hisparse.caches.missed)[:, : len(hidden)]
            copying = self._copies.milliseconds(float(missed.sum()) / len(missed) / TOP_K)
        self.copying.append(copying)
        self._sim.busy((self._copies.step + copying) * self._copies.stretch)
        return self._model.logits(hidden)

    def embed_ids(self, ids: Tensor) -> Tensor:
        """The model's."""
        return self._model.embed_ids(ids)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Means over decode steps of all requests: milliseconds of a step, of its copies by the cost
    model, and of host CPU time; and the hit rate."""

    step_ms: float
    copy_ms: float
    host_ms: float
    hits: float


class Engine:
    """A checkpoint on a device, with its KV entries there too unless `hisparse` is given."""

    def __init__(self, folder: Path, device: str, requests: int, **settings: object) -> None:
        sizes = {"max_model_len": CONTEXT, "max_requests": requests, "page_size": PAGE, "max_batch_tokens": CONTEXT}
        given = {
            "model": str(folder),
            "device": device,
            "dtype": "float32",
            "prefix_cache": False,
            "kernels": "reference",
        }
        config = resolve_config({**given, **sizes, "graph_buckets": (requests,), **settings})
        worker = start(config).worker
        assert isinstance(worker, TpModelWorker)
        self.worker, self.meter, self._requests = worker, Meter(worker), requests
        self.loop = Loop(Scheduler(worker.limits, prefix_cache=False), self.meter, overlap=worker.limits.runs_ahead)

    @property
    def hisparse(self) -> HiSparseCoordinator | None:
        """The coordinator of hisparse, if enabled."""
        found = self.worker.runner.attn_backend.hisparse
        assert found is None or isinstance(found, HiSparseCoordinator)
        return found

    def decode(self, sim: sglcore_sim.Simulator, copies: Copies) -> Decoded:
        """Measure STEPS decode steps of all requests near the end of the context, after each
        request has brought WARM tokens. Prompts are prefilled one after the other, so the first
        requests have decoded more tokens; prompt lengths leave room for these."""
        runner, rng = self.worker.runner, np.random.default_rng(0)
        runner.model = busy = Busy(runner.model, sim, copies, self.hisparse)
        tokens = STEPS + WARM + 3 * self._requests
        params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True)
        for index in range(self._requests):
            prompt = rng.integers(3, VOCAB, CONTEXT - tokens, dtype=np.int32)
            self.loop.scheduler.add(Request(str(index), prompt, params))
        seen = dict.fromkeys(map(str, range(self._requests)), 0)
        while min(seen.values()) < WARM:
            self._step(seen)
        count, before, begin, host = len(busy.copying), self.meter.swaps, time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            self._step(seen)
        seconds, host = time.perf_counter() - begin, time.process_time() - host
        swaps, copying = self.meter.swaps, busy.copying[count:]
        hits = (swaps.hits - before.hits) / max(1, swaps.rows - before.rows)
        return Decoded(seconds / STEPS * 1e3, sum(copying) / len(copying), host / STEPS * 1e3, hits)

    def _step(self, seen: dict[str, int]) -> None:
        for output in self.loop.step():
            seen[output.request_id] += len(output.token_ids)


@contextmanager
def engine(folder: Path, device: str, requests: int, **settings: object) -> Iterator[Engine]:
    """Make an engine that is closed at the end of the block."""
    made = Engine(folder, device, requests, **settings)
    try:
        yield made
    finally:
        made.worker.close()


def write_model(folder: Path, own: float) -> Path:
    """Write a random DeepSeek-V3.2. A token's embedding is a vector that all tokens share plus
    `own` times a random one; the index keys do not see the shared vector."""
    make_model(folder, "deepseek_v32", SIZES)
    weights = load_file(folder / "model.safetensors")
    generator, embed = torch.Generator().manual_seed(0), weights["model.embed_tokens.weight"]
    shared = torch.randn(1, embed.shape[1], generator=generator)
    made = {"model.embed_tokens.weight": shared + own * torch.randn(embed.shape, generator=generator)}
    name, line = "model.layers.0.self_attn.indexer.wk.weight", shared / shared.norm()
    keys = weights[name].float()
    made[name] = keys - keys @ line.T @ line
    changed = {name: values.to(embed.dtype) for name, values in made.items()}
    save_file({**weights, **changed}, folder / "model.safetensors", {"format": "pt"})
    return folder


def least_microseconds(run: Callable[[], object]) -> float:
    """Return the minimum CPU microseconds of REPEATS calls."""
    taken = []
    for _ in range(REPEATS):
        begin = time.process_time_ns()
        run()
        taken.append(time.process_time_ns() - begin)
    return round(min(taken) / 1e3, 1)


def batches(requests: int) -> tuple[ScheduleBatch, ForwardBatch]:
    """Make a decode step of `requests` requests, as host arrays and as CPU tensors."""
    lens = CONTEXT - np.arange(requests, dtype=np.int32) % PAGE
    slots, offsets = np.arange(1, requests + 1, dtype=np.int32), np.arange(requests + 1, dtype=np.int32)
    none = np.zeros(0, np.int32)
    given = offsets, np.zeros(requests, np.int32), lens // PAGE, 0 * offsets, none, np.ones(requests, bool)
    host = ScheduleBatch(0, ForwardMode.DECODE, slots, lens, lens - 1, *given)
    lengths = torch.from_numpy(lens)
    staged = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=requests,
        num_tokens=requests,
        req_pool_indices=torch.from_numpy(slots),
        seq_lens=lengths,
        positions=lengths - 1,
        seq_lens_cpu=lens,
    )
    return host, staged


@torch.inference_mode()
def host_times(folder: Path) -> dict[str, float]:
    """Return host microseconds of a decode step of 256 requests: the plan with all entries on the
    device, the plan with hisparse, hisparse's part of it, and its counting. When a graph is
    replayed, only counting runs."""
    host, staged = batches(PLANNED)
    found = dict[str, float]()
    for name, hisparse in (("plan", "off"), ("plan_with_rows_in_host_memory", BUFFERS)):
        with engine(folder, "cpu", PLANNED, hisparse=hisparse, graph="off", kv_cache_memory=1 << 30) as one:
            backend = one.worker.runner.attn_backend
            found[name] = least_microseconds(partial(backend.plan, staged))
            if (swaps := one.hisparse) is not None:
                found["swap_in_plan"] = least_microseconds(partial(swaps.plan, staged))
                found["count"] = least_microseconds(partial(swaps.count, host))
    found["ratio"] = round((found["plan_with_rows_in_host_memory"] + found["count"]) / found["plan"], 2)
    return found


def memory(copies: Copies, buffer_rows: int) -> dict[str, float]:
    """Return device bytes per request for a context of SMALLER times the buffers, by the given
    geometry: all entries resident, the buffers, the buffers with their tables (`slot_bytes`), and
    the staging memory that all requests share."""
    kept = KeptRows(copies.row_bytes, torch.uint8, Place.HOST_PAGES)
    layers, pages = range(copies.layers), SMALLER * buffer_rows // 64
    shape = SwapShape(dict.fromkeys(layers, "latent"), tuple(layers), kept, copies.rows, buffer_rows, 64, pages, 2)
    resident = copies.layers * shape.entries * copies.row_bytes
    return {
        "tokens": shape.entries,
        "resident_bytes": resident,
        "buffer_bytes": copies.layers * buffer_rows * copies.row_bytes,
        "slot_bytes": shape.slot_bytes,
        "staging_bytes_of_all": shape.room_bytes,
    }


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="musa", help="a kind of simulated device")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--step", type=float, default=25.0, help="milliseconds of a step with all rows on the device")
    parser.add_argument("--bus", type=float, default=50.0, help="gigabytes a second from the host")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--row-bytes", type=int, default=656)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--stretch", type=float, default=60.0)
    parser.add_argument("--json")
    asked = parser.parse_args()
    copies = Copies(asked.rows, asked.row_bytes, asked.layers, asked.bus, asked.step, asked.stretch, asked.times)
    # Before any import of Triton, because it selects Triton's interpreter.
    sim, rows = sglcore_sim.install(asked.device), []
    with tempfile.TemporaryDirectory() as name:
        folders = {own: write_model(Path(name) / str(own), own) for own in OWN}
        host = host_times(folders[OWN[0]])
        print(host, flush=True)
        for own, folder in folders.items():
            given = folder, asked.device, asked.requests
            with engine(*given, attention_backend="latent", graph="full") as one:
                resident = one.decode(sim, copies)
            with engine(*given, attention_backend="latent", graph="full", hisparse=BUFFERS) as one:
                swapping, swaps = one.decode(sim, copies), one.hisparse
            assert swaps is not None
            smaller = swaps.shape.entries / swaps.shape.buffer_rows
            rows.append({"own": own, "smaller": smaller} | compare(resident, swapping, copies, asked.stretch))
            print(rows[-1], flush=True)
    if asked.json:
        what = {
            "benchmark": "rows in host memory",
            "device": asked.device,
            "requests": asked.requests,
            "times": asked.times,
        }
        model = {"step_ms": copies.step, "bus_gb_s": copies.bus, "stretch": copies.stretch}
        model |= {"rows": copies.rows, "row_bytes": copies.row_bytes, "layers": copies.layers}
        needed = round(copies.needed(asked.requests), 3)
        found = {"copies": model, "needed": needed, "memory": memory(copies, 2 * copies.rows), "host_us": host}
        write_results(asked.json, {**what, "machine": machine(), **found, "rows": rows})


def compare(resident: Decoded, swapping: Decoded, copies: Copies, stretch: float) -> dict[str, float]:
    """Return the hit rate, the relative throughput that the cost model expects, and the measured
    one."""
    row = {
        "hits": swapping.hits,
        "copy_ms": swapping.copy_ms,
        "expected": copies.step / (copies.step + swapping.copy_ms),
        "throughput": resident.step_ms / swapping.step_ms,
        "resident_step_ms": resident.step_ms / stretch,
        "step_ms": swapping.step_ms / stretch,
        "resident_host_ms": resident.host_ms,
        "host_ms": swapping.host_ms,
    }
    return {name: round(value, 3) for name, value in row.items()}


if __name__ == "__main__":
    main()
