"""Probes of Moore Threads machines: complete, in containers, with hidden GPUs, or with only a
shim."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sglcore.device.probe import DeviceInfo
from sglcore_musa.probe import probe, same_release
from tests.device.machines import CPU_TORCH, CUDA_TORCH, Files, machine, module, pci, torch_build

NODES = {"/dev/mtgpu.0": "", "/dev/mtgpu.1": "", "/dev/mtgpu.ctl": "", "/dev/dri/renderD128": ""}
GPU_PCI = pci("0000:41:00.0", 0x1ED5, 0x0400, 0x0300)
DRIVER = {"/usr/lib/x86_64-linux-gnu/musa/libmusa.so.4": "", "/sys/module/mtgpu/version": "3.3.0\n"}
TOOLKIT = {"/usr/local/musa/lib/libmusart.so.4": ""}
TORCH = torch_build("2.11.0")


def extension(version: str = "2.11.0.post2") -> Files:
    """An installed torch_musa."""
    return {**module("torch_musa"), "/site-packages/torch_musa/version.py": f'__version__ = "{version}"\n'}


SERVER = {**NODES, **GPU_PCI, **DRIVER, **TOOLKIT, **TORCH, **extension()}


def without(files: Files, *parts: str) -> Files:
    """Return the files without those that have one of `parts` in their path."""
    return {name: text for name, text in files.items() if not any(part in name for part in parts)}


@pytest.fixture(autouse=True)
def only_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide modules that this process has loaded: they are not part of a test's machine."""
    for name in ("torch_musa", "torchada"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def answers(root: Path, files: Files, **environ: str) -> tuple[bool, bool, bool]:
    """Return whether hardware, driver and runtime are found."""
    report = probe(False, machine(root, files, environ=environ))
    assert report.package.holds
    assert all(fact.remedy for fact in report.facts.values() if not fact.holds)
    return report.hardware.holds, report.driver.holds, report.runtime.holds


def test_a_server_is_usable_and_described(tmp_path: Path) -> None:
    report = probe(False, machine(tmp_path, SERVER))
    assert report.usable
    assert report.hardware.evidence == "/dev/mtgpu.0, /dev/mtgpu.1"
    assert "3.3.0" in report.driver.evidence and "torch_musa 2.11.0.post2" in report.runtime.evidence


@pytest.mark.parametrize("variable", ["MUSA_HOME", "MUSA_PATH"])
def test_a_toolkit_in_another_folder_is_found_by_either_variable(tmp_path: Path, variable: str) -> None:
    files = {name.replace("/usr/lib/x86_64-linux-gnu/musa", "/opt/musa/lib"): text for name, text in SERVER.items()}
    files = {**without(files, "libmusart"), "/opt/musa/lib/libmusart.so.4": ""}
    assert answers(tmp_path, files) == (True, False, False)
    assert answers(tmp_path, files, **{variable: "/opt/musa"}) == (True, True, True)


def test_nothing_is_seen_on_a_machine_without_one(tmp_path: Path) -> None:
    assert answers(tmp_path, CUDA_TORCH) == (False, False, False)


def test_a_shim_alone_proves_nothing_and_is_named(tmp_path: Path) -> None:
    report = probe(True, machine(tmp_path, CPU_TORCH, module("torchada")))
    assert not report.present and not report.driver.holds and not report.runtime.holds
    assert "torchada only translates" in report.runtime.evidence


def test_the_extension_and_a_shim_without_hardware_are_not_present(tmp_path: Path) -> None:
    assert answers(tmp_path, {**TORCH, **TOOLKIT, **extension(), **module("torchada")}) == (False, False, True)


def test_a_gpu_on_the_bus_without_a_node_is_present_and_its_driver_is_what_fails(tmp_path: Path) -> None:
    report = probe(False, machine(tmp_path, without(SERVER, "/dev/")))
    assert report.present and report.first_failure == ("driver", report.driver)
    assert "its module is loaded" in report.driver.evidence and "modprobe mtgpu" in report.driver.remedy


def test_a_container_with_the_driver_but_no_device_is_told_how_it_is_started(tmp_path: Path) -> None:
    report = probe(False, machine(tmp_path, without(SERVER, "/dev/", "/sys/bus")))
    assert not report.present and "libmusa.so is there" in report.hardware.evidence
    assert "MTHREADS_VISIBLE_DEVICES" in report.hardware.remedy


def test_gpus_are_listed_as_the_runtime_numbers_them_and_hidden_ones_are_not_usable(tmp_path: Path) -> None:
    assert answers(tmp_path, SERVER, MUSA_VISIBLE_DEVICES="") == (True, True, False)
    report = probe(False, machine(tmp_path, environ={"MUSA_VISIBLE_DEVICES": "1"}))
    assert report.usable and report.devices == (DeviceInfo(0, "/dev/mtgpu.1"),)
    assert report.hidden == "MUSA_VISIBLE_DEVICES='1' shows 1 of 2"


def test_a_toolkit_is_found_by_its_variable(tmp_path: Path) -> None:
    files = {**without(SERVER, "libmusart"), "/opt/musa/lib/libmusart.so": ""}
    assert answers(tmp_path, files) == (True, True, False)
    assert answers(tmp_path, files, MUSA_HOME="/opt/musa") == (True, True, True)


@pytest.mark.parametrize("missing", ["libmusa.so", "torch_musa", "libmusart"])
def test_a_part_that_is_missing_fails_its_own_fact(tmp_path: Path, missing: str) -> None:
    report = probe(False, machine(tmp_path, without(SERVER, missing)))
    assert report.present and report.first_failure is not None
    assert missing.partition(".")[0] in report.first_failure[1].evidence


def test_an_extension_for_another_torch_is_refused(tmp_path: Path) -> None:
    report = probe(False, machine(tmp_path, SERVER, extension("2.9.1")))
    assert report.first_failure == ("runtime", report.runtime)
    assert "torch_musa 2.9.1 with torch 2.11.0" in report.runtime.evidence


def test_releases_agree_in_their_first_two_numbers() -> None:
    assert same_release("2.11.0", "2.11.0.post2+musa5.2.0") and not same_release("2.13.0", "2.11.0")
