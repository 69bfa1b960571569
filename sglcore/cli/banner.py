"""The start-up banner: what was chosen and why, on the error stream, so that the output stays the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sglcore.device.ledger import Row

if TYPE_CHECKING:
    from sglcore.engine.start import Started


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
    console.print(ledger_table(rows))
    slowest = max((name for name in seconds if name != "total"), key=lambda name: seconds[name])
    console.print(
        Text(f"  ready in {seconds['total']:.2f} s ({slowest} {seconds[slowest]:.2f} s)\n", style="dim"), soft_wrap=True
    )


def ledger_table(rows: Sequence[Row], *, remedies: bool = False) -> object:
    """A table of decisions; a downgrade is marked. `remedies` adds how to get something else."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = ["", "asked", "chosen", "why", *(["otherwise"] if remedies else [])]
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for row in rows:
        style = "yellow" if row.downgrade else ""
        cells = [row.topic, row.requested, row.effective, row.reason, *([row.remedy] if remedies else [])]
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table
