"""What shows that acme is here: its device nodes and its driver library. Imports no torch."""

from __future__ import annotations

from sglcore.device.probe import DeviceInfo, Fact, ProbeReport, installed_fact
from sglcore.device.system import System

NODES = "/dev/acme*"
DRIVER = "libacme.so.1"


def probe(named: bool, system: System) -> ProbeReport:
    """Four facts, each with its evidence and, where it does not hold, the remedy."""
    nodes, driver = system.glob(NODES), system.library(DRIVER)
    return ProbeReport(
        hardware=_fact(", ".join(nodes), f"no {NODES}", "plug the accelerator in, or give the container its nodes"),
        driver=_fact(driver or "", f"no {DRIVER}", "install the driver"),
        package=installed_fact("sglcore_acme", "sglcore-acme", "pip install sglcore-acme"),
        runtime=installed_fact("torch", "torch", "pip install torch==2.13.0"),
        devices=tuple(DeviceInfo(index, node) for index, node in enumerate(nodes)),
    )


def _fact(found: str, missing: str, remedy: str) -> Fact:
    return Fact(True, found) if found else Fact(False, missing, remedy)
