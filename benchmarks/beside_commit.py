"""Compares an old commit with this tree, in turn within one run: decode, prefill, and host time.

The model is that of `cpu_peers.py`: random weights in the geometry of Qwen3-0.6B, in bfloat16.

    python benchmarks/beside_commit.py [--old COMMIT] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from peers.cases import CASES, Case
from peers.checkpoint import make_checkpoint
from peers.child import Child
from peers.engines import CHECKPOINT
from results import machine, write_results

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = Path("devices/cpu/sglcore_cpu/libsglcore_cpu.so")
NAMES = ("b1", "b8", "b32", "prefill")
CACHE_TOKENS = 8448
START_SECONDS = 300.0

Readings = dict[str, dict[str, list[float]]]
"""By case and tree, one figure per round."""


def extracted(commit: str, folder: Path) -> Path:
    """Extract the tree of a commit and copy this tree's native library into it; the commit's own
    library is not built."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tree:
        tree.extractall(folder, filter="data")
    for file in (ROOT / LIBRARY).parent.glob(f"{LIBRARY.name}*"):
        shutil.copy(file, folder / LIBRARY.parent)
    for declared in folder.glob("devices/*/pyproject.toml"):
        _describe(declared)
    return folder


def _describe(declared: Path) -> None:
    """Write the metadata of an installed device package, so that the commit's own entry points are
    found."""
    project = tomllib.loads(declared.read_text(encoding="utf-8"))["project"]
    made = declared.with_name(f"{project['name'].replace('-', '_')}-{project['version']}.dist-info")
    made.mkdir()
    about = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (made / "METADATA").write_text(about, encoding="utf-8")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (made / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def search_path(tree: Path) -> str:
    """Return a PYTHONPATH on which a tree's packages come before installed ones."""
    devices = sorted(folder.parent for folder in tree.glob("devices/*/pyproject.toml"))
    return os.pathsep.join(str(tree / part) for part in ("", *devices, "benchmarks", "benchmarks/peers"))


def python_of(tree: Path, folder: Path) -> Path:
    """Write an interpreter script that finds the packages of `tree` first; a script, because
    `Child` does not pass PYTHONPATH on."""
    script = folder / f"python-{tree.name}"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{search_path(tree)}" exec "{sys.executable}" "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return script


def measure_steps(trees: Mapping[str, Path], rounds: int, folder: Path, found: Readings) -> None:
    """Measure tokens per second of each case, on the trees in turn; the other tree's process is
    stopped meanwhile."""
    job = {"model": str(CHECKPOINT), "format": "bf16", "threads": os.cpu_count(), "cache_tokens": CACHE_TOKENS}
    children = {
        name: Child(python_of(tree, folder), "sglcore", job, folder / f"{name}.log") for name, tree in trees.items()
    }
    try:
        for child in children.values():
            child.wait_ready(START_SECONDS)
        cases = [case for case in CASES if case.name in NAMES]
        for number in range(rounds):
            for place, case in enumerate(cases):
                for name in sorted(children, reverse=bool(number % 2)):
                    _add(found, case, name, children[name].ask(case.question(1000 * number + place), case.timeout))
    finally:
        for child in children.values():
            child.close()


def _add(found: Readings, case: Case, name: str, answer: Mapping[str, float]) -> None:
    value = case.value(int(answer["tokens"]), answer["seconds"])
    found.setdefault(case.name, {}).setdefault(name, []).append(round(value, 2))
    print(f"{case.name} {name}: {value:.2f} {case.unit}", flush=True)


def measure_host(trees: Mapping[str, Path], rounds: int, folder: Path, found: Readings) -> None:
    """Measure host microseconds of a decode step, by batch size, with each tree's own
    `host_overhead.py`."""
    for number in range(rounds):
        for name, tree in sorted(trees.items(), reverse=bool(number % 2)):
            result = folder / "host.json"
            script = tree / "benchmarks" / "host_overhead.py"
            told = {**os.environ, "PYTHONPATH": search_path(tree), "OMP_NUM_THREADS": "1", "SGLCORE_DEVICE": "cpu"}
            subprocess.run(
                [sys.executable, script, "--json", result], env=told, cwd=tree, check=True, capture_output=True
            )
            for row in json.loads(result.read_text(encoding="utf-8"))["rows"]:
                key = f"host step, batch {row['batch']}, {row['sampling']} (us)"
                found.setdefault(key, {}).setdefault(name, []).append(row["median_us"])


def main() -> None:
    """Measure, print, and with `--json` write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--old", default="2349cd2", help="the commit that this tree is compared with")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    make_checkpoint(CHECKPOINT)
    found: Readings = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trees = {options.old: extracted(options.old, folder / options.old), "this": ROOT}
        measure_host(trees, options.rounds, folder, found)
        measure_steps(trees, options.rounds, folder, found)
    ratios = {}
    for case, readings in found.items():
        each = [new / old for new, old in zip(readings["this"], readings[options.old], strict=True)]
        ratios[case] = {"median": round(median(each), 3), "min": round(min(each), 3), "max": round(max(each), 3)}
        print(f"{case}: this / {options.old} {ratios[case]}")
    if options.json:
        content = {"machine": machine(), "old": options.old, "rounds": options.rounds}
        write_results(options.json, {**content, "readings": found, "ratios": ratios})


if __name__ == "__main__":
    main()
