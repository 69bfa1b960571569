"""One model by its file here, by transformers' class on the engine, and by plain transformers `generate`, in one run.

    python -m benchmarks.transformers_form [MODEL] [--dtype bfloat16] [--rounds 3] [--out benchmarks/results/NAME.json]

Without MODEL, a Llama of 100 million random weights. Decode is milliseconds a step at 1 and 8 requests, prefill milliseconds for
384 tokens. The ways take turns, because a machine's speed drifts; what
counts is their ratio. Starts are milliseconds of processor time, which what else runs hardly changes, on one processor: medians of
several, with every library imported and each way started before, and with new memory, which costs a start the more the less the
one before has left to it. Either way is the first one in every second pair, and their ratio
is the median of the pairs'. Peaks are the most memory that a start takes, over the bytes of the weights' files, for models of 400 MiB
that are made here; what the process had before, with every library imported and a small model of the same type started and
closed, is subtracted.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.made_models import make_model
from benchmarks.results import machine, write_results
from sglcore.checkpoint.files import checkpoint_files
from sglcore.engine.llm import LLM
from sglcore.sampling.params import SamplingParams

PROMPT, STEPS, PREFILL, TIMES, STARTS = [5] * 10, 40, list(range(5, 389)), 4, 12
MMAP_THRESHOLD = -3
"""By which `mallopt` of glibc is told from how many bytes on memory is the system's own, and goes back to it."""
GRAPHS = ("recorded", "eager")
WAYS = ("native recorded", "transformers recorded", "native eager", "transformers eager", "generate")
DENSE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_hidden_layers": 16}
SPARSE = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 8, "num_local_experts": 32}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
CHECKPOINTS: Mapping[str, tuple[str, Mapping[str, Any], str, Mapping[str, Any]]] = MappingProxyType(
    {
        "one file": ("llama", DENSE, "50GB", {}),
        "five shards": ("llama", DENSE, "100MB", {}),
        "one file, --quantize int8": ("llama", DENSE, "50GB", {"quantize": "int8"}),
        "experts": ("mixtral", SPARSE, "50GB", {}),
    }
)
"""Type, sizes, largest file, settings."""


def main() -> None:
    """Measure and print; write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        if asked.model is None:
            make_model(Path(folder), "llama", {})
        model = asked.model or Path(folder)
        best = _best_of(asked.rounds, model, asked.dtype)
        starts = _all_starts(model, asked.dtype)
    told = {"machine": machine(), "dtype": asked.dtype, "best of": asked.rounds, "ways": best, "starts": starts}
    told["ratios"] = {
        way: {
            name: round(best[f"native {way}"][name] / value, 3) for name, value in best[f"transformers {way}"].items()
        }
        for way in GRAPHS
    }
    told["peaks"] = dict(_peaks())
    print(json.dumps(told, indent=1))
    if asked.out is not None:
        write_results(asked.out, told)


def _best_of(rounds: int, model: Path, dtype: str) -> dict[str, dict[str, float]]:
    best: dict[str, dict[str, float]] = defaultdict(dict)
    for way in WAYS * rounds:
        for name, value in _measured(way, model, dtype):
            best[way][name] = min(value, best[way].get(name, value))
    return best


def _measured(way: str, model: Path, dtype: str) -> Iterator[tuple[str, float]]:
    """Each figure of one way, with its name."""
    if way == "generate":
        run, close = by_generate(model, dtype), None
    else:
        engine = LLM(**settings_of(way, model, dtype))
        run, close = partial(_generate, engine), engine.close
    for requests in (1, 8):
        prompts = [PROMPT] * requests
        run(prompts, 4)
        yield f"decode {requests}", _best(lambda prompts=prompts: run(prompts, STEPS), TIMES) / STEPS * 1e3
    yield "prefill", _best(lambda: run([PREFILL], 1), TIMES) * 1e3
    if close is not None:
        close()


def _all_starts(model: Path, dtype: str) -> dict[str, dict[str, dict[str, float]]]:
    """Of the model, and of a large one that is made."""
    with TemporaryDirectory() as folder:
        make_model(Path(folder), "llama", DENSE)
        models = {"the model": model, "400 MiB": Path(folder)}
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return {name: pool.apply(_starts, (path, dtype)) for name, path in models.items()}


def _starts(model: Path, dtype: str) -> dict[str, dict[str, float]]:
    """Milliseconds of both ways, and how many times native's the other's are, for each graph; on one processor."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 20)
    told = {}
    for graph in GRAPHS:
        ways = [f"{impl} {graph}" for impl in ("native", "transformers")]
        pairs = [{way: _start(way, model, dtype) for way in ways[:: 1 if each % 2 else -1]} for each in range(STARTS)]
        found = {way.partition(" ")[0]: round(median(pair[way] for pair in pairs[2:]) * 1e3, 1) for way in ways}
        ratio = round(median(pair[ways[1]] / pair[ways[0]] for pair in pairs[2:]), 3)
        told[graph] = {**found, "times native": ratio}
    return told


def _start(way: str, model: Path, dtype: str) -> float:
    gc.collect()
    begin = time.process_time()
    engine = LLM(**settings_of(way, model, dtype))
    taken = time.process_time() - begin
    engine.close()
    return taken


def settings_of(way: str, model: Path, dtype: str) -> Mapping[str, Any]:
    """Of `LLM`, for a way on the engine."""
    impl, _, graph = way.partition(" ")
    return {
        "model": str(model),
        "device": "cpu",
        "model_impl": impl,
        "graph": "auto" if graph == "recorded" else "off",
        "dtype": dtype,
        "max_model_len": 1024,
        "max_requests": 8,
        "prefix_cache": False,
    }


def _generate(engine: LLM, prompts: list[list[int]], tokens: int) -> None:
    engine.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))


def by_generate(model: Path, dtype: str) -> Callable[[list[list[int]], int], None]:
    """Plain `generate`: prompts of one length, and how many tokens each gets."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    torch.set_num_threads(len(os.sched_getaffinity(0)))

    def run(prompts: list[list[int]], tokens: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            loaded.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
            )

    return run


def _best(run: Callable[[], None], times: int) -> float:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def _peaks() -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """For each kind of checkpoint, what `_start_peak` tells of both ways, each in a process of its own."""
    for name, (kind, sizes, shard, settings) in CHECKPOINTS.items():
        with TemporaryDirectory() as folder:
            large, small = Path(folder, "large"), Path(folder, "small")
            make_model(large, kind, sizes, shard)
            make_model(small, kind, SMALL)
            told = {}
            for way in WAYS[:2]:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    told[way] = pool.apply(_start_peak, (way, large, small, settings))
        yield name, told


def _start_peak(way: str, model: Path, small: Path, settings: Mapping[str, Any]) -> dict[str, float]:
    given = {"kv_cache_memory": 1 << 24, "max_model_len": 256, **settings}
    LLM(**{**settings_of(way, small, "bfloat16"), **given}).close()
    before = _memory("VmRSS")
    LLM(**{**settings_of(way, model, "bfloat16"), **given}).close()
    peak, weights = _memory("VmHWM"), sum(file.stat().st_size for file in checkpoint_files(model))
    return {
        "over the weights": round((peak - before) / weights, 3),
        "weights MiB": weights >> 20,
        "peak MiB": peak >> 20,
        "subtracted MiB": before >> 20,
    }


def _memory(name: str) -> int:
    """Bytes of this process, by its status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
