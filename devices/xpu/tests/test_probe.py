"""Probes of Intel machines: cards, CPUs with integrated graphics, containers, GPUs with several
tiles, and a torch for other devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore.device.probe import DeviceInfo, ProbeReport
from sglcore_xpu.probe import probe
from tests.device.machines import (
    CPU_TORCH,
    CUDA_TORCH,
    HIP_TORCH,
    INTEL,
    INTEL_GRAPHICS,
    INTEL_LIBRARIES,
    INTEL_NPU,
    INTEL_PCI,
    XPU_TORCH,
    Files,
    drm_node,
    machine,
    pci,
)


def seen(root: Path, *parts: Files, named: bool = False, **environ: str) -> ProbeReport:
    return probe(named, machine(root, *parts, environ=environ))


def test_a_server_with_driver_and_torch_is_usable_and_described(tmp_path: Path) -> None:
    report = seen(tmp_path, INTEL, XPU_TORCH)
    assert report.usable and report.hardware.evidence == "/dev/dri/renderD128"
    assert "by xe" in report.driver.evidence and "libze_intel_gpu.so.1" in report.driver.evidence
    assert report.devices == (DeviceInfo(0, "/dev/dri/renderD128", pci_address="0000:03:00.0"),)


def test_the_graphics_of_a_processor_are_taken_only_by_name_and_hide_beside_a_card(tmp_path: Path) -> None:
    alone = seen(tmp_path / "a", INTEL_GRAPHICS, INTEL_LIBRARIES, XPU_TORCH)
    assert not alone.present and "--device xpu" in alone.hardware.remedy
    assert seen(tmp_path / "a", named=True).usable
    before = drm_node(127, "i915", "8086:4680", "0000:00:02.0")
    for name, graphics in (("b", INTEL_GRAPHICS), ("c", {**INTEL_GRAPHICS, **before})):
        both = seen(tmp_path / name, graphics, INTEL, XPU_TORCH)
        assert both.usable and [device.pci_address for device in both.devices] == ["0000:03:00.0"]
        assert both.driver.evidence.startswith("/dev/dri/renderD128 by xe")


def test_a_card_on_the_first_bus_of_a_virtual_machine_is_a_card(tmp_path: Path) -> None:
    node, bus = drm_node(128, "xe", "8086:E20B", "0000:00:06.0"), pci("0000:00:06.0", 0x8086, 0xE20B, 0x0300)
    assert seen(tmp_path / "a", node, bus, INTEL_LIBRARIES, XPU_TORCH).usable
    assert seen(tmp_path / "b", bus, INTEL_LIBRARIES, XPU_TORCH).present


def test_a_processing_accelerator_of_the_vendor_is_no_gpu(tmp_path: Path) -> None:
    assert not seen(tmp_path, INTEL_NPU, INTEL_LIBRARIES, XPU_TORCH, named=True).present


def test_a_render_node_of_somebody_else_is_none_of_these(tmp_path: Path) -> None:
    other = drm_node(128, "amdgpu", "1002:744C", "0000:05:00.0")
    report = seen(tmp_path, other, INTEL_LIBRARIES, XPU_TORCH)
    assert not report.present and not report.driver.holds and not report.devices


def test_a_card_that_no_driver_took_is_present_and_the_driver_is_what_fails(tmp_path: Path) -> None:
    report = seen(tmp_path, INTEL_PCI, INTEL_LIBRARIES, XPU_TORCH)
    assert report.present and report.first_failure == ("driver", report.driver)
    assert "modprobe xe" in report.driver.remedy and "--device /dev/dri" in report.driver.remedy


def test_a_card_that_was_given_to_a_guest_is_not_this_machines(tmp_path: Path) -> None:
    given = {**INTEL, **drm_node(128, "vfio-pci", "8086:E20B", "0000:03:00.0")}
    report = seen(tmp_path, given, XPU_TORCH)
    assert not report.driver.holds and "served by vfio-pci" in report.driver.evidence


@pytest.mark.parametrize("library", ["libze_loader.so.1", "libze_intel_gpu.so.1"])
def test_what_level_zero_lacks_is_named_with_the_packages_that_bring_it(tmp_path: Path, library: str) -> None:
    files = {name: text for name, text in INTEL.items() if not name.endswith(library)}
    report = seen(tmp_path, files, XPU_TORCH)
    assert report.present and report.first_failure == ("driver", report.driver)
    assert library in report.driver.evidence and "apt install libze1 libze-intel-gpu1" in report.driver.remedy


def test_a_node_that_may_not_be_opened_says_which_group_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    report = seen(tmp_path, INTEL, XPU_TORCH)
    assert not report.driver.holds and "group render" in report.driver.remedy


@pytest.mark.parametrize(
    ("build", "made_for"), [(CPU_TORCH, "processors"), (CUDA_TORCH, "NVIDIA GPUs"), (HIP_TORCH, "AMD GPUs")]
)
def test_a_torch_for_others_is_not_a_runtime(tmp_path: Path, build: Files, made_for: str) -> None:
    report = seen(tmp_path, INTEL, build)
    assert report.first_failure == ("runtime", report.runtime) and made_for in report.runtime.evidence
    assert "pip install torch" in report.runtime.remedy and "whl/xpu" in report.runtime.remedy


SECOND = drm_node(129, "i915", "8086:56A0", "0000:07:00.0")


def test_cards_are_numbered_as_the_mask_leaves_them(tmp_path: Path) -> None:
    assert len(seen(tmp_path, INTEL, SECOND, XPU_TORCH).devices) == 2
    report = seen(tmp_path, ZE_AFFINITY_MASK="1")
    assert report.usable and [device.pci_address for device in report.devices] == ["0000:07:00.0"]
    assert report.hidden == "ZE_AFFINITY_MASK='1' shows 1 of 2"
    hidden = seen(tmp_path, ZE_AFFINITY_MASK="7")
    assert hidden.present and hidden.first_failure == ("runtime", hidden.runtime)


@pytest.mark.parametrize(
    "folder", ["/sys/bus/pci/devices/0000:03:00.0/tile{}/", "/sys/bus/pci/devices/0000:03:00.0/drm/card0/gt/gt{}/"]
)
def test_a_part_of_two_tiles_is_two_devices_unless_the_runtime_is_told_otherwise(tmp_path: Path, folder: str) -> None:
    tiles = {f"{folder.format(tile)}x": "" for tile in range(2)}
    report = seen(tmp_path, INTEL, tiles, XPU_TORCH)
    assert [device.name for device in report.devices] == ["/dev/dri/renderD128 tile 0", "/dev/dri/renderD128 tile 1"]
    assert len(seen(tmp_path, ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE").devices) == 1
    parts = seen(tmp_path, ZE_AFFINITY_MASK="0.1")
    assert parts.usable and parts.devices == () and "ZE_AFFINITY_MASK='0.1' chooses" in parts.hidden


@pytest.mark.parametrize("mask", ["", "default"])
def test_a_mask_that_says_nothing_hides_nothing(tmp_path: Path, mask: str) -> None:
    report = seen(tmp_path, INTEL, XPU_TORCH, ZE_AFFINITY_MASK=mask)
    assert report.usable and len(report.devices) == 1 and not report.hidden


@pytest.mark.parametrize(
    ("selector", "is_usable"),
    [
        ("level_zero:0", True),
        ("*:gpu", True),
        ("!opencl:*", True),
        ("!Level_Zero:*", False),
        ("*:gpu;!*:gpu", False),
        ("!level_zero:0", True),
        ("opencl:gpu", False),
        ("opencl:gpu;level_zero:1", True),
    ],
)
def test_a_selector_that_leaves_level_zero_out_leaves_nothing_to_torch(
    tmp_path: Path, selector: str, is_usable: bool
) -> None:
    report = seen(tmp_path, INTEL, XPU_TORCH, ONEAPI_DEVICE_SELECTOR=selector)
    assert report.present and report.usable is is_usable and report.devices == ()
    assert f"ONEAPI_DEVICE_SELECTOR={selector!r}" in report.hidden
    assert is_usable or (report.runtime == report.hiding and selector in report.runtime.evidence)
