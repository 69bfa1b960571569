"""Output of `sglcore devices` as text and a table, and indented JSON (`json_text`) for several
commands. `rich` is imported only for a table."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from sglcore.core.errors import SglcoreError

if TYPE_CHECKING:
    from sglcore.cli.device_report import Survey
    from sglcore.device.candidate import Candidate


def json_text(values: Mapping[str, object]) -> str:
    """Return the values as JSON with an indentation of 2, without a newline at the end."""
    return json.dumps(values, indent=2)


def show_survey(seen: Survey) -> None:
    """Print which device is chosen, unclaimed accelerators, and a table of the packages with their
    facts, on standard output.

    Tracebacks of packages that raised go to the error stream.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("device", "fact", "holds", "evidence", box=box.SIMPLE_HEAD)
    for item in seen.devices:
        for row in _survey_rows(item, seen):
            table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        table.add_section()
    console = Console(highlight=False)
    for line in _survey_lines(seen):
        console.print(Text(line), soft_wrap=True)
    if seen.devices:
        console.print()
        console.print(table)
    _print_tracebacks(seen)


_STYLES = MappingProxyType({"yes": "green", "no": "red"})


def _survey_rows(item: Candidate, seen: Survey) -> tuple[tuple[str, str, str, str], ...]:
    heads = (
        f"{item.name} (chosen)" if seen.is_chosen(item) else item.name,
        f"{item.installed.distribution} {item.installed.version}",
    )
    if item.report is None:
        line, remedy = item.trouble()
        without = f"; --device {seen.choice.chosen.name} starts without it" if seen.choice else ""
        return ((heads[0], "package", "no", f"{line}; {remedy}{without}"), (heads[1], "", "", ""))
    rows = [
        (name, "yes" if fact.holds else "no", fact.evidence if fact.holds else f"{fact.evidence}; {fact.remedy}")
        for name, fact in item.report.facts.items()
    ]
    rows += [(f"  {item.name}:{device.index}", "", str(device)) for device in item.report.devices]
    rows += [("  hidden", "", item.report.hidden)] if item.report.hidden else []
    rows += [(f"  {name}", "", value) for name, value in item.report.details.items() if value]
    return tuple((heads[place] if place < len(heads) else "", *row) for place, row in enumerate(rows))


def _survey_lines(seen: Survey) -> tuple[str, ...]:
    if seen.choice is None:
        head = f"no device is chosen: {seen.refusal}"
    else:
        head = f"chosen: {seen.choice.chosen}, because {seen.choice.chosen.reason}"
    others = tuple(f"unclaimed accelerator: {device}; no installed package supports it" for device in seen.unclaimed)
    return (head, *others)


def _print_tracebacks(seen: Survey) -> None:
    """Print the traceback of each package that raised to the error stream. An SglcoreError is left
    out: its message is sufficient."""
    for item in seen.devices:
        if item.error is not None and not isinstance(item.error, SglcoreError):
            print(f"\n{item.installed.distribution} raised:", file=sys.stderr)
            traceback.print_exception(item.error)
