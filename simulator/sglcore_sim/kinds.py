"""Kinds: what a simulated device is, as data, and how one is found by its name. Nothing here knows
a device.

A kind comes with the simulator (`OWN`), or from any installed distribution, by an entry point of
the group `sglcore_sim.kinds`: its name is what `--sim` takes, its value a `Kind`, or a sequence of
them for a family of chips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

GROUP = "sglcore_sim.kinds"
OWN: Mapping[str, str] = MappingProxyType(
    {name: f"sglcore_sim.chips:{name.upper()}" for name in ("cuda", "hip", "musa", "npu")}
)
"""The kinds that the simulator brings."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Kind:
    """A simulated device. Every reference is a "module:function" that is called once, with the
    simulator.

    `torch_name`: the device type of its tensors: one of torch's own that the native core has hooks
    for (cuda, hpu, xpu), or a name that torch does not know, under which its private backend then
    goes. `arch`: what compilers call the chip. `properties`: the fields of the vendor's device
    properties. `face`: plants what the vendor's Python names need, such as the bindings of a build
    for it; the default registers a plain module, for a type that torch brings none for.
    `libraries`: plant the vendor's libraries, before the face. `capabilities`: what tests may ask
    of it beyond what every kind has (`plugin.capabilities`). `collectives`: what
    `init_process_group` takes for it. `files`: relative path to text of the machine's system tree;
    `{i}`, `{bus}` and `{render}` in a path make one file per device, and both may use any of
    `machine.FIELDS`. `chip`: what people call it, for `--sim=NAME:CHIP`.
    """

    name: str
    torch_name: str
    arch: str = ""
    properties: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    face: str = "sglcore_sim.faces.generic:plant"
    libraries: tuple[str, ...] = ()
    capabilities: frozenset[str] = frozenset({"neutral_graph"})
    collectives: str = "simccl"
    files: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    chip: str = ""


def pci(vendor: int, device: int, pci_class: int) -> dict[str, str]:
    """A device of the PCI bus, one per simulated device, for `Kind.files`."""
    folder = "sys/bus/pci/devices/0000:{bus}:00.0"
    ids = (f"0x{vendor:04x}", f"0x{device:04x}", f"0x{pci_class:06x}")
    return {f"{folder}/{name}": f"{value}\n" for name, value in zip(("vendor", "device", "class"), ids, strict=True)}


def resolve(ref: str) -> Any:
    """What a "module:name" names."""
    module, name = ref.split(":")
    return getattr(import_module(module), name)


def known() -> Mapping[str, str]:
    """Reference by name of every kind that is installed; raises ValueError where two have one
    name."""
    found = dict(OWN)
    for point in entry_points(group=GROUP):
        if found.setdefault(point.name, point.value) != point.value:
            raise ValueError(
                f"found two simulated kinds {point.name!r}, {found[point.name]} and {point.value}; remove one"
            )
    return MappingProxyType(found)


def chips(name: str) -> Sequence[Kind]:
    """The chips of a kind; the first is the one that its name alone means. Raises ValueError with
    what there is."""
    refs = known()
    if name not in refs:
        raise ValueError(f"found simulated kind {name!r}, wanted one of {', '.join(sorted(refs))}, or a Kind record")
    found = resolve(refs[name])
    return (found,) if isinstance(found, Kind) else tuple(found)


def kind_of(kind: str | Kind, arch: str | None = None) -> Kind:
    """The record of "npu", of "npu:910C" (chip or target), or of a chip given as `arch`; a Kind is
    returned as it is.

    Raises ValueError with what there is.
    """
    if isinstance(kind, Kind):
        return kind
    name, _, own = kind.partition(":")
    there, wanted = chips(name), (arch or own).lower()
    if not wanted:
        return there[0]
    found = next((chip for chip in there if wanted in (chip.chip.lower(), chip.arch.lower())), None)
    if found is None:
        named = ", ".join(f"{chip.chip} ({chip.arch})" for chip in there)
        raise ValueError(f"found {name} chip {arch or own!r}, wanted one of {named}")
    return found
