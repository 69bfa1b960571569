"""Resource usage of each Triton kernel on each GPU architecture, without the GPU: compiles ahead of
time and reads registers, shared memory and spills.

`python tools/kernel_budgets.py` compares with the stored budgets and prints differences; `--write`
stores the current figures. Two processes share the targets; Triton's cache makes a second run fast.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = ROOT / "tests/kernels/budgets.json"
RECORD = "python tools/kernel_budgets.py --write"
PROCESSES = 2

Figures = dict[str, dict[str, dict[str, int]]]
"""Figures by kernel, then target, then name."""

LIMITS: Mapping[str, tuple[str, int | str, int, int]] = MappingProxyType(
    {
        "cuda:80": ("cuda", 80, 32, 166_912),
        "cuda:90": ("cuda", 90, 32, 232_448),
        "cuda:100": ("cuda", 100, 32, 232_448),
        "hip:gfx942": ("hip", "gfx942", 64, 65_536),
        "hip:gfx950": ("hip", "gfx950", 64, 163_840),
    }
)
"""By target: backend, architecture, threads per warp, and maximum bytes of shared memory per
program."""

OPTIONS: Mapping[str, Mapping[str, int]] = MappingProxyType({"cuda": {"maxnreg": 96}, "hip": {"waves_per_eu": 4}})
"""Launch options of one backend, which must reach its compiler: each limits registers per
thread."""

FLOATS: Mapping[str, str] = MappingProxyType({"hip:gfx942": "e4m3fnuz", "hip:gfx950": "e4m3fn"})
"""By target, the 8-bit float format that kernels convert with an instruction, as in the device
package."""


def differences(stored: Figures, found: Figures, targets: tuple[str, ...] = tuple(LIMITS)) -> list[str]:
    """Return one line for every figure that differs from the stored one: regressions, improvements,
    and new or removed kernels."""
    lines: list[str] = []
    for kernel in sorted(stored.keys() | found.keys()):
        for target in targets:
            before = stored.get(kernel, {}).get(target)
            now = found.get(kernel, {}).get(target)
            if before is None or now is None:
                what = "is new" if before is None else "is no longer compiled"
                lines.append(f"{kernel} on {target} {what}; {RECORD}")
                continue
            for figure in sorted(before.keys() | now.keys()):
                lines += _difference(f"{kernel} on {target}: {figure}", before.get(figure, 0), now.get(figure, 0))
    return lines


def absent(stored: Figures, found: Figures, target: str, cases: tuple[str, ...]) -> list[str]:
    """Return one line for every stored figure of these cases that does not occur for the same
    kernel in `found`. Labels are not compared: in a sample, another case may compile a kernel
    first."""
    lines: list[str] = []
    for label, targets in stored.items():
        case, _, kernel = label.partition(": ")
        known = [figures[target] for name, figures in found.items() if _kernel(name) == kernel.split(" ")[0]]
        if case in cases and targets[target] not in known:
            lines.append(f"{label} on {target} is {targets[target]} in the record, and none of {known}")
    return lines


def _kernel(label: str) -> str:
    return label.partition(": ")[2].split(" ")[0]


def _difference(what: str, before: int, now: int) -> list[str]:
    if now > before:
        return [f"regression: {what} rose from {before} to {now}"]
    return [f"improvement: {what} fell from {before} to {now}; record it: {RECORD}"] if now < before else []


def measure(targets: tuple[str, ...] = tuple(LIMITS), cases: tuple[str, ...] = ()) -> Figures:
    """Compile all cases, or these, for the targets in child processes, and return the figures.
    Waits. Raises RuntimeError."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Ahead-of-time compilation needs this set; the value is the default of Triton's launches.
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, __file__, *(("--cases", *cases) if cases else ()), "--targets"]
    workers = [
        subprocess.Popen([*command, *targets[start::PROCESSES]], stdout=subprocess.PIPE, env=environment, cwd=ROOT)
        for start in range(min(PROCESSES, len(targets)))
    ]
    found: Figures = {}
    for worker in workers:
        text, _ = worker.communicate()
        if worker.returncode:
            raise RuntimeError(f"compiling by {worker.args[2:]} failed; its own traceback is above")  # pyright: ignore[reportIndexIssue]
        for kernel, figures in json.loads(text).items():
            found.setdefault(kernel, {}).update(figures)
    return found


class NoLauncher:
    """A launcher that does nothing."""

    def __init__(self, *_: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> None: ...


class NoDevice:
    """A Triton driver for a device that does not exist: kernels are compiled for it but never
    launched."""

    launcher_cls = NoLauncher

    def __init__(self, target: str) -> None:
        from triton.backends.compiler import GPUTarget

        backend, arch, lanes, self._shared = LIMITS[target]
        self._target, self._index = GPUTarget(backend, arch, lanes), tuple(LIMITS).index(target)
        self.utils = self

    def get_current_target(self) -> Any:
        """Return the target that kernels are compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """Return a number that is unique per target; Triton caches compiled kernels by it."""
        return self._index

    def get_current_stream(self, _: int) -> int:
        """Return 0: there are no streams."""
        return 0

    def get_device_properties(self, _: int) -> dict[str, int]:
        """Return the maximum shared memory; Triton refuses kernels that need more."""
        return {"max_shared_mem": self._shared}

    def load_binary(self, *_: Any) -> tuple[None, None, int, int, int]:
        """Load nothing."""
        return None, None, 0, 0, 1024

    def unload_module(self, _: Any) -> None:
        """Do nothing."""


def compile_for(target: str, wanted: Sequence[str] = ()) -> Figures:
    """Run all cases, or the wanted ones, with `NoDevice`; returns the figures of each kernel under
    the case that compiled it first."""
    from triton.runtime import driver

    from sglcore.runtime.kernels.triton import Tuning
    from tools.kernel_cases import KERNELS, bounded_cases, cases

    device = NoDevice(target)
    driver.set_active(device)  # pyright: ignore[reportArgumentType]
    seen: set[int] = set()
    found: Figures = {}
    backend, _, lanes, _ = LIMITS[target]
    tuning = Tuning(lanes=lanes, float8=FLOATS.get(target))
    for name, case in (cases(tuning) | bounded_cases(tuning, OPTIONS[backend])).items():
        if wanted and name not in wanted:
            continue
        case()
        for kernel, compiled in _compiled(KERNELS, device.get_current_device()):
            if id(compiled) not in seen:
                seen.add(id(compiled))
                label = f"{name}: {kernel}"
                number = sum(other.startswith(label) for other in found)
                found[label if not number else f"{label} {number + 1}"] = {target: figures_of(compiled)}
    return found


def _compiled(modules: tuple[ModuleType, ...], device: int) -> Iterator[tuple[str, Any]]:
    from triton.runtime.jit import JITFunction

    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and value.module == module.__name__:
                yield from ((name, compiled) for compiled in value.device_caches[device][0].values())


def figures_of(compiled: Any) -> dict[str, int]:
    """Return registers per thread, bytes of shared memory, bytes of stack per thread, and (hip)
    spilled registers."""
    if "cubin" in compiled.asm:
        return _figures_of_cubin(compiled.asm["cubin"]) | {"shared": compiled.metadata.shared}
    names = {"registers": "vgpr_count", "stack": "private_segment_fixed_size", "spills": "vgpr_spill_count"}
    text = compiled.asm["amdgcn"]
    read = {name: re.search(rf"\.{key}:\s+(\d+)", text) for name, key in names.items()}
    return {name: int(match[1]) for name, match in read.items() if match} | {"shared": compiled.metadata.shared}


def _figures_of_cubin(binary: bytes) -> dict[str, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    read = {name: re.search(rf"\b{key}:(\d+)", text) for name, key in (("registers", "REG"), ("stack", "STACK"))}
    return {name: int(match[1]) for name, match in read.items() if match}


def main() -> int:
    """Compare or store the figures; returns 1 with a line for each difference, otherwise 0."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--write", action="store_true", help="record the figures")
    options.add_argument("--targets", nargs="+", default=[], help="compile for these here and print the figures")
    options.add_argument("--cases", nargs="+", default=[], help="with --targets: only these")
    given = options.parse_args()
    if given.targets:
        found: Figures = {}
        for target in given.targets:
            for kernel, figures in compile_for(target, given.cases).items():
                found.setdefault(kernel, {}).update(figures)
        print(json.dumps(found))
        return 0
    found = measure()
    if given.write:
        lines = (f"  {json.dumps(kernel)}: {json.dumps(found[kernel], sort_keys=True)}" for kernel in sorted(found))
        BUDGETS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return 0
    lines = differences(json.loads(BUDGETS.read_text(encoding="utf-8")), found)
    print("\n".join(lines) or "every kernel is within its budget")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
