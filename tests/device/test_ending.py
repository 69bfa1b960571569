"""Our processes end as usual, except that they skip the final garbage collection."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sglcore
from sglcore.engine.process_end import drop_output

ROOT = Path(sglcore.__file__).parent
ENDS = """
import atexit, sys, threading, time
from sglcore.engine.process_end import leave

class Ring:
    def __init__(self): self.ring = self
    def __del__(self): sys.stderr.write("searched")

rings = [Ring() for _ in range(3)]
atexit.register(print, "exit functions")
threading.Thread(target=lambda: (time.sleep(0.05), print("threads", end=" "))).start()
print("buffered", end=" ")
leave(3)
"""
LOADS_NOTHING = ("conformance/no_device.py",)
"""A process that ends after it prints, before any library is loaded."""


@pytest.mark.parametrize(
    ("script", "searched"), [(ENDS, ""), (ENDS.replace("leave(3)", "sys.exit(3)"), "searched" * 3)]
)
def test_a_process_ends_with_all_it_has_to_say_and_without_a_search_for_garbage(script: str, searched: str) -> None:
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (3, "buffered threads exit functions\n")
    assert found.stderr == searched


def test_every_process_of_ours_ends_so() -> None:
    others: list[str] = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                body = [ast.unparse(each) for each in node.body]
                if body not in (["leave(main())"], ["command()"]):
                    others.append(path.relative_to(ROOT).as_posix())
    assert tuple(others) == LOADS_NOTHING
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"sglcore": "sglcore.cli.__main__:command"}


def test_output_that_nobody_reads_is_dropped_and_errors_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        print("buffered")
        drop_output()
        print("later", flush=True)
        print("an error", file=sys.stderr)
    assert (tmp_path / "out").read_text() == "" and (tmp_path / "err").read_text() == "an error\n"
