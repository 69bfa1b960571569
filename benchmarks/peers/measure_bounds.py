"""Prints this machine's peak speeds as one JSON line: read bandwidth, and matrix product throughput
by element type.

python measure_bounds.py BUILD_FOLDER THREADS
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

MEGABYTES = 1024
PASSES = 12
SHAPES = ((2048, 1024, 3072), (2048, 2048, 2048), (1024, 1024, 1024), (512, 4096, 4096), (2048, 3072, 1024))
"""(rows, inner, columns): the model's sizes at a long prompt, and square ones."""
SECONDS = 0.25


def main(folder: Path, threads: int) -> None:
    """Print `{"bandwidth": bytes/s, "by": text, "peaks": {type: operations/s}}`."""
    torch.set_num_threads(threads)
    bandwidth, by = read_bandwidth(folder, threads)
    peaks = {name: max(rate(make(*shape), shape) for shape in SHAPES) for name, make in PRODUCTS.items()}
    print(json.dumps({"bandwidth": bandwidth, "by": by, "peaks": peaks}))


def read_bandwidth(folder: Path, threads: int) -> tuple[float, str]:
    """Measure with the C program, or with numpy on one thread if there is no compiler. Also returns
    which."""
    source, program = Path(__file__).with_name("bandwidth.c"), folder / "bandwidth"
    flags = ["-O3", "-march=native", "-pthread"]
    try:
        if not program.is_file() or program.stat().st_mtime < source.stat().st_mtime:
            subprocess.run(["cc", *flags, str(source), "-o", str(program)], check=True, capture_output=True)
        command = [str(program), str(threads), str(MEGABYTES), str(PASSES)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout), "C, huge pages"
    except (OSError, subprocess.CalledProcessError):
        return numpy_bandwidth(), "numpy on one thread: there is no working C compiler"


def numpy_bandwidth() -> float:
    """Return bytes per second of a sum over a large array."""
    words = np.ones(MEGABYTES << 17, np.uint64)
    best = min(timed(lambda: int(words.sum())) for _ in range(PASSES))
    return words.nbytes / best


def floats(dtype: torch.dtype) -> Callable[[int, int, int], Callable[[], object]]:
    """Return a function that makes a product of two matrices of this type from a shape."""

    def make(rows: int, inner: int, columns: int) -> Callable[[], object]:
        left, right = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype).t()
        return lambda: left @ right

    return make


def integers(rows: int, inner: int, columns: int) -> Callable[[], object]:
    """Return the product of two int8 matrices with int32 sums."""
    left = torch.randint(-127, 127, (rows, inner), dtype=torch.int8)
    right = torch.randint(-127, 127, (columns, inner), dtype=torch.int8).t()
    return lambda: torch._int_mm(left, right)  # pyright: ignore[reportPrivateImportUsage]


PRODUCTS = {"fp32": floats(torch.float32), "bf16": floats(torch.bfloat16), "int8": integers}


def rate(product: Callable[[], object], shape: tuple[int, int, int]) -> float:
    """Return operations per second, the best of several runs; 0 if torch does not support the
    product."""
    try:
        product()
    except RuntimeError:
        return 0.0
    best, end = timed(product), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        best = min(best, timed(product))
    return 2.0 * shape[0] * shape[1] * shape[2] / best


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
