"""`sglcore advise`: in which form a cluster would run a model fastest, by numbers, with the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def advise(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder; its config.json is enough.")],
    cluster: Annotated[
        Path, typer.Option(help="A TOML file with the numbers of devices and links (docs/multi-node.md).")
    ],
    requests: Annotated[int, typer.Option(help="Requests that are open at any time.")] = 256,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 2048,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 512,
    top: Annotated[int, typer.Option(help="Forms to show, the fastest first.")] = 6,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, of all forms.")] = False,
) -> None:
    """Predict what each form of ranks would do with a load on a cluster that is described by a file, and name the fastest.

    Predictions are bounds by the numbers in the file. Nothing is started, and no device is asked.
    """
    from sglcore.cli.render import json_text
    from sglcore.engine.forms.advice import Load, advise_folder, text_of
    from sglcore.engine.forms.cluster import read_cluster

    numbers = read_cluster(cluster)
    found = advise_folder(model, numbers, Load(requests, input_len, output_len))
    if as_json:
        forms = [each.as_json(str(model), numbers.links.per_host) for each in found]
        typer.echo(json_text({"forms": forms}))
        return
    typer.echo(text_of(found, str(model), numbers, top), nl=False)
