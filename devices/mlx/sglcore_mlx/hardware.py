"""The device that this build of MLX uses: Apple's GPU, another GPU, or the CPU."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import version

import mlx.core as mx

from sglcore.core.ledger import Row
from sglcore_mlx.layers.linear import LinearParts

PROCESSOR_STREAMS = 2
"""On the CPU, linear layers and attention are split over at most this number of streams; each is a
thread."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """`kind`: "metal", "gpu" (another GPU) or "cpu". `streams`: those that share the work on the
    CPU (empty: one stream does all). `compiles`: whether decode steps are compiled by default;
    `compile_reason`: why. `rows`: for the ledger."""

    kind: str
    streams: tuple[mx.Stream, ...]
    compiles: bool
    compile_reason: str
    rows: tuple[Row, ...]

    @property
    def has_metal(self) -> bool:
        """Whether it is Apple's GPU."""
        return self.kind == "metal"

    @property
    def parts(self) -> LinearParts:
        """The fastest products and rotations."""
        return LinearParts.of_processor(self.streams) if self.kind == "cpu" else LinearParts(self.streams)


def open_hardware(threads: int | None, sharing: int = 1) -> Hardware:
    """Ask MLX which device it uses and return it; on the CPU, make its streams. Must run on the
    stream thread. `threads`: the requested number of threads on a CPU; None: automatic. On a GPU it
    is ignored, with a ledger row. `sharing`: processes of this start that share the machine's
    cores."""
    kind = mx.default_device().type.name
    if kind == "gpu" and mx.metal.is_available():
        kind = "metal"
    name = str(mx.device_info().get("device_name", platform.machine()))
    row = Row(
        "compute", "auto", f"{kind}: {name}", f"the default device of MLX {version('mlx')} here", "another build of MLX"
    )
    if kind != "cpu":
        rows = (row,) if threads is None else (row, _unused_threads(threads))
        return Hardware(kind, (), True, "one graph for each size of a decode step", rows)
    cores = len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count() or 1
    cores = max(cores // sharing, 1)
    used = min(threads or cores, PROCESSOR_STREAMS)
    asked = str(threads) if threads else "auto"
    reason = f"{cores} cores; at most {PROCESSOR_STREAMS} streams share the work"
    rows = (row, Row("threads", asked, str(used), reason, "--threads", downgrade=used < (threads or 0)))
    streams = tuple(mx.new_stream(mx.cpu) for _ in range(used)) if used > 1 else ()
    return Hardware(kind, streams, *_can_compile(), rows)


def _unused_threads(asked: int) -> Row:
    reason = "a GPU computes, fed by one thread"
    return Row("threads", str(asked), "1", reason, "leave --threads out", downgrade=asked > 1)


def _can_compile() -> tuple[bool, str]:
    """Return whether steps can be compiled on the CPU, and the reason: MLX compiles graphs as C++
    with g++ when they first run."""
    compiler = shutil.which("g++")
    if compiler is None:
        return False, "there is no g++, which MLX needs to compile for a processor"
    return True, "one graph for each size of a decode step"
