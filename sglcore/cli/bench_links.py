"""The command `sglcore bench links`: measures collectives between ranks on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglcore.cli.setting_flags import engine_settings
from sglcore.config.engine_config import resolve_config
from sglcore.core.errors import ConfigError

if TYPE_CHECKING:
    from sglcore.engine.ranks.link_measurement import LinkFigures


def links(
    smallest: Annotated[int, typer.Option(help="Size of the smallest tensor per rank, in bytes.")] = 1 << 10,
    largest: Annotated[
        int, typer.Option(help="Size of the largest tensor per rank, in bytes; sizes grow by a factor of 4.")
    ] = 1 << 26,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Benchmark all-reduce and all-to-all between the ranks of --tp N (2 or more) on this machine,
    without a model.

    Prints latency and bandwidth fitted to the results, in the units of the cluster file of `sglcore
    advise`.
    """
    from sglcore.engine.ranks.link_measurement import measure_links

    if not 0 < smallest < largest:
        raise ConfigError(
            f"sizes go from {smallest} to {largest} bytes", wanted="a smallest above 0 and below the largest"
        )
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {str(json_file.absolute().parent)!r}", remedy="make it, or name another")
    sizes = [smallest]
    while sizes[-1] * 4 <= largest:
        sizes.append(sizes[-1] * 4)
    if sizes[-1] < largest:
        sizes.append(largest)
    found = measure_links(resolve_config(engine_settings(settings)), sizes)
    if json_file is not None:
        from sglcore import __version__

        json_file.write_text(json.dumps({"sglcore": __version__, **links_json(found)}, indent=1) + "\n")
    _show(found)


def links_json(found: LinkFigures) -> dict[str, Any]:
    """Return the measurements and the fits as plain values.

    Measured times are in microseconds. The fits have the units of the cluster file of
    `sglcore advise`, and `largest_error` is a fraction of the measured time.
    """
    fits = {
        name: {**_numbers(fit.link.alpha, fit.link.beta), "largest_error": fit.error}
        for name, fit in found.fits.items()
    }
    rows = [{"operation": each.operation, "bytes": each.size, "us": each.seconds * 1e6} for each in found.measured]
    return {"kind": "links", "device": found.device, "ranks": found.ranks, "fits": fits, "measured": rows}


def _numbers(alpha: float, beta: float) -> dict[str, float | None]:
    """Return `alpha_us`, the latency in microseconds, and `gb_s`, the bandwidth in 10^9 bytes/s, by
    these names.

    `alpha` is in seconds and `beta` in seconds per byte. If no size was large enough to measure
    `beta`, it is 0 and the bandwidth is None.
    """
    return {"alpha_us": alpha * 1e6, "gb_s": 1e-9 / beta if beta else None}


def _show(found: LinkFigures) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(f"{found.ranks} ranks on {found.device}", "bytes", "us", "GB/s", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for each in found.measured:
        rate = each.size / each.seconds / 1e9
        table.add_row(each.operation, f"{each.size:,}", f"{each.seconds * 1e6:.1f}", f"{rate:.3f}")
    console = Console(highlight=False)
    console.print(table)
    for name, fit in found.fits.items():
        numbers = _numbers(fit.link.alpha, fit.link.beta)
        rate = "not seen at these sizes" if numbers["gb_s"] is None else f"{numbers['gb_s']:.3g}"
        console.print(
            f"{name}: alpha_us = {numbers['alpha_us']:.3g}, gb_s = {rate} (off by {fit.error:.0%} at most)",
            soft_wrap=True,
        )
