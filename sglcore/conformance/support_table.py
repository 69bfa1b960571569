"""The support table of docs/devices.md, generated from result files. It marks devices that were
never tested on their hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglcore.conformance.fixture import tolerance_text
from sglcore.conformance.law import LEVELS
from sglcore.conformance.result import read_result

BEGIN = "<!-- begin: made by `sglcore conform --table`, do not edit -->"
END = "<!-- end -->"
HEAD = ("device", "ran on", *LEVELS, "gaps", "sglcore", "torch", "date", "digest")
MISSING = "not run"


def support_table(folder: Path) -> str:
    """Return a Markdown table with a row for each result file (`*.json`) of a folder, by device and
    hardware, then a line for each tolerance that is wider than the law's. Raises ValueError for a
    file that was changed by hand."""
    results = sorted((read_result(file) for file in folder.glob("*.json")), key=_order)
    rows = [HEAD, tuple("---" for _ in HEAD), *(_row(values) for values in results)]
    wider = [f"- {values['device']}, {_ran_on(values)}: {told}\n" for values in results for told in _wider(values)]
    return "".join((*(f"| {' | '.join(row)} |\n" for row in rows), *(("\n", *wider) if wider else ())))


def with_table(text: str, table: str) -> str:
    """Return a document with the table in place of what is between its two marks, which stay.
    Raises ValueError if a mark is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document lacks {BEGIN!r} or {END!r}")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def _order(values: Mapping[str, Any]) -> tuple[str, str]:
    return values["device"], values["hardware"]


def _row(values: Mapping[str, Any]) -> tuple[str, ...]:
    laws = values["laws"]
    levels = (_level([law for law in laws if law["level"] == level]) for level in LEVELS)
    gaps = sum(law["verdict"] == "gap" for law in laws)
    versions = values["versions"]
    short = values["digest"][:12]
    return (
        values["device"], _ran_on(values), *levels, str(gaps),
        versions["sglcore"], versions["torch"], values["date"], f"`{short}`",
    )  # fmt: skip


def _ran_on(values: Mapping[str, Any]) -> str:
    return values["hardware"] or "not said"


def _wider(values: Mapping[str, Any]) -> list[str]:
    """Return a line for each wider tolerance; none for results older than such tolerances."""
    return [tolerance_text(item) for item in values.get("tolerances", [])]


def _level(laws: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of laws with each verdict, as text such as "9 passed, 1 gap"; "not run" for
    no laws."""
    if not laws:
        return MISSING
    counts = {
        verdict: sum(law["verdict"] == verdict for law in laws) for verdict in ("passed", "gap", "failed", "skipped")
    }
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
