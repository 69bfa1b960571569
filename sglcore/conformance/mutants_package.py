"""Broken declarations: probes, facts, orders and backends that a package must not have. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglcore.conformance.mutant import Mutant
from sglcore.device.bring_up import BringUp
from sglcore.device.facts import Facts
from sglcore.device.package import DevicePackage
from sglcore.device.probe import Fact, ProbeReport
from sglcore.device.system import System

HERE = "sglcore.conformance.mutants_package"


def heavy_probe(named: bool, system: System) -> ProbeReport:
    """Asks a tensor library."""
    import torch

    fact = Fact(True, f"torch {torch.__version__}")
    return ProbeReport(fact, fact, fact, fact)


def opening_probe(named: bool, system: System) -> ProbeReport:
    """Opens a device node."""
    with open("/dev/zero", "rb"):
        fact = Fact(True, "it opens")
    return ProbeReport(fact, fact, fact, fact)


def raising_probe(named: bool, system: System) -> ProbeReport:
    """Takes a file for granted."""
    text = system.read("/no/such/file")
    assert text is not None, "the driver's file is missing"
    fact = Fact(True, text)
    return ProbeReport(fact, fact, fact, fact)


def silent_probe(named: bool, system: System) -> ProbeReport:
    """Says no, and not why."""
    fact = Fact(False, "nothing is there", "")
    return ProbeReport(fact, fact, fact, fact)


def lying_probe(named: bool, system: System) -> ProbeReport:
    """Sees hardware wherever a module can be found."""
    fact = Fact(True, "a module of that name can be found")
    return ProbeReport(fact, fact, fact, fact)


def blind_probe(named: bool) -> ProbeReport:
    """Looks at the machine it runs on, whichever it is given."""
    fact = Fact(True, "here")
    return ProbeReport(fact, fact, fact, fact)


def wrong_facts(index: int = 0) -> Facts:
    """A graph kind that nobody offers."""
    return Facts(tensor_device="cpu", shares_host_memory=True, default_graph="none such")


class HalfAttention:
    """Not a backend."""


def _probe(name: str, says: str, function: Callable[..., object], **more: Any) -> Mutant:
    ref = f"{HERE}:{getattr(function, '__name__')}"  # noqa: B009
    return Mutant(name=name, says=says, package=lambda package: replace(package, probe=ref, **more))


def _names_nothing(package: DevicePackage) -> DevicePackage:
    return replace(package, kernels={**package.kernels, "none": f"{HERE}:no_such_name"})


def _half_attention(package: DevicePackage) -> DevicePackage:
    return replace(package, attention={**package.attention, "half": f"{HERE}:HalfAttention"})


def worker_first(order: BringUp) -> BringUp:
    """The last step first."""
    return BringUp((order.steps[-1], *order.steps[:-1]))


def warm_up(config: Any) -> None:
    """A step that nobody wrote down."""


def _unwritten(order: BringUp) -> BringUp:
    return BringUp((*order.steps, *BringUp((warm_up,)).steps))


NAMES_NOTHING = Mutant(name="names nothing", says="A reference to what is not there.", package=_names_nothing)
HEAVY_PROBE = _probe("heavy probe", "A probe that asks a tensor library.", heavy_probe)
OPENS_NODE = _probe("opens a node", "A probe that opens a device node.", opening_probe)
RAISING_PROBE = _probe("raising probe", "A probe that takes a file for granted.", raising_probe)
SILENT_PROBE = _probe("silent probe", "A fact without a remedy.", silent_probe)
LYING_PROBE = _probe("lying probe", "Hardware is seen where there is none.", lying_probe, is_host=False)
WRONG_ORDER = Mutant(name="wrong order", says="The worker is made before what it needs.", order=worker_first)
UNWRITTEN_STEP = Mutant(name="unwritten step", says="A step that the text lacks.", order=_unwritten)
WRONG_FACTS = Mutant(
    name="wrong facts",
    says="A default graph that is not offered.",
    package=lambda package: replace(package, facts=f"{HERE}:wrong_facts"),
)
BLIND_PROBE = _probe("blind probe", "A probe that takes no system.", blind_probe)
HALF_ATTENTION = Mutant(
    name="half attention", says="A backend without the contract's methods.", package=_half_attention
)
