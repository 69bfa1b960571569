"""The answer of a probe: four separate facts, each with evidence and remedy, and the devices.
Standard library only.

A probe reads the system (device nodes, driver libraries, package metadata) and never imports a
tensor library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Fact:
    """One statement that holds or not, its evidence, and the remedy. `is_wanted`: it does not hold
    because an environment variable hides every device on purpose; an automatic choice skips such a
    device instead of ending the start.
    """

    holds: bool
    evidence: str
    remedy: str = ""
    is_wanted: bool = False


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One of a package's devices, from the system's files; unknown values are None.

    `index` is its number among the devices that this process may use, as the vendor's runtime
    counts them. `name`: its model, or else its device node. `memory`: bytes of its own memory.
    `is_busy`: whether work runs on it now. `uuid`: its name in the vendor's variables.
    """

    index: int
    name: str
    memory: int | None = None
    is_busy: bool | None = None
    pci_address: str | None = None
    uuid: str | None = None

    def __str__(self) -> str:
        """Return a description for users, without the index, such as "NAME at 0000:3b:00.0, 80.0
        GiB, idle".
        """
        memory = "memory unknown" if self.memory is None else f"{self.memory / (1 << 30):.1f} GiB"
        use = {True: "busy", False: "idle", None: "use unknown"}[self.is_busy]
        place = "" if self.pci_address is None else f" at {self.pci_address}"
        return f"{self.name}{place}, {memory}, {use}"


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Whether the hardware and its driver are present, the package can be imported, and its runtime
    can be used.

    `devices` are those that this process may use, by index; empty if the files do not tell their
    number. `hidden` names the variable that hides others; empty if none does. `details`: further
    text by name, for reports.
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
        """The four facts by name, in the order of their dependence: hardware, driver, package,
        runtime."""
        return MappingProxyType(
            {"hardware": self.hardware, "driver": self.driver, "package": self.package, "runtime": self.runtime}
        )

    @property
    def present(self) -> bool:
        """Whether the hardware was found."""
        return self.hardware.holds

    @property
    def usable(self) -> bool:
        """Whether all four facts hold."""
        return self.first_failure is None

    @property
    def first_failure(self) -> tuple[str, Fact] | None:
        """The first fact that does not hold, with its name; None if all hold."""
        return next(((name, fact) for name, fact in self.facts.items() if not fact.holds), None)

    @property
    def hiding(self) -> Fact | None:
        """The fact that does not hold because a variable hides every device from this process; None
        if there is no such variable.
        """
        return next((fact for fact in self.facts.values() if fact.is_wanted), None)


def installed_fact(module: str, distribution: str, remedy: str) -> Fact:
    """Return the fact whether the top-level module `module` can be found, with the name and version
    of its distribution as evidence, or `remedy` if it cannot. Nothing is imported.
    """
    if find_spec(module) is None:
        return Fact(False, f"there is no module {module!r}", remedy)
    try:
        return Fact(True, f"{distribution} {version(distribution)}")
    except PackageNotFoundError:
        return Fact(True, f"module {module!r} without a distribution {distribution!r}")
