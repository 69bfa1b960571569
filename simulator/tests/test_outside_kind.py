"""A kind from another distribution works without edits in this package: its entry point, face,
library, capability and machine; on its own device type, and on a type of torch that no other kind
here uses."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from sglcore_sim import kinds

PACKAGE = {
    "sglcore_roadrunner/__init__.py": "",
    "sglcore_roadrunner/simulated.py": """
import sys
import torch
from types import ModuleType
from sglcore_sim.faces import generic
from sglcore_sim.kinds import Kind

def chip(name, lanes):
    return Kind("roadrunner", "TYPE", f"rr{lanes}", {"lanes": lanes}, "sglcore_roadrunner.simulated:face",
        ("sglcore_roadrunner.simulated:library",), frozenset({"beeps"}), "rrccl", {"dev/rr{i}": ""}, name)

KINDS = (chip("Small", 4), chip("Big", 64))

def library(sim):
    sys.modules["rrlib"] = ModuleType("rrlib")

def face(sim):
    assert "rrlib" in sys.modules
    generic.plant(sim)
    torch.TYPE.lanes = sim.kind.properties["lanes"]
""",
    "roadrunner-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: roadrunner\nVersion: 1\n",
    "roadrunner-1.dist-info/entry_points.txt": "[sglcore_sim.kinds]\nroadrunner = sglcore_roadrunner.simulated:KINDS\n",
    "test_it.py": """
import os, pathlib
import pytest, rrlib, torch
import torch.distributed as dist

@pytest.mark.sim("beeps")
def test_it(sim):
    x = torch.ones(3, device="TYPE:1")
    assert (x + 1).tolist() == [2.0] * 3 and torch.TYPE.lanes == 64
    assert pathlib.Path(os.environ["SGLCORE_SYSTEM_ROOT"], "dev/rr1").exists()
    assert dist.Backend.default_device_backend_map["TYPE"] == "rrccl"
    x.add_(1)
    with sim.expect("race"), torch.Stream("TYPE:1"):
        x.add_(1)

@pytest.mark.sim("neutral_graph")
def test_what_the_kind_does_not_offer():
    raise AssertionError
""",
}


def installed(folder: Path, device_type: str = "roadrunner") -> Path:
    """Write the files of the installed distribution, and a test that uses it, to `folder`."""
    for name, text in PACKAGE.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text.replace("TYPE", device_type))
    return folder


@pytest.mark.parametrize("device_type", ["roadrunner", "hpu"])
def test_pytest_finds_a_kind_that_this_package_has_never_heard_of(sim, tmp_path: Path, device_type: str) -> None:
    folder = installed(tmp_path, device_type)
    options = ("-p", "no:cacheprovider", "-rs", "-n", "0", "-c", os.devnull, "--rootdir", str(folder))
    environ = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, "--sim=roadrunner:big", str(folder / "test_it.py")]
    said = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300).stdout
    assert "1 passed, 1 skipped" in said and "needs the capability neutral_graph" in said, said
    assert "2 of roadrunner rr64" in said


def test_names_are_found_by_chip_and_two_kinds_of_one_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed(tmp_path)))
    assert kinds.kind_of("roadrunner").arch == "rr4" and kinds.kind_of("roadrunner:rr64").chip == "Big"
    with pytest.raises(ValueError, match="roadrunner"):
        kinds.kind_of("coyote")
    double = EntryPoint("cuda", "sglcore_roadrunner.simulated:KINDS", kinds.GROUP)
    monkeypatch.setattr(kinds, "entry_points", lambda group: (double,))
    with pytest.raises(ValueError, match=r"found two simulated kinds 'cuda', .*roadrunner.*; remove one"):
        kinds.known()


def test_a_device_type_of_torch_without_hooks_here_is_refused_with_what_there_is(sim) -> None:
    command = "import sglcore_sim; from sglcore_sim.kinds import Kind; sglcore_sim.install(Kind('x', 'mtia'))"
    said = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False, timeout=300)
    assert said.returncode and "found torch's own device type mtia, wanted cuda, hpu, xpu" in said.stderr
