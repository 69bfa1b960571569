"""A machine read from below a root: files, libraries, modules, torch's build and the PCI bus,
without importing modules or opening devices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sglcore.device.candidate import run_probe
from sglcore.device.package import DevicePackage
from sglcore.device.probe import Fact, ProbeReport
from sglcore.device.system import VARIABLE, System, host_system


def plant(root: Path, **files: str) -> System:
    """Make a root with files at paths, written with `__` for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return System(root)


def test_files_are_seen_by_the_paths_they_have_from_the_root(tmp_path: Path) -> None:
    system = plant(tmp_path, dev__one0="", dev__one1="", dev__two10="", dev__two2="", proc__driver__version="7.1")
    assert system.exists("/dev/one0") and not system.exists("/dev/two0")
    assert system.glob("/dev/one[0-9]*") == ("/dev/one0", "/dev/one1")
    assert system.numbered("/dev/two[0-9]*") == ("/dev/two2", "/dev/two10")
    assert system.read("/proc/driver/version") == "7.1"
    assert system.read("/proc/driver/nothing") is None
    assert not system.is_this_machine and System().is_this_machine


@pytest.mark.parametrize("folder", ["usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/local/lib", "lib"])
def test_a_library_is_found_in_every_usual_folder(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "libdriver.so.1").touch()
    assert System(tmp_path).library("libdriver.so.1") == f"/{folder}/libdriver.so.1"
    assert System(tmp_path).library("libdriver.so.2") is None


def test_a_library_is_found_where_the_loader_the_environment_or_the_caller_says(tmp_path: Path) -> None:
    for folder in ("configured", "variable", "given"):
        (tmp_path / "opt" / folder).mkdir(parents=True)
        (tmp_path / "opt" / folder / f"lib{folder}.so").touch()
    plant(tmp_path, **{"etc__ld.so.conf.d__one.conf": "/opt/configured\n"})
    system = System(tmp_path, {"LD_LIBRARY_PATH": "/nowhere:/opt/variable"})
    assert system.library("libconfigured.so") == "/opt/configured/libconfigured.so"
    assert system.library("libvariable.so") == "/opt/variable/libvariable.so"
    assert system.library("libgiven.so") is None
    assert system.library("libgiven.so", "/opt/given") == "/opt/given/libgiven.so"


def test_a_module_below_the_root_counts_as_installed_and_is_not_imported(tmp_path: Path) -> None:
    system = plant(tmp_path, **{"site-packages__planted_library____init__.py": "raise RuntimeError"})
    (tmp_path / "site-packages" / "planted_library").mkdir(parents=True, exist_ok=True)
    assert system.module("planted_library")
    assert system.module("json") and not system.module("no_such_library")
    assert "planted_library" not in sys.modules
    assert not System().module("planted_library")


def test_a_module_without_a_specification_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "planted_shim", type(sys)("planted_shim"))
    assert System().module("planted_shim")


def test_what_torch_was_built_for_is_read_without_importing_it(tmp_path: Path) -> None:
    build = System().torch_build()
    assert build["version"].startswith("2.") and "debug" not in build
    text = "from typing import Optional\n__version__ = '2.11.0+x1'\nfirst: Optional[str] = '12.8'\nsecond: Optional[str] = None\n"
    planted = plant(tmp_path, **{"site-packages__torch__version.py": text}).torch_build()
    assert dict(planted) == {"version": "2.11.0+x1", "first": "12.8"}


def test_the_bus_is_read_below_the_root(tmp_path: Path) -> None:
    folder = "sys__bus__pci__devices__0000:01:00.0__"
    files = {"vendor": "0x1111\n", "device": "0x0002\n", "class": "0x030200\n"}
    (device,) = plant(tmp_path, **{folder + name: text for name, text in files.items()}).pci()
    assert (device.vendor_id, device.device_id, device.is_accelerator) == (0x1111, 2, True)


def test_the_variable_names_the_root(tmp_path: Path) -> None:
    assert host_system({VARIABLE: str(tmp_path)}).root == tmp_path
    assert host_system({}).is_this_machine and host_system({VARIABLE: ""}).is_this_machine


def test_a_probe_is_given_the_system(tmp_path: Path) -> None:
    refs = dict.fromkeys(("facts", "worker", "bring_up"), "a:b")
    package = DevicePackage(
        name="n", api=3, summary="", probe=f"{__name__}:probe", attention={}, graphs={}, kernels={"own": "a:b"}, **refs
    )
    assert run_probe(package, False, System(tmp_path)).hardware.evidence == str(tmp_path)


def probe(named: bool, system: System) -> ProbeReport:
    fact = Fact(True, str(system.root))
    return ProbeReport(fact, fact, fact, fact)
