"""The command `sglcore new-device`: writes a device package that passes the conformance tests of
level C0, and prints the next steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def new_device(
    name: Annotated[str, typer.Argument(help="Name of the device for --device, in lower case.")],
    path: Annotated[Path | None, typer.Option(help="Folder to write the package to; default: ./NAME.")] = None,
    module: Annotated[
        str | None,
        typer.Option(
            "--torch",
            metavar="MODULE",
            help="Torch computes on it, and Triton compiles for it: torch.TYPE where torch itself is built for the "
            "device (torch.xyz), torch_TYPE for an extension that registers the type (torch_acme).",
        ),
    ] = None,
) -> None:
    """Generate the skeleton of a device package."""
    from sglcore.conformance.device_template import next_steps, write_package

    folder = path if path is not None else Path(name)
    for file in write_package(name, folder, module):
        typer.echo(f"wrote {file}")
    typer.echo(next_steps(name, folder, module))
