"""Jobs of the workflow, run here as GitHub would run them, from a fresh clone to the record. Each
takes minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ci.lanes import ROOT
from tests.ci.github import Context, Machine, jobs

TESTS = {"cpu": "tests/ci/test_lanes.py", "hip-sim": "devices/hip/tests/test_kernels.py"}
"""One lane of each kind that runs on any machine, the host's and a simulated one, with a small file
of its tests."""


@pytest.mark.needs("jobs", "registry")
@pytest.mark.parametrize("lane", TESTS)
def test_a_job_runs_from_a_fresh_clone_to_its_record(tmp_path: Path, lane: str) -> None:
    by_hand = Context("workflow_dispatch", {"lane": lane, "tests": TESTS[lane]})
    found = jobs((ROOT / ".github" / "workflows" / "ci.yml").read_text(), by_hand)
    job = next(job for job in found if job.runs(by_hand))
    machine = Machine(tmp_path / "work", tmp_path / "artifacts", ROOT, kept=("build/native/objects",))
    status = machine.execute(job, by_hand)
    assert status == 0, "\n".join(machine.said)
    record = json.loads((machine.artifacts / f"record-{lane}" / f"{lane}.json").read_text())
    assert record["lane"] == lane
    assert {test.partition("::")[0] for test in record["tests"]} == {TESTS[lane]}
    assert {known["outcome"] for known in record["tests"].values()} == {"passed"}
