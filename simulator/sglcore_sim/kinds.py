"""Kinds: the description of a simulated device as data, and the lookup of one by name. This module
knows no device.

A kind comes with the simulator (`OWN`), or from any installed distribution with an entry point of
the group `sglcore_sim.kinds`. The entry point's name is the value of `--sim`; its object is a
`Kind`, or a sequence of them for a family of chips.
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
"""The kinds that come with the simulator."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Kind:
    """A simulated device. A reference is a "module:function" that is called once, with the
    simulator.
    """

    name: str
    """The name of the kind, as in `--sim=NAME`."""
    torch_name: str
    """The device type of its tensors: one of torch's types that the native core has hooks for
    (cuda, hpu, xpu), or a name that torch does not know, which becomes the name of torch's private
    backend."""
    arch: str = ""
    """The compilers' name of the chip."""
    properties: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    """The fields of the vendor's device properties."""
    face: str = "sglcore_sim.faces.generic:plant"
    """A reference that plants the vendor's Python names, such as the bindings of a torch build for
    the device. The default registers a plain module, for types without a module in torch."""
    libraries: tuple[str, ...] = ()
    """References that plant the vendor's libraries, called before the face."""
    capabilities: frozenset[str] = frozenset({"neutral_graph"})
    """Capabilities that tests may require beyond those of every kind (`plugin.capabilities`)."""
    collectives: str = "simccl"
    """The backend's name for `init_process_group`."""
    files: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    """Relative path to text of the machine's system tree. `{i}`, `{bus}` and `{render}` in a path
    make one file per device; path and text may use any of `machine.FIELDS`."""
    chip: str = ""
    """Its common name, for `--sim=NAME:CHIP`."""
    has_captured_collectives: bool = False
    """Captured graphs may hold its collectives."""


def pci(vendor: int, device: int, pci_class: int) -> dict[str, str]:
    """Return files, as `Kind.files` has them, that show a device on the PCI bus, one per simulated
    device. The arguments are the vendor's id, the device's id and the class of 24 bits."""
    folder = "sys/bus/pci/devices/0000:{bus}:00.0"
    ids = (f"0x{vendor:04x}", f"0x{device:04x}", f"0x{pci_class:06x}")
    return {f"{folder}/{name}": f"{value}\n" for name, value in zip(("vendor", "device", "class"), ids, strict=True)}


def resolve(ref: str) -> Any:
    """Import the module of a "module:name" and return its object."""
    module, name = ref.split(":")
    return getattr(import_module(module), name)


def known() -> Mapping[str, str]:
    """Return the reference ("module:name") of every installed kind by its name; imports none of
    them. Raises ValueError if two kinds have the same name."""
    found = dict(OWN)
    for point in entry_points(group=GROUP):
        if found.setdefault(point.name, point.value) != point.value:
            raise ValueError(
                f"found two simulated kinds {point.name!r}, {found[point.name]} and {point.value}; remove one"
            )
    return MappingProxyType(found)


def chips(name: str) -> Sequence[Kind]:
    """Return the chips of the kind `name`; the first is the default. Raises ValueError, with the
    known names, for an unknown one."""
    refs = known()
    if name not in refs:
        raise ValueError(f"found simulated kind {name!r}, wanted one of {', '.join(sorted(refs))}, or a Kind record")
    found = resolve(refs[name])
    return (found,) if isinstance(found, Kind) else tuple(found)


def kind_of(kind: str | Kind, arch: str | None = None) -> Kind:
    """Return the Kind of "npu" (its first chip), of "npu:910C" (a chip's name or its `arch`), or of
    the chip in the argument `arch`; a Kind is returned as it is.

    Raises ValueError, with the known names, for an unknown one.
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
