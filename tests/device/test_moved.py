"""Modules that moved can be imported by the names that they had when the contract's number was
frozen, and nothing of ours does."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.device.moved import OLDER, moved_modules

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(moved_modules())


def test_each_file_names_one_module() -> None:
    assert len(NAMES) == len(list(OLDER.glob("[!_]*.py"))) > 0


@pytest.mark.parametrize("older", NAMES)
def test_the_older_name_gives_the_same_objects(older: str) -> None:
    before, now = import_module(older), import_module(moved_modules()[older])
    names = [name for name in vars(now) if not name.startswith("_")]
    assert names and [name for name in names if getattr(before, name, None) is not getattr(now, name)] == []


def test_an_error_raised_under_the_older_name_is_caught_under_the_new_one() -> None:
    program = (
        "from sglcore.device.errors import DeviceError\n"
        "from sglcore.core.errors import DeviceError as Now\n"
        "try: raise DeviceError('lost')\n"
        "except Now as error: print(type(error).__module__)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "sglcore.core.errors\n"


def test_nothing_of_ours_uses_an_older_name() -> None:
    older = re.compile(rf"\b({'|'.join(map(re.escape, NAMES))})\b")
    files = [
        file
        for folder in ("sglcore", "devices", "simulator", "benchmarks", "tools")
        for kind in ("*.py", "*.in")
        for file in (ROOT / folder).rglob(kind)
    ]
    assert len(files) > 500
    assert [str(file) for file in files if older.search(file.read_text(encoding="utf-8"))] == []
