"""The pytest plugin: it installs the device before collection, in workers too, fails a test that
swallows a fault, and skips by capability."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglcore_sim import plugin

HEAD = "import pytest, torch, sglcore_sim\nassert sglcore_sim.current() is not None\n"


def run(folder: Path, body: str, *options: str) -> str:
    (folder / "test_it.py").write_text(HEAD + body)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ.pop("PYTEST_XDIST_WORKER", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--rootdir",
        str(folder),
        "-c",
        os.devnull,
        "-rs",
        "-p",
        "no:cacheprovider",
        *options,
        str(folder),
    ]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=100).stdout


def test_the_device_is_there_when_tests_are_collected_with_what_was_asked(sim, tmp_path: Path) -> None:
    body = "def test_it(sim):\n    assert (sim.devices, sim.memory, sim.kind.chip) == (3, 77 << 20, 'MI355X')\n"
    said = run(tmp_path, body, "--sim=hip:gfx950", "--sim-devices=3", "--sim-memory=77m", "-n", "0")
    assert "1 passed" in said and "3 of hip gfx950, 77 MiB each" in said


def test_workers_have_a_device_of_their_own(sim, tmp_path: Path) -> None:
    body = "@pytest.mark.parametrize('i', range(4))\ndef test_it(sim, i):\n    assert torch.ones(2, device=sim.device()).sum().item() == 2\n"
    assert "4 passed" in run(tmp_path, body, "--sim=npu", "-n", "2")


SWALLOWS = """
def race(sim):
    x, side = torch.zeros(4, device=sim.device()), torch.Stream(sim.device())
    try:
        with side:
            x.add_(1)
    except RuntimeError:
        pass

def test_swallows(sim):
    race(sim)

@pytest.mark.sim_faults("race")
def test_means_to(sim):
    race(sim)

def test_is_clean_after_it(sim):
    assert not sim.faults
"""


def test_a_test_that_swallows_a_fault_fails_unless_it_says_so(sim, tmp_path: Path) -> None:
    said = run(tmp_path, SWALLOWS, "--sim=npu", "-n", "0")
    assert "1 failed, 2 passed" in said and "the code swallowed" in said and "[race]" in said


def test_a_skip_names_the_missing_capability(sim, tmp_path: Path) -> None:
    body = "@pytest.mark.sim('graph_update', 'streams')\ndef test_updates():\n    pass\n"
    body += "@pytest.mark.sim('streams')\ndef test_streams():\n    pass\n"
    said = run(tmp_path, body, "--sim=musa", "-n", "0")
    assert "1 passed, 1 skipped" in said and "needs the capability graph_update" in said


def test_a_run_without_a_device_does_not_load_torch() -> None:
    code = (
        "import sys, sglcore_sim.plugin; assert sglcore_sim.plugin.installed() is None and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_memory_is_read_with_units_and_may_be_odd() -> None:
    assert (plugin.size("7"), plugin.size("3k"), plugin.size("2G")) == (7, 3072, 2 << 30)
    with pytest.raises(pytest.UsageError, match="found --sim-memory '2x'"):
        plugin.size("2x")
