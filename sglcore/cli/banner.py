"""The start-up banner: what was chosen and why, on the error stream, so that the output stays the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sglcore.device.ledger import Row

if TYPE_CHECKING:
    from sglcore.engine.start import Started

LEFT_OPEN = frozenset({"auto", "automatic", "none named", "not asked"})
"""What a decision's request says where nobody asked for anything."""


def show_banner(started: Started) -> None:
    """Print the version, the device with its evidence, and the ledger."""
    chosen = started.choice.chosen
    brought_by = f"{chosen.distribution} {chosen.version}"
    show_start(str(chosen), brought_by, started.choice.report.hardware.evidence, started.ledger.rows, started.seconds)


def show_start(device: str, brought_by: str, evidence: str, rows: Sequence[Row], seconds: Mapping[str, float]) -> None:
    """The same from plain values; `seconds` of each step of the bring-up, "total" among them."""
    from rich.console import Console
    from rich.text import Text

    from sglcore import __version__

    console = Console(stderr=True, highlight=False)
    head = Text.assemble(
        ("sglcore ", "bold"),
        f"{__version__} on ",
        (device, "bold green"),
        f" ({brought_by})",
    )
    console.print(head)
    console.print(Text(f"  {evidence}", style="dim"))
    console.print()
    console.print(ledger_table(rows))
    console.print()
    slowest = max((name for name in seconds if name != "total"), key=lambda name: seconds[name])
    console.print(
        Text(f"  ready in {seconds['total']:.2f} s ({slowest} {seconds[slowest]:.2f} s)\n", style="dim"), soft_wrap=True
    )


def ledger_table(rows: Sequence[Row], *, remedies: bool = False) -> object:
    """A table of decisions; a downgrade is marked. What was asked is a column where anything else was chosen;
    `remedies` say under each reason how to get something else."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    is_asked = any(row.requested not in LEFT_OPEN | {row.effective} for row in rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for column in ["", *(["asked"] if is_asked else []), "chosen", "why"]:
        table.add_column(column, overflow="fold")
    for row in rows:
        remedy = ("\notherwise: " + row.remedy, "dim") if remedies and row.remedy else ""
        cells = [row.topic, *([row.requested] if is_asked else []), row.effective]
        style = "yellow" if row.downgrade else ""
        table.add_row(*(Text(cell, style=style) for cell in cells), Text.assemble(row.reason, remedy, style=style))
    return table
