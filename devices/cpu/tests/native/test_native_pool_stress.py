"""The thread pool under sanitizers: they find no race."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sglcore_cpu.compile import SOURCES

STRESS = Path(__file__).with_name("stress.cpp")


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_a_sanitizer_sees_no_race(tmp_path: Path, sanitizer: str) -> None:
    found = stressed(tmp_path, sanitizer)
    assert (found.returncode, found.stderr) == (0, "")


def test_the_thread_sanitizer_sees_a_planted_race(tmp_path: Path) -> None:
    found = stressed(tmp_path, "thread", "-DPLANTED_RACE")
    assert found.returncode != 0 and "data race" in found.stderr


def stressed(folder: Path, sanitizer: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Build `stress.cpp` and the pool with a sanitizer, and run it."""
    program = folder / "stress"
    sources = (STRESS, SOURCES / "pool.cpp")
    command = ("c++", "-std=c++17", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", f"-I{SOURCES}", *flags)
    subprocess.run([*command, *map(str, sources), "-o", str(program)], check=True)
    return subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=300)
