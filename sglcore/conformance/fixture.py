"""Data that a package gives the kit in addition to its gaps: wider tolerances, each with its
reason, and access to its KV slots.

Every result lists the wider tolerances. A tolerance that no law needs, or that is not wider, is an
error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglcore.conformance.gaps import read_record, read_tables
from sglcore.core.errors import ConfigError
from sglcore.device.import_references import Ref, modules

if TYPE_CHECKING:
    from sglcore.conformance.law import Law

FILE = "conformance.toml"
WIDE = 10.0
"""A tolerance is wider than needed if it is this many times the largest error seen."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """An error that a law (by name) allows this package in one dtype: `bound`, in place of the
    law's own, and the reason."""

    law: str
    dtype: str
    bound: float
    reason: str


@dataclass(frozen=True, slots=True)
class Fixture:
    """The content of a package's `conformance.toml`; `read_fixture` makes it. `cells`:
    `cells(built) -> HostCells` (`host_cells.py`) gives access to the KV slots of what a bring-up
    built, on devices without the torch runtime; None: it has no such function, and the kit knows
    only the torch runtime's pool. `models`: the kit's models with entries other than keys and
    values that a device without the torch runtime serves."""

    tolerances: tuple[Tolerance, ...] = ()
    cells: Ref | None = None
    models: tuple[str, ...] = ()

    def bound(self, law: Law, dtype: str) -> float:
        """Return the error that a law allows in a dtype: this package's tolerance, or else the
        law's own. Raises KeyError for a dtype that the law does not know."""
        own = law.tolerance[dtype]
        return next((item.bound for item in self.tolerances if (item.law, item.dtype) == (law.name, dtype)), own)


def read_fixture(folder: Path | None) -> Fixture:
    """Return the content of `conformance.toml` in a package's folder; an empty fixture without a
    folder or a file. Imports nothing. Raises ConfigError for invalid content."""
    file, values = read_tables(folder, FILE, "tolerance")
    cells, given, models = values.pop("cells", None), values.pop("tolerance", []), values.pop("models", [])
    if values or not isinstance(given, list) or not isinstance(cells, str | None) or not isinstance(models, list):
        wanted = "[[tolerance]] tables, cells as a text, and models as a list of texts"
        raise ConfigError(f"{file} has {', '.join(values) or 'other types'}", wanted=wanted)
    if cells is not None:
        modules(cells, package=str(file))
    wanted = "law, dtype and reason as texts, and bound as a number such as 0.05"
    return Fixture(tuple(read_record(Tolerance, file, entry, wanted) for entry in given), cells, tuple(models))


def stale_tolerances(fixture: Fixture, laws: Sequence[Law]) -> list[str]:
    """Return what is wrong with the tolerances themselves, one text each, empty if nothing: listed
    twice, of an unknown law, of a dtype that the law does not compare, infinite, or not wider than
    the law's."""
    wrong: list[str] = []
    known = {law.name: law.tolerance for law in laws}
    for item in fixture.tolerances:
        own = known.get(item.law, {}).get(item.dtype)
        if own is None:
            wrong.append(f"the tolerance of {item.law!r} in {item.dtype} matches no law that compares in this dtype")
        elif not own < item.bound < float("inf"):
            wrong.append(f"the tolerance of {item.law!r} in {item.dtype} is {item.bound:g}; the law's own is {own:g}")
    pairs = [(item.law, item.dtype) for item in fixture.tolerances]
    return wrong + [
        f"there are two tolerances of {law!r} in {dtype}"
        for law, dtype in sorted({p for p in pairs if pairs.count(p) > 1})
    ]


def tolerance_values(
    fixture: Fixture, laws: Sequence[Law], errors: Sequence[tuple[str, Mapping[str, float]]]
) -> list[dict[str, Any]]:
    """Return each tolerance as results list it: a dictionary of its fields, `own` (the law's),
    `largest` and `is_wide`. `errors`: for each case that ran, the name of its law and its largest
    error by dtype.

    `largest` is the largest of these errors, None where nothing ran in this dtype. `is_wide`: it
    allows more than `WIDE` times the largest error; that is reported but is no failure, because the
    hardware may need a tolerance that its stand-in does not.
    """
    known = {law.name: law.tolerance for law in laws}
    found: list[dict[str, Any]] = []
    for item in fixture.tolerances:
        seen = [by_dtype[item.dtype] for law, by_dtype in errors if law == item.law and item.dtype in by_dtype]
        largest = max(seen) if seen else None
        found.append(
            {
                **{field.name: getattr(item, field.name) for field in fields(item)},
                "own": known.get(item.law, {}).get(item.dtype),
                "largest": largest,
                "is_wide": largest is not None and largest * WIDE < item.bound,
            }
        )
    return found


def tolerance_text(values: Mapping[str, Any]) -> str:
    """Return a line of text that describes one entry of `tolerance_values`."""
    own = "nothing" if values["own"] is None else f"{values['own']:g}"
    seen = "nothing ran in it" if values["largest"] is None else f"the largest error was {values['largest']:.3g}"
    wide = f", {WIDE:g} times less than is allowed: narrow it" if values["is_wide"] else ""
    told = f"{values['law']} in {values['dtype']} allows {values['bound']:g} where the law allows {own}"
    return f"{told} ({values['reason']}); {seen}{wide}"
