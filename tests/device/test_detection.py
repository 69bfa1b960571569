"""The device chosen on whole machines by the probes of every installed package: compatibility
shims, containers, two vendors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglcore.core.errors import DeviceError
from sglcore.device.candidate import claims_of, run_probe
from sglcore.device.choice import Requested
from sglcore.device.discovery import Installed, discover
from sglcore.device.probe import ProbeReport
from sglcore.device.selection import Choice, select
from sglcore.device.system import System
from tests.device.machines import (
    AMD,
    AMD_GRAPHICS,
    AMD_GRAPHICS_PCI,
    AMD_NODES,
    AMD_PROCESSOR,
    CPU_TORCH,
    CUDA_TORCH,
    HIP_TORCH,
    INTEL,
    INTEL_GRAPHICS,
    INTEL_LIBRARIES,
    MUSA,
    MUSA_TORCH,
    NPU,
    NPU_TORCH,
    NVIDIA,
    NVIDIA_LIBRARY,
    NVIDIA_NODES,
    NVIDIA_PCI,
    NVIDIA_VERSION,
    ROCM,
    XPU_TORCH,
    machine,
    module,
    torch_build,
)

INSTALLED = discover()
ACCELERATORS = tuple(item.name for item in INSTALLED if item.package is not None and not item.package.is_host)


def choose(system: System, name: str | None = None) -> Choice:
    """Return the choice of an engine on this machine."""
    requested = Requested.parse(name, "--device") if name else Requested()
    return select(INSTALLED, requested, system=system)


def report(system: System, name: str) -> ProbeReport:
    """Return the report of one package's probe."""
    package = next(item.loaded() for item in INSTALLED if item.name == name)
    return run_probe(package, False, system)


def test_the_packages_of_every_vendor_are_here() -> None:
    assert {"cuda", "hip", "musa", "npu", "xpu"} <= set(ACCELERATORS)
    assert {0x10DE, 0x1002, 0x1ED5, 0x19E5, 0x8086} <= {claim.vendor_id for claim in claims_of(INSTALLED)}


def test_without_an_accelerator_the_processor_is_chosen_and_nobody_is_present(tmp_path: Path) -> None:
    system = machine(tmp_path, CPU_TORCH)
    assert choose(system).package.is_host
    assert not any(report(system, name).present for name in ACCELERATORS)


MACHINES = (
    (NVIDIA, CUDA_TORCH, "cuda"),
    (AMD, HIP_TORCH, "hip"),
    (MUSA, MUSA_TORCH, "musa"),
    (NPU, NPU_TORCH, "npu"),
    (INTEL, XPU_TORCH, "xpu"),
)


@pytest.mark.parametrize(("files", "build", "name"), MACHINES)
def test_each_vendor_is_chosen_on_its_own_machine_and_no_other_claims_it(
    tmp_path: Path, files: dict[str, str], build: dict[str, str], name: str
) -> None:
    system = machine(tmp_path, files, build)
    assert choose(system).chosen.name == name
    assert [other for other in ACCELERATORS if report(system, other).present] == [name]


def test_a_torch_that_lies_about_its_gpu_convinces_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    system = machine(tmp_path, CPU_TORCH)
    assert not any(report(system, name).present for name in ACCELERATORS)
    assert choose(system).package.is_host


@pytest.mark.parametrize("shim", ["torchada", "torch_musa", "torch_npu", "flashinfer"])
def test_a_vendors_module_without_its_hardware_is_not_a_device(tmp_path: Path, shim: str) -> None:
    system = machine(tmp_path, CPU_TORCH, module(shim))
    assert choose(system).package.is_host
    assert not any(report(system, name).present for name in ACCELERATORS)


def test_an_nvidia_box_with_the_graphics_of_an_amd_processor_runs_on_nvidia_and_hip_says_why_not(
    tmp_path: Path,
) -> None:
    graphics = (AMD_NODES, AMD_PROCESSOR, AMD_GRAPHICS, AMD_GRAPHICS_PCI)
    system = machine(tmp_path, NVIDIA, *graphics, CUDA_TORCH)
    assert choose(system).chosen.name == "cuda"
    assert "gfx1036" in report(system, "hip").hardware.evidence


def test_the_graphics_of_an_intel_processor_stand_in_nobodys_way(tmp_path: Path) -> None:
    graphics = (INTEL_GRAPHICS, INTEL_LIBRARIES)
    assert choose(machine(tmp_path / "a", NVIDIA, *graphics, CUDA_TORCH)).chosen.name == "cuda"
    assert choose(machine(tmp_path / "b", *graphics, CPU_TORCH)).package.is_host


def test_a_broken_probe_ends_a_start_for_its_cards_and_not_for_the_graphics_of_a_processor(tmp_path: Path) -> None:
    def broken(item: Installed) -> Installed:
        return replace(item, package=replace(item.loaded(), probe="os:nothing")) if item.name == "xpu" else item

    installed = [broken(item) for item in INSTALLED]
    for name, parts, chosen in (("a", (CPU_TORCH,), "cpu"), ("b", (NVIDIA, CUDA_TORCH), "cuda")):
        choice = select(installed, Requested(), system=machine(tmp_path / name, INTEL_GRAPHICS, *parts))
        assert choice.chosen.name == chosen and "device xpu" in {row.topic for row in choice.rows}
    with pytest.raises(DeviceError, match=r"0000:03:00.0 .* is probably a device of 'xpu'.*--device cpu"):
        select(installed, Requested(), system=machine(tmp_path / "c", INTEL, CPU_TORCH))


HIDES = (
    (NVIDIA, CUDA_TORCH, "cuda", "CUDA_VISIBLE_DEVICES"),
    (NVIDIA_PCI, CUDA_TORCH, "cuda", "CUDA_VISIBLE_DEVICES"),
    (AMD, HIP_TORCH, "hip", "HIP_VISIBLE_DEVICES"),
    (AMD, HIP_TORCH, "hip", "ROCR_VISIBLE_DEVICES"),
    (MUSA, MUSA_TORCH, "musa", "MUSA_VISIBLE_DEVICES"),
    (NPU, NPU_TORCH, "npu", "ASCEND_RT_VISIBLE_DEVICES"),
    (INTEL, XPU_TORCH, "xpu", "ZE_AFFINITY_MASK"),
)


@pytest.mark.parametrize(("files", "build", "name", "variable"), HIDES)
def test_who_hides_all_devices_of_a_kind_runs_on_the_next_and_who_names_one_that_is_not_there_does_not(
    tmp_path: Path, files: dict[str, str], build: dict[str, str], name: str, variable: str
) -> None:
    hiding = machine(tmp_path, files, build, environ={variable: "-1"})
    choice = choose(hiding)
    row = next(row for row in choice.rows if row.topic == f"accelerator {name}")
    assert choice.package.is_host and variable in row.reason and not row.downgrade
    with pytest.raises(DeviceError, match=f"'{name}' is present but not usable: .*{variable}='-1'"):
        choose(hiding, name)
    with pytest.raises(DeviceError, match=f"'{name}' is present but not usable"):
        choose(machine(tmp_path, environ={variable: "97"}))


def test_two_usable_vendors_are_an_error_that_names_both_and_the_setting(tmp_path: Path) -> None:
    system = machine(tmp_path, NVIDIA, AMD, ROCM, {**CUDA_TORCH, **_for_both()})
    with pytest.raises(DeviceError, match="cuda, hip.*SGLCORE_DEVICE"):
        choose(system)
    assert choose(system, "hip").chosen.name == "hip"


def test_a_container_with_the_driver_but_no_device_runs_on_the_processor(tmp_path: Path) -> None:
    system = machine(tmp_path, NVIDIA_LIBRARY, NVIDIA_VERSION, CUDA_TORCH)
    assert choose(system).package.is_host
    with pytest.raises(DeviceError, match="'cuda' is not present.*--gpus all"):
        choose(system, "cuda")


def test_a_container_that_was_given_a_device_without_its_driver_does_not_fall_to_the_processor(tmp_path: Path) -> None:
    system = machine(tmp_path, NVIDIA_NODES, NVIDIA_VERSION, CUDA_TORCH)
    with pytest.raises(DeviceError, match="'cuda' is present but not usable: driver.*libcuda"):
        choose(system)


def test_a_gpu_with_a_torch_for_processors_does_not_fall_to_the_processor(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="runtime.*built for processors.*pip install torch"):
        choose(machine(tmp_path, NVIDIA, CPU_TORCH))
    assert choose(machine(tmp_path, NVIDIA_PCI, CPU_TORCH), "cpu").chosen.name == "cpu"


@pytest.mark.parametrize(("files", "build", "name"), MACHINES)
def test_a_process_that_fakes_its_gpu_does_not_change_which_vendor_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], build: dict[str, str], name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose(machine(tmp_path, files, build, module("torchada"))).chosen.name == name


@pytest.mark.parametrize(("files", "name"), [(files, name) for files, _, name in MACHINES])
def test_an_accelerator_with_a_torch_of_somebody_else_names_the_runtime_and_what_to_install(
    tmp_path: Path, files: dict[str, str], name: str
) -> None:
    with pytest.raises(DeviceError, match=f"'{name}' is present but not usable: runtime: .*; .*install"):
        choose(machine(tmp_path, files, CPU_TORCH))


def test_a_shim_with_the_hardware_but_without_the_extension_it_translates_to_is_named_as_such(tmp_path: Path) -> None:
    system = machine(tmp_path, MUSA, torch_build("2.11.0+cpu"), module("torchada"))
    assert "torchada only translates" in report(system, "musa").runtime.evidence
    with pytest.raises(DeviceError, match="torch_musa"):
        choose(system)


def test_a_second_vendor_that_is_broken_leaves_a_row(tmp_path: Path) -> None:
    choice = choose(machine(tmp_path, NVIDIA, AMD, CUDA_TORCH))
    assert choice.chosen.name == "cuda"
    assert [row.topic for row in choice.rows[1:]] == ["accelerator hip"]


def _for_both() -> dict[str, str]:
    """A version file that names both vendors; no real build has one."""
    text = "__version__ = '2.13.0'\ncuda = '13.0'\nhip = '7.1'\n"
    return {"/site-packages/torch/version.py": text}
