"""How decode and prefill slow each other down on one device, by how they share its compute units
(SMs).

Decode steps are consecutive replays of one graph with the matrix products and norms of eight layers
of Qwen3-8B; prefill runs the same layers over many rows, without end. Ways to share: *priority*:
both on all units, decode first; *apart*: each on its own units, with the graph captured on these;
*kept*: prefill keeps to a part of the units and decode has priority on all, which is what slices
with `--prompt-lane partition` do. For NVIDIA GPUs, with cuda-bindings.

    python benchmarks/unit_shares.py [--rows 32] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from results import machine, write_results
from torch import Tensor

LAYERS = 8
SIZES = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))
"""Inputs and outputs of a layer's products: q, k and v; output; gate and up; down."""
SECONDS = 0.6
"""Seconds of each measurement."""
AHEAD = 2
"""How many decode steps, and prefill passes, are queued at a time."""


class Load:
    """Weights of LAYERS layers, and functions that run them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        options: Any = {"device": device, "dtype": torch.bfloat16}
        self.weights = [[torch.randn(size, **options) * 0.01 for size in SIZES] for _ in range(LAYERS)]

    def rows(self, count: int) -> list[Tensor]:
        """Return inputs with `count` rows for each product of a layer."""
        return [torch.randn(count, size[0], device=self.device, dtype=torch.bfloat16) for size in SIZES]

    def run(self, rows: list[Tensor]) -> None:
        """Run all layers."""
        for weights in self.weights:
            for given, weight in zip(rows, weights, strict=True):
                made = given @ weight
                torch.nn.functional.rms_norm(made, made.shape[-1:])

    def captured(self, stream: torch.Stream, rows: list[Tensor]) -> Callable[[], None]:
        """Capture a graph of all layers on a stream; returns its replay."""
        with stream:
            self.run(rows)
        torch.accelerator.synchronize()
        graph = torch.cuda.CUDAGraph()
        with stream:
            graph.capture_begin(capture_error_mode="thread_local")
            self.run(rows)
            graph.capture_end()
        torch.accelerator.synchronize()
        return graph.replay


def play(
    load: Load, decode: tuple[torch.Stream, Callable[[], None]] | None, prompt: tuple[torch.Stream, int] | None
) -> dict[str, float]:
    """Run decode, prefill or both for SECONDS. Returns quantiles of the milliseconds between the
    ends of two decode steps, and prefill layers per second."""
    rows = [] if prompt is None else load.rows(prompt[1])
    if prompt is not None:
        with prompt[0]:
            load.run(rows)
    torch.accelerator.synchronize()
    ends, times, passes, layers = deque[torch.Event](), list[float](), deque[torch.Event](), 0
    last, begin = None, time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        if decode is not None and len(ends) < AHEAD:
            with decode[0]:
                decode[1]()
                ends.append(_now(load.device))
        if prompt is not None and len(passes) < AHEAD:
            with prompt[0]:
                load.run(rows)
                passes.append(_now(load.device))
        while ends and ends[0].query():
            ended = ends.popleft()
            times += [] if last is None else [last.elapsed_time(ended)]
            last = ended
        while passes and passes[0].query():
            passes.popleft()
            layers += LAYERS
        time.sleep(2e-5)
    seconds = time.perf_counter() - begin
    torch.accelerator.synchronize()
    times.sort()
    found = {"decode_p50_ms": times[len(times) // 2], "decode_p99_ms": times[int(0.99 * len(times))]} if times else {}
    return {**found, "prompt_layers_a_second": layers / seconds}


def _now(device: torch.device) -> torch.Event:
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def split(driver: Any, units: int) -> tuple[torch.Stream, torch.Stream]:
    """Return a high-priority stream on `units` units, and a stream on all others. Their contexts
    live as long as the process."""

    def done(answer: tuple[Any, ...]) -> Any:
        assert not int(answer[0]), answer[0]
        return answer[1] if len(answer) == 2 else answer[1:]

    device = done(driver.cuDeviceGet(0))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = done(driver.cuDeviceGetDevResource(device, kind))
    (part, *_), _, rest = done(driver.cuDevSmResourceSplitByCount(1, whole, 0, units))

    def stream(units: Any, priority: int) -> torch.Stream:
        description = done(driver.cuDevResourceGenerateDesc([units], 1))
        default = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = done(driver.cuGreenCtxCreate(description, device, default))
        options = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        return torch.cuda.ExternalStream(int(done(driver.cuGreenCtxStreamCreate(context, options, priority))))

    return stream(part, -1), stream(rest, 0)


def measure(rows: int) -> dict[str, dict[str, float]]:
    """Measure every way to share, with prompts of several lengths."""
    driver = import_module("cuda.bindings.driver")
    load, found = Load(torch.device("cuda:0")), dict[str, dict[str, float]]()
    given, first, whole = load.rows(rows), torch.Stream("cuda:0", priority=-1), torch.Stream("cuda:0")
    step = (first, load.captured(first, given))
    play(load, step, None)
    found["decode alone"] = play(load, step, None)
    parts = {units: split(driver, units) for units in (16, 32, 48, 64, 96)}
    apart = {units: (stream, load.captured(stream, given)) for units, (stream, _) in parts.items()}
    for units in parts:
        found[f"decode alone on {units}"] = play(load, apart[units], None)
    for tokens in (256, 1024, 4096):
        found[f"{tokens}: prompt alone"] = play(load, None, (whole, tokens))
        found[f"{tokens}: priority"] = play(load, step, (whole, tokens))
        for units, (_, rest) in parts.items():
            found[f"{tokens}: {units} apart"] = play(load, apart[units], (rest, tokens))
            found[f"{tokens}: {units} kept"] = play(load, step, (rest, tokens))
    return found


def main() -> None:
    """Measure, print a row for each share, write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--json")
    chosen = parser.parse_args()
    found = measure(chosen.rows)
    for name, row in found.items():
        print(f"{name:>24}: " + "  ".join(f"{key} {value:9.3f}" for key, value in row.items()), flush=True)
    if chosen.json:
        hardware = {
            "hardware": torch.cuda.get_device_name(),
            "units": torch.cuda.get_device_properties(0).multi_processor_count,
        }
        write_results(
            chosen.json, {"machine": machine(), **hardware, "rows": chosen.rows, "seconds": SECONDS, "shares": found}
        )


if __name__ == "__main__":
    main()
