"""Probes of AMD machines: servers, desktops, CPUs with integrated graphics, containers, and a torch
for other devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore.device.probe import DeviceInfo
from sglcore_hip.probe import probe, topology
from tests.device.machines import (
    AMD,
    AMD_GRAPHICS,
    AMD_GRAPHICS_PCI,
    AMD_NODES,
    AMD_PCI,
    AMD_PROCESSOR,
    AMD_RADEON,
    CPU_TORCH,
    CUDA_TORCH,
    HIP_TORCH,
    ROCM,
    Files,
    kfd_node,
    machine,
)


def test_a_server_with_driver_and_torch_is_usable_and_described(tmp_path: Path) -> None:
    report = probe(False, machine(tmp_path, AMD, HIP_TORCH))
    assert report.usable
    assert report.devices == (DeviceInfo(0, "gfx942 with 304 compute units"),)
    assert "/dev/kfd" in report.driver.evidence and "libamdhip64.so.7" in report.driver.evidence


def test_targets_are_named_as_compilers_name_them(tmp_path: Path) -> None:
    versions = {
        90402: "gfx942",
        90010: "gfx90a",
        110000: "gfx1100",
        100306: "gfx1036",
        120001: "gfx1201",
        90500: "gfx950",
    }
    nodes = [kfd_node(i, simd_count=64, simd_per_cu=2, gfx_target_version=v) for i, v in enumerate(versions)]
    assert [gpu.target for gpu in topology(machine(tmp_path, *nodes))] == list(versions.values())


def test_the_processor_is_a_node_of_the_topology_but_no_gpu(tmp_path: Path) -> None:
    report = probe(True, machine(tmp_path, AMD_NODES, AMD_PROCESSOR, HIP_TORCH))
    assert not report.present and "lists no GPU" in report.hardware.evidence


def test_the_graphics_of_a_processor_are_named_as_such_and_taken_only_by_name(tmp_path: Path) -> None:
    system = machine(tmp_path, AMD_NODES, AMD_PROCESSOR, AMD_GRAPHICS, AMD_GRAPHICS_PCI, ROCM, HIP_TORCH)
    seen = probe(False, system)
    assert not seen.present and "gfx1036 with 2 compute units" in seen.hardware.evidence
    assert "--device hip" in seen.hardware.remedy
    assert probe(True, system).usable


def test_a_desktop_gpu_beside_the_graphics_of_its_processor_is_what_counts(tmp_path: Path) -> None:
    graphics = {name.replace("/1/", "/2/"): text for name, text in AMD_GRAPHICS.items()}
    report = probe(False, machine(tmp_path, AMD_NODES, AMD_PROCESSOR, AMD_RADEON, graphics, ROCM, HIP_TORCH))
    assert report.usable and "gfx1100 with 96" in report.hardware.evidence and "gfx1036" not in report.hardware.evidence


def test_a_container_with_rocm_but_no_device_is_told_how_it_is_started(tmp_path: Path) -> None:
    report = probe(False, machine(tmp_path, ROCM, HIP_TORCH))
    assert not report.present and not report.driver.holds
    assert "ROCm is installed" in report.hardware.evidence and "--device /dev/kfd" in report.hardware.remedy


@pytest.mark.parametrize("missing", ["/dev/kfd", "/dev/dri/renderD128", "/opt/rocm"])
def test_what_the_driver_lacks_is_named(tmp_path: Path, missing: str) -> None:
    files = {name: text for name, text in AMD.items() if not name.startswith(missing)}
    report = probe(False, machine(tmp_path, files, HIP_TORCH))
    assert report.present and report.first_failure == ("driver", report.driver)
    assert {"/opt/rocm": "libamdhip64.so"}.get(missing, missing.rstrip("0128")) in report.driver.evidence


def test_a_node_that_may_not_be_opened_says_which_group_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    report = probe(False, machine(tmp_path, AMD, HIP_TORCH))
    assert not report.driver.holds and "group render" in report.driver.remedy


def test_a_torch_that_brings_its_own_runtime_needs_no_rocm(tmp_path: Path) -> None:
    files = {name: text for name, text in AMD.items() if not name.startswith("/opt")}
    report = probe(False, machine(tmp_path, files, HIP_TORCH, {"/site-packages/torch/lib/libamdhip64.so": ""}))
    assert report.usable


def test_an_accelerator_on_the_bus_that_no_driver_took_is_present(tmp_path: Path) -> None:
    report = probe(False, machine(tmp_path, AMD_PCI, HIP_TORCH))
    assert report.present and report.first_failure == ("driver", report.driver)
    assert "amdgpu" in report.driver.remedy


VARIABLES = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize("variable", VARIABLES)
def test_gpus_hidden_by_the_environment_are_present_and_not_usable(tmp_path: Path, variable: str) -> None:
    report = probe(False, machine(tmp_path, AMD, HIP_TORCH, environ={variable: ""}))
    assert report.present and report.first_failure == ("runtime", report.runtime) and "unset" in report.runtime.remedy
    assert report.hidden == f"{variable}='' shows 0 of 1"
    assert probe(False, machine(tmp_path, environ={variable: "0"})).usable


def gpu(number: int) -> Files:
    """Return the files of one of several GPUs: node, PCI address, memory."""
    folder = f"/sys/bus/pci/devices/0001:{number + 1:02x}:00.0"
    values = {"location_id": number + 1 << 8, "domain": 1, "unique_id": 0xA0 + number, "drm_render_minor": 128 + number}
    return {
        **kfd_node(number + 1, simd_count=1216, simd_per_cu=4, gfx_target_version=90402, **values),
        f"/dev/dri/renderD{128 + number}": "",
        f"{folder}/mem_info_vram_total": f"{192 << 30}\n",
        f"{folder}/mem_info_vram_used": f"{number << 30}\n",
        f"{folder}/product_name": "AMD Instinct MI300X\n",
    }


def test_a_place_on_the_bus_has_five_bits_of_device_and_three_of_function(tmp_path: Path) -> None:
    place = kfd_node(
        1, simd_count=1216, simd_per_cu=4, gfx_target_version=90402, location_id=5 << 8 | 0x11 << 3 | 6, domain=2
    )
    (device,) = probe(False, machine(tmp_path, {**gpu(0), **place})).devices
    assert device.pci_address == "0002:05:11.6"


FOUR = {name: text for number in range(4) for name, text in gpu(number).items()}


def test_a_gpu_is_listed_with_its_place_memory_and_use(tmp_path: Path) -> None:
    devices = probe(False, machine(tmp_path, gpu(0), gpu(2))).devices
    name, memory = "AMD Instinct MI300X (gfx942 with 304 compute units)", 192 << 30
    assert devices[0] == DeviceInfo(0, name, memory, False, "0001:01:00.0", f"GPU-{0xA0:016x}")
    assert (devices[1].is_busy, devices[1].pci_address) == (True, "0001:03:00.0")


@pytest.mark.parametrize(
    ("environ", "places"),
    [
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [3, 1]),
        ({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}, [2]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": f"GPU-{0xA3:016x}"}, [4]),
    ],
)
def test_gpus_are_numbered_as_the_variables_list_them(
    tmp_path: Path, environ: dict[str, str], places: list[int]
) -> None:
    report = probe(False, machine(tmp_path, FOUR, environ=environ))
    assert [device.pci_address for device in report.devices] == [f"0001:{place:02x}:00.0" for place in places]
    assert [device.index for device in report.devices] == list(range(len(places)))


def test_a_container_that_was_given_one_render_node_lists_its_gpu(tmp_path: Path) -> None:
    files = {name: text for name, text in FOUR.items() if "renderD" not in name or name.endswith("129")}
    assert [device.pci_address for device in probe(False, machine(tmp_path, files)).devices] == ["0001:02:00.0"]


@pytest.mark.parametrize(("build", "made_for"), [(CPU_TORCH, "processors"), (CUDA_TORCH, "NVIDIA GPUs")])
def test_a_torch_for_others_is_not_a_runtime(tmp_path: Path, build: Files, made_for: str) -> None:
    report = probe(False, machine(tmp_path, AMD, build))
    assert report.first_failure == ("runtime", report.runtime) and made_for in report.runtime.evidence


def test_a_larger_gpu_of_a_processor_counts(tmp_path: Path) -> None:
    strix = kfd_node(1, cpu_cores_count=16, simd_count=80, simd_per_cu=2, gfx_target_version=110501)
    assert probe(False, machine(tmp_path, AMD_NODES, strix, ROCM, HIP_TORCH)).usable
