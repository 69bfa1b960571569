"""What a device is, as data. A device package declares one `DevicePackage` and does nothing else at
import.

Every reference (import_references.py) is a `"module:name"` string that is imported when it is used,
so a declaration costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from sglcore.core.errors import ConfigError, DeviceError
from sglcore.device.adapter import adapted
from sglcore.device.import_references import Ref, modules, owner
from sglcore.device.import_references import resolve as resolve
from sglcore.device.pci import PciClaim
from sglcore.worker.topology import Communication

API = 3
"""The contract's API number that new packages declare. docs/add-a-device.md says what a number
promises.
"""
OLDEST = 3
"""The first API number that stays supported when the next one comes."""

Made = TypeVar("Made")


def understood(api: int = API) -> range:
    """Return the API numbers of packages that a core with number `api` supports: its own and the
    previous one, but none below `OLDEST`.
    """
    return range(max(OLDEST, api - 1), api + 1)


class Adapting(type):
    """Metaclass that also accepts keywords of an older API number; adapter.py adds what
    they lack.
    """

    def __call__(cls: type[Made], **given: Any) -> Made:
        """Make an instance from keywords that `adapter.adapted` converts. Raises what the class
        itself raises.
        """
        return type.__call__(cls, **adapted(given))


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePackage(metaclass=Adapting):
    """The declaration of one kind of device, as data: its name and API number, and references to
    its probe, facts, worker, attention and graph backends, kernel tables and bring-up order.
    `sglcore.devices` entry points name an instance of it, with its API number as `[api-N]`.
    """

    name: str
    """The name for `--device`."""
    api: int
    """The API number for which the package was written. Write `API` as a literal, so that it does
    not change with the core. Adapters convert packages of the previous number to the current one.
    """
    summary: str
    """One line for users: the hardware that it runs on."""
    is_host: bool = False
    """Whether it is the processor itself, which is chosen when no accelerator is present."""
    probe: Ref
    """`probe(named: bool, system: System) -> ProbeReport`: reads the machine through `system` only.
    `named`: a user requested this device by name.
    """
    facts: Ref
    """`facts(index: int) -> Facts`: the values in which the device with this index differs from
    others. It must run on any machine, also without such a device.
    """
    worker: Ref
    """The class of the `ModelWorker` to which the scheduler submits. The bring-up's step `worker`
    calls it, with arguments of its own.
    """
    attention: Mapping[str, Ref]
    """The classes of the attention backends by name, the preferred first."""
    graphs: Mapping[str, Ref]
    """Graph backends by kind, each `factory(facts, streams) -> GraphBackend`; empty if the device
    needs none.
    """
    kernels: Mapping[str, Ref]
    """Kernel tables by name, the preferred first, each `kernels() -> KernelTable`: the functions
    that replace those of the reference; ConfigError if one cannot be used here. A device with its
    own runtime gives a record with an `origin`, which names what runs each operation.
    """
    bring_up: Ref
    """The `BringUp` value with the order of its start-up."""
    pci: frozenset[PciClaim] = field(default=frozenset())
    """The PCI devices that belong to this package."""
    communication: Communication | None = None
    """How several of its devices exchange tensors; None: a model runs on one device."""
    partition: Ref | None = None
    """`partition(device) -> Partition`: streams that are limited to some of its compute units;
    ConfigError if this device has none. None: no device of the package has.
    """
    written_for: int | None = None
    """The API number that it declared, if adapter.py converted it to `api`. A package leaves it
    out.
    """

    def __post_init__(self) -> None:
        """Freeze copies of the mappings. Raises `DeviceError` for a reference that is not
        `module:name`, and for a package without kernels.
        """
        object.__setattr__(self, "attention", MappingProxyType(dict(self.attention)))
        object.__setattr__(self, "graphs", MappingProxyType(dict(self.graphs)))
        object.__setattr__(self, "kernels", MappingProxyType(dict(self.kernels)))
        object.__setattr__(self, "pci", frozenset(self.pci))
        if not self.kernels:
            raise DeviceError(f"{owner(self.name)} names no kernel table", wanted="at least one in `kernels`")
        for ref in self.refs():
            modules(ref, package=self.name)

    @property
    def ranks_share_device(self) -> bool:
        """Whether all ranks of one machine have the same device: those of the processor, and those
        of a device whose communication says so."""
        return self.is_host or (self.communication is not None and self.communication.shares_device)

    def refs(self) -> tuple[Ref, ...]:
        """Return the references of the declaration, in reading order, without those in
        `communication`."""
        named = (*self.attention.values(), *self.graphs.values(), *self.kernels.values())
        return (self.probe, self.facts, self.worker, *named, self.bring_up, *filter(None, (self.partition,)))

    def kernels_for(self, asked: str, *others: str) -> str:
        """Return the table name that `--kernels` means: the preferred one for "auto". Raises
        ConfigError for anything that is neither a table's name nor one of `others`.
        """
        names = tuple(dict.fromkeys((*self.kernels, *others)))
        if asked not in ("auto", *names):
            raise ConfigError(f"kernels is {asked!r}", wanted=f"one of auto, {', '.join(names)}")
        return names[0] if asked == "auto" else asked
