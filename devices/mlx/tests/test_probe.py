"""Tests of the probe on machines where MLX may run: Macs, and Linux, where MLX must be asked for by
name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglcore.device.probe import DeviceInfo
from sglcore.device.system import System
from sglcore_mlx.facts import device_kind, facts
from sglcore_mlx.probe import Build, mlx_build, probe
from tests.device.machines import NVIDIA, Files, machine


def sysctl(**values: str | int) -> Files:
    """Return sysctl values of macOS; a double underscore stands for a dot."""
    return {f"/sysctl/{name.replace('__', '.')}": f"{value}\n" for name, value in values.items()}


def macos(version: str) -> Files:
    """Return macOS's version file."""
    lines = ("<plist version='1.0'><dict>", f"<key>ProductVersion</key><string>{version}</string>", "</dict></plist>")
    return {"/System/Library/CoreServices/SystemVersion.plist": "\n".join(lines)}


def mlx(version: str, backend: str = "", backend_version: str = "") -> Files:
    """Return the files of an MLX that pip installed."""
    files = {
        "/site-packages/mlx/__main__.py": "raise RuntimeError('imported by a probe')",
        f"/site-packages/mlx-{version}.dist-info/METADATA": "",
    }
    folder = f"{backend.replace('-', '_')}-{backend_version or version}.dist-info"
    return {**files, f"/site-packages/{folder}/METADATA": ""} if backend else files


M3 = sysctl(
    machdep__cpu__brand_string="Apple M3 Max", hw__optional__arm64=1, hw__memsize=128 << 30, sysctl__proc_translated=0
)
MAC = {**M3, **macos("15.1"), **mlx("0.32.4", "mlx-metal")}
LINUX = {"/proc/cpuinfo": "processor\t: 0\nmodel name\t: A Processor 9000\n"}


def without(files: Files, *parts: str) -> Files:
    """Return the files without those with one of `parts` in their path."""
    return {name: text for name, text in files.items() if not any(part in name for part in parts)}


def answers(root: Path, *files: Files, named: bool = False) -> tuple[bool, bool, bool]:
    """Return whether hardware, driver and runtime hold. Asserts that every fact has evidence, and a
    remedy if it does not hold."""
    report = probe(named, machine(root, *files))
    assert report.package.holds
    assert all(fact.evidence for fact in report.facts.values())
    assert all(fact.remedy for fact in report.facts.values() if not fact.holds)
    return report.hardware.holds, report.driver.holds, report.runtime.holds


@pytest.mark.parametrize("named", [False, True])
def test_a_mac_with_apple_silicon_is_usable_and_described(tmp_path: Path, named: bool) -> None:
    report = probe(named, machine(tmp_path, MAC))
    assert report.usable
    assert "Apple M3 Max" in report.hardware.evidence and "macOS 15.1" in report.driver.evidence
    assert report.runtime.evidence == "mlx 0.32.4, mlx-metal 0.32.4"
    assert report.devices == (DeviceInfo(0, "Apple M3 Max", 128 << 30),)
    assert report.details == {"chip": "Apple M3 Max", "macos": "15.1", "mlx": "0.32.4", "build": "mlx-metal"}


def test_nothing_is_seen_on_an_empty_machine_even_by_name(tmp_path: Path) -> None:
    assert answers(tmp_path, named=True) == (False, False, False)


def test_a_mac_with_an_intel_processor_is_no_hardware_even_by_name(tmp_path: Path) -> None:
    intel = sysctl(machdep__cpu__brand_string="Intel(R) Core(TM) i9")
    report = probe(True, machine(tmp_path, without(MAC, "sysctl"), intel))
    assert not report.present and "Intel(R) Core(TM) i9" in report.hardware.evidence


def test_an_old_macos_is_present_and_its_version_is_what_fails(tmp_path: Path) -> None:
    report = probe(False, machine(tmp_path, {**MAC, **macos("13.6.1")}))
    assert report.first_failure == ("driver", report.driver)
    assert "macOS 13.6.1" in report.driver.evidence and "14.0" in report.driver.remedy


@pytest.mark.parametrize("text", ["", "bplist00\0", "<plist><dict></dict></plist>"])
def test_a_version_file_that_says_nothing_does_not_hide_the_mac(tmp_path: Path, text: str) -> None:
    files = {**MAC, "/System/Library/CoreServices/SystemVersion.plist": text}
    report = probe(False, machine(tmp_path, files))
    assert report.usable and "of unknown version" in report.driver.evidence


def test_a_python_that_runs_translated_is_told_to_be_another(tmp_path: Path) -> None:
    report = probe(False, machine(tmp_path, {**MAC, **sysctl(sysctl__proc_translated=1)}))
    assert report.first_failure == ("runtime", report.runtime)
    assert "arm64" in report.runtime.remedy


@pytest.mark.parametrize(
    ("installed", "evidence", "remedy"),
    [
        ({}, "no module 'mlx'", "pip install mlx"),
        (mlx("0.32.4"), "without the library", "pip install mlx"),
        (mlx("0.20.1", "mlx-metal"), "mlx 0.20.1", "mlx>=0.32"),
        (mlx("0.32.4", "mlx-metal", "0.32.1"), "mlx-metal 0.32.1; they must be of one version", "mlx-metal==0.32.4"),
    ],
)
def test_a_mac_without_a_usable_mlx_is_told_what_to_install(
    tmp_path: Path, installed: Files, evidence: str, remedy: str
) -> None:
    report = probe(False, machine(tmp_path, without(MAC, "site-packages"), installed))
    assert report.first_failure == ("runtime", report.runtime)
    assert evidence in report.runtime.evidence and remedy in report.runtime.remedy


def test_linux_is_no_hardware_until_it_is_asked_for_by_name(tmp_path: Path) -> None:
    files = (LINUX, mlx("0.32.4", "mlx-cpu"))
    report = probe(False, machine(tmp_path, *files))
    assert not report.present and "by name" in report.hardware.evidence and "--device mlx" in report.hardware.remedy
    report = probe(True, machine(tmp_path, *files))
    assert report.usable and "A Processor 9000" in report.hardware.evidence
    assert report.runtime.evidence == "mlx 0.32.4, mlx-cpu 0.32.4"


@pytest.mark.parametrize("installed", [{}, mlx("0.32.4")])
def test_linux_without_a_build_of_mlx_is_told_which_there_are(tmp_path: Path, installed: Files) -> None:
    report = probe(True, machine(tmp_path, LINUX, installed))
    assert report.first_failure == ("runtime", report.runtime)
    assert "mlx[cpu]" in report.runtime.remedy and "mlx[cuda13]" in report.runtime.remedy


def test_a_build_for_cuda_wants_its_nodes_its_driver_and_its_name(tmp_path: Path) -> None:
    build = mlx("0.32.4", "mlx-cuda-13")
    assert answers(tmp_path / "all", LINUX, NVIDIA, build) == (False, True, True)
    assert answers(tmp_path / "all", named=True) == (True, True, True)
    assert answers(tmp_path / "no nodes", LINUX, without(NVIDIA, "/dev/"), build, named=True) == (False, True, True)
    assert answers(tmp_path / "no driver", LINUX, without(NVIDIA, "libcuda"), build, named=True) == (True, False, True)


def test_a_build_from_source_is_known_by_its_library(tmp_path: Path) -> None:
    system = machine(tmp_path, mlx("0.33.0.dev1"), {"/site-packages/mlx/lib/libmlx.so": ""})
    assert mlx_build(system) == Build("0.33.0.dev1", "source", "0.33.0.dev1")


def test_on_this_machine_it_is_the_installed_build_and_the_facts_follow_it() -> None:
    build = mlx_build(System())
    assert build is not None and build.backend and not build.is_cuda
    assert device_kind() == ("gpu" if sys.platform == "darwin" else "cpu")
    assert facts() == facts() and facts().shares_host_memory and not facts().has_streams


def test_the_probe_and_the_facts_import_no_array_library() -> None:
    code = (
        "import sys\n"
        "from sglcore.device.system import host_system\n"
        "from sglcore_mlx import package\n"
        "from sglcore_mlx.facts import facts\n"
        "from sglcore_mlx.probe import probe\n"
        "probe(True, host_system()), facts()\n"
        "print(sorted({'mlx', 'numpy', 'torch', 'mlx_lm', 'transformers'} & set(sys.modules)))\n"
    )
    ran = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "[]", ran.stderr
