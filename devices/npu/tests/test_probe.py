"""Probes of Ascend machines: complete, in containers, with hidden devices, with an old CANN, or
with the wrong torch_npu."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sglcore.device.probe import DeviceInfo
from sglcore_npu.probe import probe, same_release
from tests.device.machines import CPU_TORCH, CUDA_TORCH, Files, machine, module, pci

ASCEND = "/usr/local/Ascend"
NODES = {"/dev/davinci0": "", "/dev/davinci_manager": "", "/dev/devmm_svm": "", "/dev/hisi_hdc": ""}
NPU_PCI = pci("0000:c1:00.0", 0x19E5, 0xD802, 0x1200)
NETWORK_PCI = pci("0000:02:00.0", 0x19E5, 0x0222, 0x0200)
DRIVER = {
    f"{ASCEND}/driver/version.info": "Version=25.0.rc1\nascendhal_version=7.35.23\n",
    f"{ASCEND}/driver/lib64/driver/libascend_hal.so": "",
}


def cann(version: str = "8.5.RC1", folder: str = f"{ASCEND}/ascend-toolkit/latest") -> Files:
    """An installed CANN."""
    return {
        f"{folder}/lib64/libascendcl.so": "",
        f"{folder}/version.cfg": f"# version: 1.0\ntoolkit_running_version=[{version}:{version}]\n",
    }


def extension(version: str = "2.13.0") -> Files:
    """An installed torch_npu."""
    return {**module("torch_npu"), "/site-packages/torch_npu/version.py": f"__version__ = '{version}'\n"}


SERVER = {**NODES, **NPU_PCI, **DRIVER, **cann(), **extension(), **CPU_TORCH}


def without(files: Files, *parts: str) -> Files:
    """Return the files without those that have one of `parts` in their path."""
    return {name: text for name, text in files.items() if not any(part in name for part in parts)}


@pytest.fixture(autouse=True)
def only_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide modules that this process has loaded: they are not part of a test's machine."""
    for name in ("torch_npu", "torchada"):
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
    assert report.hardware.evidence == "/dev/davinci0"
    assert "25.0.rc1" in report.driver.evidence
    assert "torch_npu 2.13.0, CANN 8.5" in report.runtime.evidence


def test_nothing_is_seen_on_a_machine_without_one(tmp_path: Path) -> None:
    assert answers(tmp_path, CUDA_TORCH) == (False, False, False)


def test_the_extension_alone_is_no_hardware(tmp_path: Path) -> None:
    assert answers(tmp_path, {**CPU_TORCH, **cann(), **extension()}) == (False, False, True)


def test_the_manager_node_without_a_device_is_no_hardware(tmp_path: Path) -> None:
    files = without(SERVER, "davinci0", "/sys/")
    report = probe(True, machine(tmp_path, files))
    assert not report.present and "libascend_hal.so is there" in report.hardware.evidence
    assert "--device /dev/davinci_manager" in report.hardware.remedy


def test_a_network_card_of_the_vendor_is_no_npu(tmp_path: Path) -> None:
    assert answers(tmp_path, {**NETWORK_PCI, **CPU_TORCH})[0] is False


def test_an_npu_on_the_bus_without_nodes_is_present_and_its_driver_is_what_fails(tmp_path: Path) -> None:
    report = probe(False, machine(tmp_path, without(SERVER, "/dev/")))
    assert report.present and report.first_failure == ("driver", report.driver)


@pytest.mark.parametrize("missing", ["libascend_hal", "davinci_manager"])
def test_a_container_without_part_of_the_driver_is_told_what_to_mount(tmp_path: Path, missing: str) -> None:
    report = probe(False, machine(tmp_path, without(SERVER, missing)))
    assert report.first_failure == ("driver", report.driver)
    assert missing in report.driver.evidence and "container" in report.driver.remedy


def test_a_driver_in_a_folder_of_its_own_is_found(tmp_path: Path) -> None:
    moved = {name.replace(ASCEND, "/opt/hw"): text for name, text in DRIVER.items()}
    told = {"/etc/ascend_install.info": "Driver_Install_Type=full\nDriver_Install_Path_Param=/opt/hw\n"}
    report = probe(False, machine(tmp_path, {**without(SERVER, "driver"), **moved, **told}))
    assert report.usable and "/opt/hw/driver" in report.driver.evidence


@pytest.mark.parametrize("folder", ["lib64", "lib64/common"])
def test_the_drivers_library_is_found_in_the_folders_of_other_releases(tmp_path: Path, folder: str) -> None:
    moved = {name.replace("lib64/driver", folder): text for name, text in SERVER.items()}
    assert answers(tmp_path, moved) == (True, True, True)


def test_npus_are_listed_as_the_runtime_numbers_them_and_hidden_ones_are_not_usable(tmp_path: Path) -> None:
    assert answers(tmp_path, SERVER, ASCEND_RT_VISIBLE_DEVICES="") == (True, True, False)
    assert answers(tmp_path, SERVER, ASCEND_RT_VISIBLE_DEVICES="0,1") == (True, True, True)
    more = {"/dev/davinci2": "", "/dev/davinci10": ""}
    report = probe(False, machine(tmp_path, more, environ={"ASCEND_RT_VISIBLE_DEVICES": "1,2"}))
    assert report.devices == (DeviceInfo(0, "/dev/davinci2"), DeviceInfo(1, "/dev/davinci10"))
    assert report.hidden == "ASCEND_RT_VISIBLE_DEVICES='1,2' shows 2 of 3"


@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"])
def test_cann_is_found_by_its_variable(tmp_path: Path, variable: str) -> None:
    files = {**without(SERVER, "ascend-toolkit"), **cann(folder="/opt/cann")}
    assert answers(tmp_path, files) == (True, True, False)
    assert answers(tmp_path, files, **{variable: "/opt/cann"}) == (True, True, True)


def test_an_old_cann_is_refused_with_the_version_that_is_wanted(tmp_path: Path) -> None:
    told = f"{ASCEND}/ascend-toolkit/latest/x86_64-linux/ascend_toolkit_install.info"
    elsewhere = {**without(SERVER, "version.cfg"), told: "package_name=Ascend-cann-toolkit\nversion=8.0.RC2\n"}
    for name, files in (("a", {**SERVER, **cann("8.0.RC2")}), ("b", elsewhere)):
        report = probe(False, machine(tmp_path / name, files))
        assert report.first_failure == ("runtime", report.runtime)
        assert "CANN 8.0" in report.runtime.evidence and "8.3" in report.runtime.remedy


def test_a_missing_or_another_torch_npu_is_refused_with_the_pip_command(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    missing = probe(False, machine(tmp_path / "one", without(SERVER, "torch_npu"))).runtime
    assert not missing.holds and missing.remedy == "pip install torch_npu==2.13.0"
    (tmp_path / "two").mkdir()
    other = probe(False, machine(tmp_path / "two", {**SERVER, **extension("2.11.0.post1")})).runtime
    assert not other.holds and "torch_npu 2.11.0.post1 with torch 2.13.0" in other.evidence


def test_releases_agree_in_their_first_two_numbers() -> None:
    assert same_release("2.13.0+cpu", "2.13.0.post1") and same_release("2.11.1", "2.11.0")
    assert not same_release("2.13.0", "2.1.3")
