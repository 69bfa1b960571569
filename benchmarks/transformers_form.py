"""One model by its file here, by transformers' class on the engine, and by plain transformers `generate`, in one run.

    python -m benchmarks.transformers_form MODEL [--dtype bfloat16] [--rounds 3] [--out benchmarks/results/NAME.json]

Decode is milliseconds a step at 1 and 8 requests, prefill milliseconds for 384 tokens, start seconds and the most memory above
what was there before, over the weights' bytes. The ways take turns, because a machine's speed drifts; what counts is their ratio.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import machine, write_results
from sglcore.checkpoint.files import checkpoint_files
from sglcore.engine.llm import LLM
from sglcore.sampling.params import SamplingParams

PROMPT, STEPS, PREFILL = [5] * 10, 40, list(range(5, 389))
WAYS = ("native recorded", "transformers recorded", "native eager", "transformers eager", "generate")


def main() -> None:
    """Measure and print; write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    asked = parser.parse_args()
    best: dict[str, dict[str, float]] = defaultdict(dict)
    for _ in range(asked.rounds):
        for way in WAYS:
            for name, value in _measured(way, asked.model, asked.dtype).items():
                best[way][name] = min(value, best[way].get(name, value))
    memory = {way: _peak(way, asked.model, asked.dtype) for way in WAYS[:2]}
    told = {"machine": machine(), "dtype": asked.dtype, "best of": asked.rounds, "ways": best, "peak": memory}
    told["ratios"] = {
        way: {
            name: round(best[f"native {way}"][name] / value, 3) for name, value in best[f"transformers {way}"].items()
        }
        for way in ("recorded", "eager")
    }
    print(json.dumps(told, indent=1))
    if asked.out is not None:
        write_results(asked.out, told)


def _measured(way: str, model: Path, dtype: str) -> dict[str, float]:
    if way == "generate":
        return dict(_by_generate(model, dtype))
    return dict(_by_engine(way, model, dtype))


def _settings(way: str, model: Path, dtype: str) -> Mapping[str, Any]:
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


def _by_engine(way: str, model: Path, dtype: str) -> Iterator[tuple[str, float]]:
    begin = time.perf_counter()
    engine = LLM(**_settings(way, model, dtype))
    yield "start", time.perf_counter() - begin

    def run(prompts: list[list[int]], tokens: int) -> None:
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))

    yield from _timed(run)
    engine.close()


def _by_generate(model: Path, dtype: str) -> Iterator[tuple[str, float]]:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    torch.set_num_threads(2)

    def run(prompts: list[list[int]], tokens: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            loaded.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
            )

    yield from _timed(run)


def _timed(run: Callable[[list[list[int]], int], None]) -> Iterator[tuple[str, float]]:
    for requests in (1, 8):
        prompts = [PROMPT] * requests
        run(prompts, 4)
        yield f"decode {requests}", _best(lambda prompts=prompts: run(prompts, STEPS)) / STEPS * 1e3
    yield "prefill", _best(lambda: run([PREFILL], 1)) * 1e3


def _best(run: Callable[[], None], times: int = 4) -> float:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def _peak(way: str, model: Path, dtype: str) -> float:
    """The most memory of a start above what was there before, over the weights' bytes, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return round(pool.apply(_start_peak, (way, model, dtype)), 3)


def _start_peak(way: str, model: Path, dtype: str) -> float:
    import transformers.models.auto.modeling_auto  # noqa: F401

    settings = {**_settings(way, model, dtype), "kv_cache_memory": 1 << 22, "max_model_len": 256}
    before = _memory("VmRSS")
    LLM(**settings).close()
    weights = sum(file.stat().st_size for file in checkpoint_files(model))
    return (_memory("VmHWM") - before) / weights


def _memory(name: str) -> int:
    """Bytes of this process, by its status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
