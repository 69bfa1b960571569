"""`sglcore new-device`: write a device package that passes C0, and say what to fill in next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def new_device(
    name: Annotated[str, typer.Argument(help="What --device will call it: a lower-case word.")],
    path: Annotated[Path | None, typer.Option(help="Where to write the package; left out, ./NAME.")] = None,
) -> None:
    """Write a device package to begin with."""
    from sglcore.conformance.new_device import NEXT_STEPS, write_package

    folder = path if path is not None else Path(name)
    for file in write_package(name, folder):
        typer.echo(f"wrote {file}")
    typer.echo(NEXT_STEPS.format(name=name, folder=folder))
