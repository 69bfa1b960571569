"""What a device is, as data. A device package declares one `DevicePackage` and nothing else at import.

Every reference (refs.py) is a `"module:name"` string that is imported when it is used, so that a declaration costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from sglcore.device.adapter import adapted
from sglcore.device.errors import ConfigError, DeviceError
from sglcore.device.pci import PciClaim
from sglcore.device.refs import Ref, modules, owner
from sglcore.device.refs import resolve as resolve
from sglcore.device.topology import Communication

API = 3
"""The number of the contract that a package written today declares. docs/add-a-device.md says what a number promises."""
OLDEST = 3
"""The first number that is kept when the next one comes."""

Made = TypeVar("Made")


def understood(api: int = API) -> range:
    """The numbers of the contract that a core of this number takes: its own and the one before, from `OLDEST` on."""
    return range(max(OLDEST, api - 1), api + 1)


class Adapting(type):
    """Makes an instance of keywords of an older number too: adapter.py fills in what they lack."""

    def __call__(cls: type[Made], **given: Any) -> Made:
        """Raises what the class itself raises."""
        return type.__call__(cls, **adapted(given))


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePackage(metaclass=Adapting):
    """One device, as data. `sglcore.devices` entry points name an instance of it, with its API number as `[api-N]`."""

    name: str
    """What `--device` calls it."""
    api: int
    """The number of the contract it was written for; write `API` as a literal, so that it does not change with the core. Of a
    package of the number before, an adapter has made it one of today's."""
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
    written_for: int | None = None
    """The number that it declares, where adapter.py made it one of `api`. A package leaves it out."""

    def __post_init__(self) -> None:
        """Freeze the mappings as copies; refuse references that are not `module:name`, and a package without kernels."""
        object.__setattr__(self, "attention", MappingProxyType(dict(self.attention)))
        object.__setattr__(self, "graphs", MappingProxyType(dict(self.graphs)))
        object.__setattr__(self, "kernels", MappingProxyType(dict(self.kernels)))
        object.__setattr__(self, "pci", frozenset(self.pci))
        if not self.kernels:
            raise DeviceError(f"{owner(self.name)} names no kernel table", wanted="at least one in `kernels`")
        for ref in self.refs():
            modules(ref, package=self.name)

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
