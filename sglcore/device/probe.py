"""What a probe answers: four separate facts, each with its evidence and the remedy, and the devices. Standard library only.

A probe reads the system (device nodes, driver libraries, package metadata) and never imports a tensor library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that holds or not, how that was seen, and what to do about it. `is_wanted`: it does not hold because
    somebody said so, by a variable; a start that nobody gave a device passes this one by."""

    holds: bool
    evidence: str
    remedy: str = ""
    is_wanted: bool = False


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One of a package's devices, as the system's files tell it; what they do not tell is None.

    `index` is its number among those that this process may use, as the vendor's runtime counts them. `name`: its model, or
    else its node. `memory`: bytes of its own. `is_busy`: somebody works on it now. `uuid`: what the vendor's variables may
    call it.
    """

    index: int
    name: str
    memory: int | None = None
    is_busy: bool | None = None
    pci_address: str | None = None
    uuid: str | None = None

    def __str__(self) -> str:
        """For people; the index stands before it where it is needed."""
        memory = "memory unknown" if self.memory is None else f"{self.memory / (1 << 30):.1f} GiB"
        use = {True: "busy", False: "idle", None: "use unknown"}[self.is_busy]
        place = "" if self.pci_address is None else f" at {self.pci_address}"
        return f"{self.name}{place}, {memory}, {use}"


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Is the hardware there, is its driver, can the package be imported, can its runtime be used?

    `devices` are those that this process may use, by index; none where the files do not tell how many there are. `hidden`
    says by which variable others are kept from it; empty: none is.
    """

    hardware: Fact
    driver: Fact
    package: Fact
    runtime: Fact
    details: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[DeviceInfo, ...] = ()
    hidden: str = ""

    def __post_init__(self) -> None:
        """Freeze details and devices as copies."""
        object.__setattr__(self, "details", MappingProxyType(dict(self.details)))
        object.__setattr__(self, "devices", tuple(self.devices))

    @property
    def facts(self) -> Mapping[str, Fact]:
        """The four facts by name, in the order in which they depend on each other."""
        return MappingProxyType(
            {"hardware": self.hardware, "driver": self.driver, "package": self.package, "runtime": self.runtime}
        )

    @property
    def present(self) -> bool:
        """The hardware was seen."""
        return self.hardware.holds

    @property
    def usable(self) -> bool:
        """All four facts hold."""
        return self.first_failure is None

    @property
    def first_failure(self) -> tuple[str, Fact] | None:
        """The first fact that does not hold, with its name; None when all hold."""
        return next(((name, fact) for name, fact in self.facts.items() if not fact.holds), None)

    @property
    def hiding(self) -> Fact | None:
        """The fact that does not hold because somebody hides every device from this process; None if nobody does."""
        return next((fact for fact in self.facts.values() if fact.is_wanted), None)


def installed_fact(module: str, distribution: str, remedy: str) -> Fact:
    """Whether a module can be found, with the version of its distribution as the evidence. Nothing is imported."""
    if find_spec(module) is None:
        return Fact(False, f"there is no module {module!r}", remedy)
    try:
        return Fact(True, f"{distribution} {version(distribution)}")
    except PackageNotFoundError:
        return Fact(True, f"module {module!r} without a distribution {distribution!r}")
