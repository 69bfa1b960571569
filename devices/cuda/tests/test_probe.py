"""Probes of NVIDIA machines: complete, in containers, with old drivers, with hidden GPUs, or with a
torch for other devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore.device.probe import DeviceInfo
from sglcore_cuda.probe import driver_version, probe
from tests.device.machines import (
    CPU_TORCH,
    CUDA_TORCH,
    HIP_TORCH,
    NVIDIA,
    NVIDIA_LIBRARY,
    NVIDIA_NODES,
    NVIDIA_PCI,
    NVIDIA_VERSION,
    Files,
    machine,
    pci,
    torch_build,
)


def answers(root: Path, *parts: Files, environ: dict[str, str] | None = None) -> tuple[bool, bool, bool]:
    """Return whether hardware, driver and runtime are found."""
    report = probe(False, machine(root, *parts, environ=environ))
    assert report.package.holds
    return report.hardware.holds, report.driver.holds, report.runtime.holds


def test_a_server_with_driver_and_torch_is_usable_and_described(tmp_path: Path) -> None:
    report = probe(False, machine(tmp_path, NVIDIA, CUDA_TORCH))
    assert report.usable
    assert report.hardware.evidence == "/dev/nvidia0"
    assert "580.95.05" in report.driver.evidence
    assert report.devices == (DeviceInfo(0, "NVIDIA H200", pci_address="0000:01:00.0"),)


def test_nothing_is_seen_on_a_machine_without_one(tmp_path: Path) -> None:
    assert answers(tmp_path, CUDA_TORCH) == (False, False, True)


def test_control_nodes_without_a_gpu_are_no_hardware(tmp_path: Path) -> None:
    nodes = {"/dev/nvidiactl": "", "/dev/nvidia-uvm": ""}
    assert answers(tmp_path, nodes, NVIDIA_LIBRARY, NVIDIA_VERSION, CUDA_TORCH) == (False, False, True)


def test_a_container_with_the_driver_but_no_device_is_told_how_it_is_started(tmp_path: Path) -> None:
    report = probe(True, machine(tmp_path, NVIDIA_LIBRARY, NVIDIA_VERSION, CUDA_TORCH))
    assert not report.present and not report.driver.holds
    assert "libcuda.so.1 is there" in report.hardware.evidence and "--gpus all" in report.hardware.remedy


def test_a_gpu_on_the_bus_without_a_node_is_present_and_its_driver_is_what_fails(tmp_path: Path) -> None:
    report = probe(False, machine(tmp_path, NVIDIA_PCI, NVIDIA_LIBRARY, NVIDIA_VERSION, CUDA_TORCH))
    assert report.present and report.first_failure == ("driver", report.driver)
    assert "no node" in report.driver.evidence and "--device cpu" in report.driver.remedy


def test_a_node_without_the_driver_library_is_present_and_not_usable(tmp_path: Path) -> None:
    report = probe(False, machine(tmp_path, NVIDIA_NODES, NVIDIA_VERSION, CUDA_TORCH))
    assert report.present and not report.driver.holds and "libcuda.so.1" in report.driver.evidence


def test_a_library_without_the_module_is_not_a_driver(tmp_path: Path) -> None:
    report = probe(False, machine(tmp_path, NVIDIA_PCI, NVIDIA_LIBRARY, CUDA_TORCH))
    assert not report.driver.holds and "modprobe" in report.driver.remedy


def test_a_gpu_that_only_drives_a_display_counts_and_its_sound_device_does_not(tmp_path: Path) -> None:
    assert probe(False, machine(tmp_path / "a", pci("0000:01:00.0", 0x10DE, 0x2684, 0x0300))).present
    assert not probe(False, machine(tmp_path / "b", pci("0000:01:00.1", 0x10DE, 0x22BA, 0x0403))).present


@pytest.mark.parametrize("hidden", ["", "-1", "7", "none", "GPU-0"])
def test_gpus_hidden_by_the_environment_are_present_and_not_usable(tmp_path: Path, hidden: str) -> None:
    report = probe(False, machine(tmp_path, NVIDIA, CUDA_TORCH, environ={"CUDA_VISIBLE_DEVICES": hidden}))
    assert report.present and report.first_failure == ("runtime", report.runtime) and not report.devices
    assert report.hidden == f"CUDA_VISIBLE_DEVICES={hidden!r} shows 0 of 1" == report.runtime.evidence
    assert "unset" in report.runtime.remedy
    assert probe(False, machine(tmp_path, environ={"CUDA_VISIBLE_DEVICES": "0"})).usable


def gpu(number: int, model: str = "NVIDIA L4") -> Files:
    """Return the driver's files about one of several GPUs."""
    text = f"Model: \t\t {model}\nGPU UUID: \t GPU-{number}aaa\nDevice Minor: \t {number}\n"
    return {f"/dev/nvidia{number}": "", f"/proc/driver/nvidia/gpus/0000:{number + 1:02x}:00.0/information": text}


FOUR = {name: text for number in range(4) for name, text in gpu(number).items()}


@pytest.mark.parametrize(
    ("value", "shown"), [("2,0", [2, 0]), ("GPU-3,GPU-1aaa", [3, 1]), ("1,9,2", [1]), ("1,1", []), (" 3 ,x", [3])]
)
def test_gpus_are_numbered_as_the_variable_lists_them(tmp_path: Path, value: str, shown: list[int]) -> None:
    report = probe(False, machine(tmp_path, FOUR, NVIDIA_LIBRARY, environ={"CUDA_VISIBLE_DEVICES": value}))
    assert [device.index for device in report.devices] == list(range(len(shown)))
    assert [device.uuid for device in report.devices] == [f"GPU-{number}aaa" for number in shown]
    assert [device.pci_address for device in report.devices] == [f"0000:{number + 1:02x}:00.0" for number in shown]
    assert report.hidden == f"CUDA_VISIBLE_DEVICES={value!r} shows {len(shown)} of 4"


def test_nodes_are_counted_by_number_and_not_as_texts(tmp_path: Path) -> None:
    devices = probe(False, machine(tmp_path, {"/dev/nvidia10": "", "/dev/nvidia2": ""})).devices
    assert [(device.index, device.name) for device in devices] == [(0, "/dev/nvidia2"), (1, "/dev/nvidia10")]


def test_a_container_that_was_given_some_gpus_lists_those(tmp_path: Path) -> None:
    files = {name: text for name, text in FOUR.items() if name not in ("/dev/nvidia0", "/dev/nvidia2")}
    assert [device.uuid for device in probe(False, machine(tmp_path, files)).devices] == ["GPU-1aaa", "GPU-3aaa"]


def test_which_of_two_models_comes_first_is_not_told_unless_the_bus_orders_them(tmp_path: Path) -> None:
    system = machine(tmp_path, gpu(0), gpu(1, "NVIDIA H200"))
    assert {device.name for device in probe(False, system).devices} == {"NVIDIA H200 or NVIDIA L4"}
    ordered = machine(tmp_path, environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [device.name for device in probe(False, ordered).devices] == ["NVIDIA L4", "NVIDIA H200"]


def test_a_part_of_a_gpu_is_one_device(tmp_path: Path) -> None:
    system = machine(tmp_path, NVIDIA, CUDA_TORCH, environ={"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"})
    assert probe(False, system).usable and probe(False, system).devices == (DeviceInfo(0, "MIG-1"),)


def test_a_guest_of_windows_has_neither_pci_nor_proc(tmp_path: Path) -> None:
    assert answers(tmp_path / "a", {"/dev/dxg": "", "/usr/lib/wsl/lib/libcuda.so.1": ""}, CUDA_TORCH) == (True,) * 3
    assert answers(tmp_path / "b", {"/dev/dxg": ""}, CUDA_TORCH) == (False, False, True)
    hidden = probe(False, machine(tmp_path / "a", environ={"CUDA_VISIBLE_DEVICES": ""}))
    assert hidden.present and not hidden.usable


@pytest.mark.parametrize(("build", "made_for"), [(CPU_TORCH, "processors"), (HIP_TORCH, "AMD GPUs")])
def test_a_torch_for_others_is_not_a_runtime(tmp_path: Path, build: Files, made_for: str) -> None:
    report = probe(False, machine(tmp_path, NVIDIA, build))
    assert report.first_failure == ("runtime", report.runtime)
    assert made_for in report.runtime.evidence and "pip install torch==2.13.0" in report.runtime.remedy


@pytest.mark.parametrize(("cuda", "driver", "is_usable"), [("12.8", "525.60", True), ("13.0", "570.86", False)])
def test_a_driver_older_than_the_build_is_said_before_torch_would_crash(
    tmp_path: Path, cuda: str, driver: str, is_usable: bool
) -> None:
    version = {"/proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}.10  Tue\n"}
    system = machine(tmp_path, NVIDIA, version, torch_build(f"2.13.0+cu{cuda}", cuda=cuda))
    assert driver_version(system) == f"{driver}.10"
    assert probe(False, system).usable is is_usable
