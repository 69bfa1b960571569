"""What shows that acme is here: its device nodes, its driver library, its torch extension. Imports
no torch."""

from __future__ import annotations

from sglcore.device.probe import DeviceInfo, Fact, ProbeReport, installed_fact
from sglcore.device.system import System
from sglcore.device.visible import visible_devices
from sglcore_acme import package

NODES = "/dev/acme*"
DRIVER = "libacme.so.1"
EXTENSION = "torch_acme"
VISIBLE = "ACME_VISIBLE_DEVICES"


def probe(named: bool, system: System) -> ProbeReport:
    """Four facts, each with its evidence and, where it does not hold, the remedy."""
    nodes, driver = system.numbered(NODES), system.library(DRIVER)
    on_bus = ", ".join(map(str, system.pci(package.pci)))
    found = [DeviceInfo(index, node) for index, node in enumerate(nodes)]
    seen = visible_devices(found, system.environ, VISIBLE)
    return ProbeReport(
        hardware=_fact(
            ", ".join(nodes) or on_bus, f"no {NODES}", "plug the accelerator in, or give the container its nodes"
        ),
        driver=_fact(driver or "", f"no {DRIVER}", "install the driver"),
        package=installed_fact("sglcore_acme", "sglcore-acme", "pip install sglcore-acme"),
        runtime=seen.failure or _runtime(system),
        devices=seen.devices,
        hidden=seen.hidden,
    )


def _runtime(system: System) -> Fact:
    found = EXTENSION if system.module(EXTENSION) else ""
    return _fact(found, f"no module {EXTENSION}", f"pip install {EXTENSION}")


def _fact(found: str, missing: str, remedy: str) -> Fact:
    return Fact(True, found) if found else Fact(False, missing, remedy)
