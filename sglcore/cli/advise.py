"""The command `sglcore advise`: estimates in which parallel configuration a cluster runs a model
fastest, and prints the command to start it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def advise(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder; only its config.json is read.")],
    cluster: Annotated[
        Path, typer.Option(help="TOML file that describes the devices and links of the cluster (docs/multi-node.md).")
    ],
    requests: Annotated[int, typer.Option(help="Number of concurrent requests.")] = 256,
    input_len: Annotated[int, typer.Option(help="Prompt length in tokens.")] = 2048,
    output_len: Annotated[int, typer.Option(help="Output length in tokens.")] = 512,
    top: Annotated[int, typer.Option(help="Number of parallel layouts to show, fastest first.")] = 6,
    as_json: Annotated[bool, typer.Option("--json", help="Print all layouts as JSON.")] = False,
) -> None:
    """Estimate the throughput of each parallel layout (tp, dp, ep) on a cluster, and print the
    command of the fastest.

    The estimates are upper bounds computed from the cluster file. No model is loaded and no device
    is used.
    """
    from sglcore.cli.render import json_text
    from sglcore.engine.layouts.cluster import read_cluster
    from sglcore.engine.layouts.layout_advice import Load, advise_folder, text_of

    numbers = read_cluster(cluster)
    found = advise_folder(model, numbers, Load(requests, input_len, output_len))
    if as_json:
        forms = [each.as_json(str(model), numbers.links.per_host) for each in found]
        typer.echo(json_text({"forms": forms}))
        return
    typer.echo(text_of(found, str(model), numbers, top), nl=False)
