"""The installer reads a checkout in which nothing is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import sglcore

ROOT = Path(sglcore.__file__).parents[1]
PROBE = """
from sglcore.device.probe import Fact, ProbeReport
def probe(named, system):
    {body}
    return ProbeReport(hardware=Fact({hardware}, "seen"), driver=Fact(True, ""), package=Fact(True, ""), runtime=Fact(True, ""))
"""
DECLARATION = """
from sglcore.device.package import DevicePackage
package = DevicePackage(name={name!r}, api=3, summary="planted", is_host={is_host}, probe="sglcore_{name}.probe:probe",
    facts="a:b", worker="a:b", attention={{}}, graphs={{}}, kernels={{"own": "a:b"}}, bring_up="a:b")
"""

EDIT = "--no-build-isolation -e "


def checkout(root: Path, name: str, *, is_host: bool = False, hardware: bool = True, body: str = "pass") -> None:
    """Plant a device package in a checkout whose core is this one."""
    if not (root / "sglcore").exists():
        (root / "sglcore").symlink_to(ROOT / "sglcore")
        (root / "constraints.txt").write_text("# pins\ntorch==1.2.3\nnumpy==2\n")
    module = root / "devices" / name / f"sglcore_{name}"
    module.mkdir(parents=True)
    entry = f'[project.entry-points."sglcore.devices"]\n{name} = "sglcore_{name}:package [api-3]"\n'
    (module.parent / "pyproject.toml").write_text(entry)
    (module / "__init__.py").write_text(DECLARATION.format(name=name, is_host=is_host))
    (module / "probe.py").write_text(PROBE.format(hardware=hardware, body=body))


def dry_run(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the installer without site packages, as on a fresh machine."""
    command = (sys.executable, "-I", "-S", str(ROOT / "tools" / "install_devices.py"), "--dry-run", "--root", str(root))
    return subprocess.run((*command, *words), capture_output=True, text=True, timeout=60, check=False)


def commands(ran: subprocess.CompletedProcess[str]) -> list[str]:
    """The pip commands, without the options that all have."""
    lines = (line for line in ran.stdout.splitlines() if line.startswith("+ "))
    return [line.partition("-c constraints.txt ")[2] for line in lines]


def test_the_host_and_present_accelerators_are_installed_after_the_pinned_torch(tmp_path: Path) -> None:
    checkout(tmp_path, "host", is_host=True)
    checkout(tmp_path, "here")
    checkout(tmp_path, "absent", hardware=False)
    ran = dry_run(tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert commands(ran) == ["torch==1.2.3", "setuptools>=77", f"{EDIT}.", f"{EDIT}devices/here -e devices/host"]
    assert "absent: planted: not on this machine" in ran.stdout


def test_an_extra_and_an_index_for_torch_are_passed_on(tmp_path: Path) -> None:
    checkout(tmp_path, "host", is_host=True)
    ran = dry_run(tmp_path, "--extra", "test", "--torch-index", "https://example.org/whl")
    first, _, *last = commands(ran)
    assert first == "--index-url https://example.org/whl torch==1.2.3"
    assert last == [f"{EDIT}.[test]", f"{EDIT}devices/host"]


def test_an_extra_is_taken_from_the_packages_that_declare_it_too(tmp_path: Path) -> None:
    checkout(tmp_path, "host", is_host=True)
    checkout(tmp_path, "one")
    declared = tmp_path / "devices" / "one" / "pyproject.toml"
    declared.write_text('[project.optional-dependencies]\ntest = ["an-oracle"]\n' + declared.read_text())
    assert commands(dry_run(tmp_path, "--extra", "test"))[-1] == f"{EDIT}devices/host -e devices/one[test]"
    assert commands(dry_run(tmp_path))[-1] == f"{EDIT}devices/host -e devices/one"


def test_a_probe_that_raises_stops_the_installation_with_its_traceback(tmp_path: Path) -> None:
    checkout(tmp_path, "host", is_host=True)
    checkout(tmp_path, "one", body="raise RuntimeError('the node is locked')")
    ran = dry_run(tmp_path)
    assert ran.returncode == 1
    assert "RuntimeError: the node is locked" in ran.stderr
    assert commands(ran) == []


def test_this_checkout_installs_the_processor_with_the_pinned_torch() -> None:
    ran = dry_run(ROOT)
    assert ran.returncode == 0, ran.stderr
    assert commands(ran)[0].startswith("torch==2.13.0")
    assert "devices/cpu" in commands(ran)[-1]


def test_this_checkouts_tests_get_every_package_and_what_their_oracles_need() -> None:
    ran = dry_run(ROOT, "--extra", "test", "--all")
    words = commands(ran)[-1].split()
    folders = {path.parent.name for path in (ROOT / "devices").glob("*/pyproject.toml")}
    assert {word.partition("[")[0] for word in words if word.startswith("devices/")} == {
        f"devices/{x}" for x in folders
    }
    assert "devices/mlx[test]" in words
