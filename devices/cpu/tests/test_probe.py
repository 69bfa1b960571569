"""The probe describes the processor from /proc/cpuinfo, on x86, on Arm, and without the file."""

from __future__ import annotations

import platform
from pathlib import Path

from sglcore.device.system import System
from sglcore_cpu import package
from sglcore_cpu.probe import probe, processor, usable_cores

X86 = """processor\t: 0
model name\t: Planted x86
flags\t\t: fpu avx2 avx512f amx_bf16

processor\t: 1
model name\t: Planted x86
flags\t\t: fpu avx2 avx512f amx_bf16
"""
ARM = """processor\t: 0
Features\t: fp asimd bf16 i8mm

Hardware\t: Planted
Model\t\t: Planted Arm board
"""


def test_x86_is_read(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(X86)
    assert processor(tmp_path / "cpuinfo") == ("Planted x86", ("avx2", "avx512f", "amx_bf16"))


def test_arm_is_read_with_the_model_that_stands_after_the_cores(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(ARM)
    assert processor(tmp_path / "cpuinfo") == ("Planted Arm board", ("asimd", "bf16", "i8mm"))


def test_without_cpuinfo_the_machine_is_named(tmp_path: Path) -> None:
    model, features = processor(tmp_path / "nothing")
    assert features == ()
    assert model if platform.system() == "Darwin" else model == f"{platform.machine()} processor"


def test_this_processor_is_present_whether_it_is_named_or_not() -> None:
    assert package.is_host
    assert probe(True, System()) == probe(False, System())
    assert probe(False, System()).present
    assert usable_cores() >= 1
