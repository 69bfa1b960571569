"""Computes figures from readings: medians, ratios per round, shares of the bound, and the printed
table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .cases import BESIDE_ITSELF, Bounds, Case
from .engines import OURS

Values = Sequence[float | None]
"""One reading per round; None if missing."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Minimum, median and maximum of some values."""

    least: float
    median: float
    most: float

    def text(self, digits: int = 1) -> str:
        return f"{self.median:.{digits}f} ({self.least:.{digits}f} to {self.most:.{digits}f})"


@dataclass(slots=True)
class Results:
    """Readings, reasons of failures and peak memory by (case, engine); first tokens by (format,
    engine)."""

    readings: dict[tuple[str, str], list[float | None]] = field(default_factory=dict)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    peak_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    tokens: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, case: str, engine: str, round_number: int, value: float) -> None:
        """Add one reading; earlier rounds without a reading hold None."""
        values = self.readings.setdefault((case, engine), [])
        values += [None] * (round_number + 1 - len(values))
        values[round_number] = value

    def fail(self, case: str, engine: str, reason: str) -> None:
        """Record why there is no reading; the first reason stays."""
        self.failures.setdefault((case, engine), reason)


def spread(values: Values) -> Spread | None:
    """Return the spread of the readings that are not None; None if there are none."""
    found = [value for value in values if value is not None]
    return Spread(min(found), statistics.median(found), max(found)) if found else None


def ratios(ours: Values, theirs: Values, *, less_is_better: bool = False) -> Spread | None:
    """Return how many times better ours is, over the rounds that both have; None if there are
    none."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
    return spread([b / a if less_is_better else a / b for a, b in pairs])


def rows(
    results: Results, cases: Sequence[Case], engines: Sequence[str], bounds: Bounds | None
) -> list[dict[str, object]]:
    """Return one row for each case and engine: readings, spread, share of the bound and our ratio
    to it, or why there are no readings."""
    return [row(results, case, engine, bounds) for case in cases for engine in engines if case.only in (None, engine)]


def row(results: Results, case: Case, engine: str, bounds: Bounds | None) -> dict[str, object]:
    """Return the row of one engine in one case."""
    key = (case.name, engine)
    values = results.readings.get(key, [])
    found, limit = spread(values), case.bound(bounds) if bounds else None
    made: dict[str, object] = {"case": case.name, "engine": engine, "unit": case.unit}
    if found is None:
        return made | {"missing": results.failures.get(key, "was not run")}
    made |= {"values": [rounded(value) for value in values], "median": rounded(found.median)}
    made |= {"min": rounded(found.least), "max": rounded(found.most)}
    if limit is not None:
        share = limit / found.median if case.is_seconds else found.median / limit
        made |= {"bound": rounded(limit), "percent_of_bound": round(100 * share, 1)}
    if key in results.peak_bytes:
        made["peak_gb"] = round(results.peak_bytes[key] / 1e9, 2)
    if key in results.failures:
        made["failed_later"] = results.failures[key]
    ratio = None if engine == OURS else ratios(results.readings.get((case.name, OURS), []), values, **_better(case))
    return made if ratio is None else made | {"ours_to_it": _ratio(ratio)}


def beside_the_best(made: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return, for each case in which we and a peer have figures, the best peer by median and our
    ratio to it."""
    found: dict[object, dict[str, object]] = {}
    for each in made:
        ratio = each.get("ours_to_it")
        best = found.get(each["case"])
        if isinstance(ratio, Mapping) and (best is None or ratio["median"] < best["ratio"]["median"]):  # pyright: ignore
            found[each["case"]] = {"case": each["case"], "peer": each["engine"], "ratio": ratio}
    return list(found.values())


def beside_itself(results: Results) -> list[dict[str, object]]:
    """Return the ratios between our own cases (BESIDE_ITSELF)."""
    found = []
    for case, base in BESIDE_ITSELF:
        ratio = ratios(results.readings.get((case, OURS), []), results.readings.get((base, OURS), []))
        if ratio is not None:
            found.append({"case": case, "against": base, "ratio": _ratio(ratio)})
    return found


def table(made: Sequence[Mapping[str, object]]) -> str:
    """Format rows as text, one table for each case."""
    lines: list[str] = []
    last = None
    for each in made:
        if each["case"] != last:
            last = each["case"]
            limit = f", the bound is {each['bound']}" if "bound" in each else ""
            lines.append(f"\n{last} ({each['unit']}{limit})")
        lines.append("  " + _line(each))
    return "\n".join(lines).lstrip("\n")


def _line(each: Mapping[str, object]) -> str:
    name = f"{each['engine']:<13}"
    if "missing" in each:
        return f"{name} none: {each['missing']}"
    text = f"{name} {each['median']:>9} ({each['min']} to {each['max']})"
    if "percent_of_bound" in each:
        text += f"  {each['percent_of_bound']} % of the bound"
    if "peak_gb" in each:
        text += f"  {each['peak_gb']} GB at its peak"
    ratio = each.get("ours_to_it")
    if isinstance(ratio, Mapping):
        text += f"  ours {ratio['median']} times as good ({ratio['min']} to {ratio['max']})"
    return text + (f"  later: {each['failed_later']}" if "failed_later" in each else "")


def rounded(value: float | None) -> float | None:
    """Round to four significant digits."""
    return None if value is None else float(f"{value:.4g}")


def _ratio(found: Spread) -> dict[str, float]:
    return {"min": round(found.least, 3), "median": round(found.median, 3), "max": round(found.most, 3)}


def _better(case: Case) -> dict[str, bool]:
    return {"less_is_better": case.is_seconds}
