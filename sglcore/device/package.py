"""What a device is, as data. A device package declares one `DevicePackage` and nothing else at import.

Every reference is a `"module:name"` string that is imported when it is used, so that a declaration costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeAlias

from sglcore.device.errors import ConfigError, DeviceError
from sglcore.device.pci import PciClaim
from sglcore.device.topology import Communication

API = 3
"""The number of the contract that this core understands, and that a package declares."""

Ref: TypeAlias = str
"""`"module:name"`: something that is imported only when it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePackage:
    """One device, as data. `sglcore.devices` entry points name an instance of it, with its API number as `[api-N]`."""

    name: str
    """What `--device` calls it."""
    api: int
    """The number of the contract it was written for; write `API` as a literal, so that it does not change with the core."""
    summary: str
    """One line for people: what it runs on."""
    is_host: bool = False
    """True for the processor itself, which is chosen when no accelerator is present."""
    probe: Ref
    """`probe(named: bool, system: System) -> ProbeReport`: looks through `system` only; `named` when a person asked for
    this device."""
    facts: Ref
    """`facts(index: int) -> Facts`: the values by which the device of this number differs from others. It runs anywhere,
    with no such device present too."""
    worker: Ref
    """The `ModelWorker` that the scheduler submits to."""
    attention: Mapping[str, Ref]
    """Attention backends by name, the preferred first."""
    graphs: Mapping[str, Ref]
    """Graph backends by kind, each `factory(facts, streams) -> GraphBackend`; empty when the device needs none."""
    kernels: Mapping[str, Ref]
    """Kernel tables by name, the preferred first, each `kernels() -> KernelTable`: the functions that this device replaces,
    over the reference; ConfigError where one can not serve here. A device with a runtime of its own gives a record whose
    `origin` says by name what runs each operation."""
    bring_up: Ref
    """The `BringUp` order of its start."""
    pci: frozenset[PciClaim] = field(default=frozenset())
    """The devices on the PCI bus for which this package answers."""
    communication: Communication | None = None
    """By what several of it exchange tensors; None: a model runs on one."""
    partition: Ref | None = None
    """`partition(device) -> Partition`: streams that keep to some of its compute units; ConfigError where it has none. None: none has."""

    def __post_init__(self) -> None:
        """Freeze the mappings as copies; refuse references that are not `module:name`, and a package without kernels."""
        object.__setattr__(self, "attention", MappingProxyType(dict(self.attention)))
        object.__setattr__(self, "graphs", MappingProxyType(dict(self.graphs)))
        object.__setattr__(self, "kernels", MappingProxyType(dict(self.kernels)))
        object.__setattr__(self, "pci", frozenset(self.pci))
        if not self.kernels:
            raise DeviceError(f"{_owner(self.name)} names no kernel table", wanted="at least one in `kernels`")
        for ref in self.refs():
            split(ref, package=self.name)

    def refs(self) -> tuple[Ref, ...]:
        """Every reference of the declaration, in reading order."""
        named = (*self.attention.values(), *self.graphs.values(), *self.kernels.values())
        return (self.probe, self.facts, self.worker, *named, self.bring_up, *filter(None, (self.partition,)))

    def kernels_for(self, asked: str, *others: str) -> str:
        """The name that `--kernels` means: the preferred table's for "auto". Raises ConfigError for what is neither a
        table's name nor one of `others`."""
        names = tuple(dict.fromkeys((*self.kernels, *others)))
        if asked not in ("auto", *names):
            raise ConfigError(f"kernels is {asked!r}", wanted=f"one of auto, {', '.join(names)}")
        return names[0] if asked == "auto" else asked


def split(ref: Ref, package: str = "") -> tuple[str, str]:
    """The module and the dotted name of a reference; raises `DeviceError` when it is not `module:name`."""
    module, _, name = ref.partition(":")
    parts = (*module.split("."), *name.split("."))
    if not all(part.isidentifier() for part in parts):
        raise DeviceError(f"{_owner(package)} refers to {ref!r}", wanted="a reference such as 'package.module:name'")
    return module, name


def resolve(ref: Ref, package: str = "") -> Any:
    """Import what a reference names.

    Raises `DeviceError` when the module or the name does not exist. An error inside the module keeps its own traceback
    and gets a note that says who asked for it.
    """
    module_name, name = split(ref, package)
    found = _import(module_name, ref, package)
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise DeviceError(
                f"{_owner(package)} refers to {ref!r}, but module {module_name!r} has no attribute {name!r}",
                remedy=_remedy(package),
            ) from None
    return found


def _import(module_name: str, ref: Ref, package: str) -> Any:
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise DeviceError(
                f"{_owner(package)} refers to {ref!r}, but there is no module {error.name!r}", remedy=_remedy(package)
            ) from None
        error.add_note(f"while importing {ref!r}, to which {_owner(package)} refers")
        raise
    except Exception as error:
        error.add_note(f"while importing {ref!r}, to which {_owner(package)} refers")
        raise


def _owner(package: str) -> str:
    return f"device package {package!r}" if package else "a declaration"


def _remedy(package: str) -> str:
    return f"pip install --upgrade sglcore-{package}" if package else "correct the reference"
