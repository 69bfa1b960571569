"""Probe reports, and the scan for accelerators that no package claims."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sglcore.device.candidate import claims_of
from sglcore.device.discovery import discover
from sglcore.device.pci import DISPLAY_CLASS, PciClaim, PciDevice, claimed_devices, pci_devices, unclaimed_devices
from sglcore.device.probe import Fact, ProbeReport, installed_fact
from tests.device.site import Site

YES, NO = Fact(True, "seen"), Fact(False, "not seen", "do something")
REPORT = ProbeReport(hardware=YES, driver=YES, package=YES, runtime=YES)


@pytest.mark.parametrize("name", ["hardware", "driver", "package", "runtime"])
def test_one_failing_fact_makes_a_device_unusable_and_is_named(name: str) -> None:
    report = replace(REPORT, **{name: NO})
    assert not report.usable
    assert report.first_failure == (name, NO)
    assert report.present == (name != "hardware")


def test_a_report_in_which_all_holds_is_usable() -> None:
    assert REPORT.usable and REPORT.present and REPORT.first_failure is None


def test_the_first_failure_comes_in_the_order_of_dependence() -> None:
    report = ProbeReport(hardware=YES, driver=NO, package=NO, runtime=NO)
    assert report.first_failure == ("driver", NO)


def test_details_are_a_frozen_copy() -> None:
    given = {"cores": "2"}
    report = replace(REPORT, details=given)
    given.clear()
    assert report.details == {"cores": "2"}


def test_a_module_is_found_without_importing_it(site: Site) -> None:
    (site.path / "planted_module.py").write_text("raise AssertionError('imported')")
    assert installed_fact("planted_module", "planted", "").holds
    assert not installed_fact("no_such_module", "planted", "").holds


def bus(root: Path, **devices: tuple[str, str, str]) -> Path:
    """Make a folder like /sys/bus/pci/devices, with (vendor, device, class) for each address."""
    for address, values in devices.items():
        (root / address).mkdir(parents=True)
        for name, value in zip(("vendor", "device", "class"), values, strict=True):
            (root / address / name).write_text(f"{value}\n")
    return root


def test_accelerators_on_the_bus_that_nobody_claims_are_found(tmp_path: Path) -> None:
    pci = bus(
        tmp_path,
        a=("0x1111", "0x0001", "0x030200"),
        b=("0x2222", "0x0002", "0x120000"),
        c=("0x3333", "0x0003", "0x038000"),
        screen=("0x1111", "0x0004", "0x030000"),
        disk=("0x1111", "0x0005", "0x010802"),
    )
    assert [device.address for device in unclaimed_devices((), pci_devices(pci))] == ["a", "b", "c"]
    (left,) = unclaimed_devices({PciClaim(0x1111), PciClaim(0x3333)}, pci_devices(pci))
    assert (left.vendor_id, left.device_id, left.pci_class) == (0x2222, 0x0002, 0x1200)


def test_a_machine_without_the_bus_has_none(tmp_path: Path) -> None:
    assert pci_devices(tmp_path / "nothing") == ()


def test_a_device_that_leaves_the_bus_during_the_scan_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "going").mkdir()
    for name in ("vendor", "device", "class"):
        (tmp_path / "going" / name).touch()
    assert pci_devices(tmp_path) == ()


class OfTheVendor(PciClaim):
    """Mutant: a claim that compares the vendor only."""

    def covers(self, device: PciDevice) -> bool:
        return device.vendor_id == self.vendor_id


@pytest.mark.parametrize(("claim", "holds"), [(PciClaim, True), (OfTheVendor, False)])
def test_a_claim_is_of_a_vendor_and_of_classes_and_one_of_the_vendor_alone_is_caught(
    tmp_path: Path, claim: type[PciClaim], holds: bool
) -> None:
    """The GPU, the display controller and the network processor of one vendor: a claim for one kind
    leaves the others unclaimed."""
    pci = pci_devices(
        bus(
            tmp_path,
            card=("0x1111", "0x0001", "0x038000"),
            graphics=("0x1111", "0x0002", "0x030000"),
            network=("0x1111", "0x0003", "0x120000"),
        )
    )
    cards, screens = claim(0x1111, frozenset({0x0302, 0x0380})), claim(0x1111, frozenset({DISPLAY_CLASS}))
    taken = [device.address for device in claimed_devices({cards, screens}, pci)]
    left = [device.address for device in unclaimed_devices({cards, screens}, pci)]
    by_default = [device.address for device in claimed_devices({claim(0x1111)}, pci)]
    assert ((taken, left, by_default) == (["card", "graphics"], ["network"], ["card", "network"])) is holds


def test_packages_claim_vendors(site: Site) -> None:
    site.add("one", vendors=(0x1111,))
    site.add("two", vendors=(0x2222, 0x3333))
    site.add("broken", tag="[api-9]", vendors=(0x4444,))
    assert {claim.vendor_id for claim in claims_of(site.discover())} == {0x1111, 0x2222, 0x3333}


def test_the_installed_probes_import_no_tensor_library(site: Site) -> None:
    code = (
        "import sys; from sglcore.device.discovery import discover; from sglcore.device.candidate import run_probe\n"
        "[run_probe(item.loaded(), True) for item in discover()]\n"
        "assert not {'torch', 'mlx', 'numpy'} & set(sys.modules)"
    )
    assert discover()
    ran = site.run("-c", code)
    assert ran.returncode == 0, ran.stderr
