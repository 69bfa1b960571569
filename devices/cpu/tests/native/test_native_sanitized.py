"""All tests of native kernels under the address and undefined-behaviour sanitizers; planted defects
show that the sanitizers work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ci.selection import Selection
from devices.cpu.tests.native.libraries import prepared
from devices.cpu.tests.native.run_with import TAIL, child, files_to_run
from sglcore_cpu.compile import Variant

NAMES = ("avx2", "avx512_bf16", "amx", "neon")
"""Instruction sets with kernels that differ in their memory accesses."""
DEFECTS = {0: "heap-buffer-overflow", 1: "heap-buffer-overflow", 2: "signed integer overflow"}
CALL = """
import sys
import torch
from pathlib import Path
from ci.selection import Selection
from devices.cpu.tests.native.libraries import loaded
library = loaded(Path(sys.argv[1]))
out = torch.zeros(1, dtype=torch.int32)
library.engine(library.usable()[0], 1).kernel("probe_defect").bind()(out=out.data_ptr(), kind=int(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def sanitized() -> Path:
    """The library, built with the sanitizers."""
    return prepared(Variant(emulate=True, sanitize=True, names=NAMES), "sanitized").library


@pytest.fixture(scope="module")
def preload() -> tuple[str, ...]:
    """The libraries to preload, because Python was not built with the sanitizers."""
    names = ("libasan.so", "libstdc++.so")
    return tuple(subprocess.check_output(("c++", f"-print-file-name={name}"), text=True).strip() for name in names)


def test_no_kernel_touches_what_is_not_its_own(sanitized: Path, preload: tuple[str, ...], selection: Selection) -> None:
    ran = child("here", sanitized, *files_to_run(selection), preload=preload)
    assert ran.returncode == 0, ran.stdout[-TAIL:]
    assert " passed" in ran.stdout


@pytest.mark.parametrize(("kind", "words"), DEFECTS.items())
def test_a_planted_defect_is_found(sanitized: Path, preload: tuple[str, ...], kind: int, words: str) -> None:
    ran = child_with(CALL, sanitized, kind, preload)
    assert ran.returncode != 0 and words in ran.stdout


def test_a_kernel_without_a_defect_passes(sanitized: Path, preload: tuple[str, ...]) -> None:
    ran = child_with(CALL, sanitized, 3, preload)
    assert (ran.returncode, ran.stdout) == (0, "")


def child_with(text: str, library: Path, kind: int, preload: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": ".", "LD_PRELOAD": " ".join(preload), "ASAN_OPTIONS": "detect_leaks=0"}
    command = (sys.executable, "-c", text, str(library), str(kind))
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=300
    )
