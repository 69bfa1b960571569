"""The job that joins the records of all lanes, run as GitHub would run it, fails if a test ran on
no lane."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ci.lanes import ROOT
from tests.ci.github import Context, Machine, jobs

RECORD = {"lane": "cpu", "at": 1, "tests": {"tests/test_a.py::test_a": {"outcome": "passed"}}, "left_out": {}}
RECORDS = {"record-cpu/cpu.json": RECORD, "record-mlx/mlx.json": {**RECORD, "lane": "mlx"}}
NEVER = {"tests/test_a.py::test_never": ["what nothing has"]}


@pytest.mark.parametrize("left_out", [{}, NEVER])
def test_the_joining_job_is_red_for_a_test_that_ran_on_no_lane(tmp_path: Path, left_out: dict[str, list[str]]) -> None:
    push, text = Context(), (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    job = next(job for job in jobs(text, push) if job.name == "table")
    machine = Machine(tmp_path / "work", tmp_path / "artifacts", ROOT)
    shutil.copytree(ROOT / "ci", machine.folder / "ci", ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.name not in ("ci", "build", ".git"):
            (machine.folder / path.name).symlink_to(path)
    for name, record in RECORDS.items():
        (machine.artifacts / name).parent.mkdir(parents=True)
        (machine.artifacts / name).write_text(json.dumps({**record, "left_out": left_out}))
    steps = tuple(step for step in job.steps if step.uses.endswith("-artifact") or step.name == "join")
    status = machine.execute(replace(job, steps=steps), push)
    assert (status != 0) == bool(left_out), machine.said
    assert ("tests/test_a.py::test_never" in "".join(machine.said)) == bool(left_out)
    assert (machine.artifacts / "table" / "table.md").is_file()
