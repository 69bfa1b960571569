"""The start-up banner: what was chosen and why, on the error stream, so that the output stays the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglcore.device.ledger import Row

if TYPE_CHECKING:
    from sglcore.engine.start import Started


def show_banner(started: Started) -> None:
    """Print the version, the device with its evidence, and the ledger."""
    from rich.console import Console
    from rich.text import Text

    from sglcore import __version__

    chosen = started.choice.chosen
    console = Console(stderr=True, highlight=False)
    head = Text.assemble(
        ("sglcore ", "bold"),
        f"{__version__} on ",
        (chosen.name, "bold green"),
        f" ({chosen.distribution} {chosen.version})",
    )
    console.print(head)
    console.print(Text(f"  {started.choice.report.hardware.evidence}", style="dim"))
    console.print(ledger_table(started.ledger.rows))
    seconds = started.seconds
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
