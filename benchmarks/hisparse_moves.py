"""What HiSparse moves, as counts: bytes from and to the host for a prompt in chunks, with a buffer
of the prompt and without one, and copies, launches and host time of a decode step.

The engine runs a random DeepSeek-V3.2 or GLM on the processor, where every entry is copied as on a
device with a memory of its own. `floor` is what must cross the link: each entry of a prompt to the
host once, and back once, because attention reads it on the device. `again` is the ratio of loaded
bytes to the floor. Launches are calls of kernel-table entries by HiSparse, counted in one decode
step; host microseconds are the least CPU time of its plan and of its counts.

    python benchmarks/hisparse_moves.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from made_models import make_model
from results import machine, write_results

from sglcore.config.engine_config import resolve_config
from sglcore.engine.metered_worker import Meter
from sglcore.engine.start import start
from sglcore.runtime.hisparse.hisparse_coordinator import HiSparseCoordinator
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.step_loop import Loop

TOP_K, PAGE, VOCAB, CHUNK, LENGTHS, REPEATS = 16, 16, 400, 64, (496, 992, 1984), 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
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
    "index_n_heads": 4,
}


class Engine:
    """An engine on the processor with its KV entries in host memory."""

    def __init__(self, folder: Path, prompt_buffer: int) -> None:
        hisparse = {"device_buffer_size": 2 * TOP_K, "host_to_device_ratio": 64, "prompt_buffer_size": prompt_buffer}
        given = {"model": str(folder), "device": "cpu", "dtype": "float32", "prefix_cache": False, "page_size": PAGE}
        given |= {"max_model_len": max(LENGTHS) + PAGE, "max_requests": 4, "max_batch_tokens": CHUNK, "graph": "off"}
        config = resolve_config({**given, "hisparse": json.dumps(hisparse), "attention_backend": "latent"})
        worker = start(config).worker
        assert isinstance(worker, TpModelWorker)
        self.worker, self.meter = worker, Meter(worker)
        self.loop = Loop(Scheduler(worker.limits, prefix_cache=False), self.meter)
        found = worker.runner.attn_backend.hisparse
        assert isinstance(found, HiSparseCoordinator)
        self.hisparse = found

    def run(self, length: int, tokens: int) -> None:
        """Run a prompt of `length` random tokens to its end."""
        prompt = np.random.default_rng(length).integers(3, VOCAB, length, dtype=np.int32)
        self.loop.scheduler.add(Request(str(length), prompt, SamplingParams(max_tokens=tokens, ignore_eos=True)))
        while self.loop.has_work:
            self.loop.step()


def prompt_row(folder: Path, length: int) -> dict[str, float]:
    """Return the bytes of a prompt, by itself in an engine, before and after."""
    row: dict[str, float] = {"length": length, "chunks": -(-length // CHUNK)}
    for name, held in (("without_buffer", 0), ("with_buffer", max(LENGTHS))):
        engine = Engine(folder, held)
        engine.run(length, 1)
        shape, swaps = engine.hisparse.shape, engine.meter.swaps
        row["floor"] = length * len(shape.names) * shape.kept.row.nbytes
        row[f"{name}_stored"], row[f"{name}_loaded"] = swaps.stored, swaps.loaded
        row[f"{name}_again"] = round(swaps.loaded / row["floor"], 2)
        engine.worker.close()
    return row


def least_microseconds(run: Callable[[], object]) -> float:
    """Return the least CPU microseconds of REPEATS calls."""
    taken = []
    for _ in range(REPEATS):
        begin = time.process_time_ns()
        run()
        taken.append(time.process_time_ns() - begin)
    return round(min(taken) / 1e3, 1)


@torch.inference_mode()
def decode_row(folder: Path) -> dict[str, float]:
    """Return what a decode step of one request does."""
    engine, calls = Engine(folder, max(LENGTHS)), {"swap_in": 0, "copy_rows": 0}
    engine.run(496, 1)
    hisparse, before, steps = engine.hisparse, engine.meter.swaps, 32
    caches: Any = hisparse.caches
    kernels, copy = caches._kernels, hisparse._loads._copy

    def counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            calls[name] += 1
            return run(*given)

        return called

    caches._kernels = kernels.replace(swap_in=counted("swap_in", kernels.swap_in))
    hisparse._loads._copy = counted("copy_rows", copy)
    engine.run(480, steps + 1)
    swaps, shape = engine.meter.swaps, hisparse.shape
    found: dict[str, float] = {name: round(count / steps, 2) for name, count in calls.items()}
    found["hit_rate"] = round((swaps.hits - before.hits) / (swaps.rows - before.rows), 3)
    found["stored_bytes_of_a_token"] = len(shape.names) * shape.kept.row.nbytes
    found["plan_us"] = least_microseconds(lambda: hisparse.capture_plan(1))
    found["layers"], found["indexers"] = len(shape.names), len(shape.indexers)
    engine.worker.close()
    return found


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, "deepseek_v32", SIZES)
        rows = [prompt_row(folder, length) for length in LENGTHS]
        decode = decode_row(folder)
    for row in (*rows, decode):
        print(row, flush=True)
    if asked.json:
        what = {"benchmark": "bytes of rows in host memory", "chunk": CHUNK, "page": PAGE, "machine": machine()}
        write_results(asked.json, {**what, "prompts": rows, "decode": decode})


if __name__ == "__main__":
    main()
