"""Run the tests of native kernels in a separate process, with a given library and fewer examples.

    python devices/cpu/tests/native/run_with.py KIND PATH [pytest's arguments]

KIND is `here` for a library of this architecture (one with a sanitizer needs its runtime in
LD_PRELOAD), or `far` for the driver of another architecture under an emulator.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from ci.lanes import ROOT
from ci.run import NO_PLUGINS
from ci.selection import Selection
from devices.cpu.tests.native.far import FarLibrary
from devices.cpu.tests.native.libraries import PLUGIN, PROGRAMS, GivenLibrary, loaded

FOLDER = Path(__file__).parent
OTHERS = ("compile", "pool_stress", "sanitized", "arm")
"""Tests that build their own programs; they are left out."""
EXAMPLES = 4
TAIL = 6000
WORKERS = 2


class Given:
    """A pytest plugin that registers the library and limits the number of examples."""

    def __init__(self, library: GivenLibrary) -> None:
        self._library = library

    def pytest_configure(self, config: pytest.Config) -> None:
        """Register the library before tests are collected."""
        config.pluginmanager.register(self._library, PLUGIN)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Limit hypothesis to `EXAMPLES` examples per test, whatever the test sets."""
        for item in items:
            function = getattr(item, "obj", None)  # foreign: pytest's name for a test's function
            asked = getattr(function, "_hypothesis_internal_use_settings", None)  # foreign: hypothesis has no other way
            if function is not None and asked is not None and asked.max_examples > EXAMPLES:
                function._hypothesis_internal_use_settings = settings(asked, max_examples=EXAMPLES)


def files_to_run(selection: Selection) -> tuple[str, ...]:
    """Return one test file chosen by the run's number; empty, which means all files, if the whole
    group runs."""
    if PROGRAMS in selection.whole:
        return ()
    left = [f"test_native_{other}.py" for other in OTHERS]
    files = [str(path) for path in sorted(FOLDER.glob("test_native_*.py")) if path.name not in left]
    return (random.Random(selection.turn).choice(files),)


def child(kind: str, path: Path, *words: str, preload: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run this program in a child process, with its output in `stdout`. Waits for minutes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if preload:
        environment |= {"LD_PRELOAD": " ".join(preload), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, str(Path(__file__)), kind, str(path), *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def main(arguments: Sequence[str]) -> int:
    """Run pytest and return its exit status."""
    kind, path, *words = arguments
    if kind == "far":
        library: GivenLibrary = GivenLibrary(FarLibrary(Path(path)), ("neon",))
    else:
        here = loaded(Path(path))
        library = GivenLibrary(here, here.usable(), (2,))
    ignored = [f"--ignore-glob={FOLDER}/test_native_{other}*.py" for other in OTHERS]
    chosen = words or [str(FOLDER)]
    # File descriptors are not captured, so that a sanitizer's last message before it ends the
    # process is not lost.
    return pytest.main(
        ["--capture=sys", "-n0", "-v", "--tb=short", *NO_PLUGINS.split(), *ignored, *chosen], plugins=[Given(library)]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
