"""`sglcore explain`: every decision of a start, with the way to another."""

from __future__ import annotations

from typing import Annotated

import typer

from sglcore.cli import options


def explain(
    topic: Annotated[str | None, typer.Argument(help="One topic, such as attention; left out, all of them.")] = None,
    model: Annotated[str | None, typer.Option(help="A checkpoint folder; left out, the embedded model.")] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    graph: options.Graph = None,
    attention_backend: options.Attention = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory: options.KVMemory = None,
    strict: options.Strict = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Start as `generate` would, then say what was asked for, what was chosen, why, and how to get something else."""
    from sglcore.cli.banner import ledger_table
    from sglcore.cli.render import json_text
    from sglcore.device.config import resolve_config
    from sglcore.device.errors import ConfigError
    from sglcore.engine.start import start

    config = resolve_config(
        {
            "model": model,
            "device": device,
            "dtype": dtype,
            "threads": threads,
            "graph": graph,
            "attention_backend": attention_backend,
            "max_model_len": max_model_len,
            "kv_cache_memory": kv_cache_memory,
            "strict": strict,
        }
    )
    started = start(config)
    started.worker.close()
    rows = [row for row in started.ledger.rows if topic in (None, row.topic)]
    if not rows:
        topics = ", ".join(dict.fromkeys(row.topic for row in started.ledger.rows))
        raise ConfigError(f"nothing was decided about {topic!r}", wanted=f"one of {topics}")
    if as_json:
        kept = [values for values in started.ledger.as_json() if topic in (None, values["topic"])]
        typer.echo(json_text({"decisions": kept}))
        return
    from rich.console import Console

    Console(highlight=False).print(ledger_table(rows, remedies=True))
