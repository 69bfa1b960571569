"""The list of parts in order, with their time limits and the parts that they need. Standard library
only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """One part. `function`: "module:name", called with a `Run`; a leading dot means this package.
    `seconds`: its time limit, from when it gets the device. `needs`: parts that run first. `stops`:
    if it fails, later parts do not run, unless `--go-on` is given. `of`: name of the geometry that
    it measures; empty: none."""

    name: str
    function: str
    seconds: float
    needs: tuple[str, ...] = ()
    stops: bool = False
    of: str = ""


PARTS = (
    Part("bounds", ".bounds:measure", 20),
    Part("laws", ".laws:measure", 60, stops=True),
    Part("products", ".products:measure", 90, ("bounds",)),
    Part("attention", ".attention:measure", 55, ("bounds",)),
    Part("engine-0.6B", ".engine:measure", 50, ("bounds",), of="0.6B"),
    Part("engine-8B", ".engine:measure", 90, ("bounds",), of="8B"),
    Part("profile-8B", ".kernels:measure", 35, ("bounds",), of="8B"),
    Part("profile-0.6B", ".kernels:measure", 25, ("bounds",), of="0.6B"),
    Part("peer-0.6B", ".peer:measure", 60, of="0.6B"),
    Part("peer-8B", ".peer:measure", 110, of="8B"),
)
"""595 seconds in total if each takes its limit. The peer comes last because compiling its steps
takes a minute for many layers."""


def with_needs(names: Sequence[str], parts: Sequence[Part] = PARTS) -> tuple[Part, ...]:
    """Return the named parts and the parts that they need, in order; without names, all parts.
    Raises ValueError for an unknown name."""
    known = {part.name: part for part in parts}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no part {', '.join(unknown)}; wanted some of {', '.join(known)}")
    wanted = {*names, *(need for name in names for need in known[name].needs)}
    return tuple(part for part in parts if not names or part.name in wanted)
