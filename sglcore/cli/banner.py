"""The banner of a start: the device, the start-up decisions and their reasons.

It is printed on the error stream, so that it is not among the text on standard output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sglcore.core.ledger import Row

if TYPE_CHECKING:
    from sglcore.engine.start import Started

LEFT_OPEN = frozenset({"auto", "automatic", "none named", "not asked"})
"""Values of `Row.requested` for which the user requested nothing."""


SHOWN = ("device", "model", "kv cache")
"""Topics of the decisions that are always shown. Of the others, only downgrades are."""


def show_banner(started: Started, *, verbose: bool = False) -> None:
    """Print the banner of an engine in this process on the error stream; `show_start` says what it
    shows."""
    chosen = started.choice.chosen
    brought_by = f"{chosen.distribution} {chosen.version}"
    evidence, rows = started.choice.report.hardware.evidence, started.ledger.rows
    show_start(str(chosen), brought_by, evidence, rows, started.seconds, verbose=verbose)


def show_start(
    device: str,
    brought_by: str,
    evidence: str,
    rows: Sequence[Row],
    seconds: Mapping[str, float],
    *,
    verbose: bool = False,
) -> None:
    """Print the version, the device with its evidence, the decisions of `rows`, and how long the
    start took, on the error stream.

    `brought_by` is the distribution of the device package and its version. `seconds` has the time
    of each step of the start by name, at least one, and their sum as "total".

    Without `verbose`, the topics of SHOWN and the downgrades have one line each. With it, all
    decisions are printed as a table.
    """
    from rich.console import Console
    from rich.text import Text

    from sglcore import __version__

    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble(("sglcore ", "bold"), f"{__version__} on ", (device, "bold green"), f" ({brought_by})"))
    console.print(Text(f"  {evidence}", style="dim"))
    slowest = max((name for name in seconds if name != "total"), key=lambda name: seconds[name])
    ready = f"ready in {seconds['total']:.2f} s ({slowest} {seconds[slowest]:.2f} s)"
    if verbose:
        console.print()
        console.print(ledger_table(rows))
        console.print(Text(f"\n  {ready}\n", style="dim"), soft_wrap=True)
        return
    for row in rows:
        if row.topic in SHOWN or row.downgrade:
            told = f"  {row.topic:<8} {row.effective}: {row.reason}"
            told += f"; otherwise: {row.remedy}" if row.downgrade and row.remedy else ""
            console.print(Text(told, style="yellow" if row.downgrade else ""), soft_wrap=True)
    console.print(Text(f"  {ready}; --verbose prints all {len(rows)} decisions\n", style="dim"), soft_wrap=True)


def ledger_table(rows: Sequence[Row], *, remedies: bool = False) -> object:
    """Return a `rich.table.Table` of decisions, one line for each of `rows`, with downgrades in
    another color; it prints nothing.

    It has a column of requested values if any chosen value differs from its request. `remedies`
    adds to each reason how to change the choice.
    """
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
