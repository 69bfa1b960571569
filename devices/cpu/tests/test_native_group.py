"""Test files that run every instruction set belong to a group. A processor with few instruction
sets tests the others only when the whole group runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ci.groups import groups
from ci.lanes import ROOT
from devices.cpu.tests.native.libraries import KERNELS

NATIVE = Path(__file__).parent / "native"
GROUP = next(group for group in groups() if group.name == KERNELS)
TESTS = [path for path in sorted(NATIVE.glob("test_*.py")) if "engine: Engine" in path.read_text()]


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_a_file_that_takes_an_engine_is_of_the_group(path: Path) -> None:
    assert GROUP.has(f"{path.relative_to(ROOT).as_posix()}::test_any")


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_what_it_tests_is_among_the_groups_sources(path: Path) -> None:
    covered = {file.relative_to(ROOT).as_posix() for file in GROUP.files()}
    used = re.findall(r"^from (sglcore_cpu[\w.]*) import", path.read_text(), re.MULTILINE)
    files = [f"devices/cpu/{module.replace('.', '/')}" for module in used]
    assert used
    for file in files:
        assert f"{file}.py" in covered or f"{file}/__init__.py" in covered, file
