"""The command `sglcore explain`: the start-up decisions of an engine, and how to change each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sglcore.cli.setting_flags import engine_settings
from sglcore.config.engine_config import EngineConfig, resolve_config
from sglcore.config.settings import settings_of


def explain(
    topic: Annotated[
        str | None, typer.Argument(help="Topic, such as attention, or a model; default: all topics.")
    ] = None,
    model: Annotated[str | None, typer.Option(help=settings_of(EngineConfig)["model"].help)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Load the model, then print each start-up decision: requested, chosen, reason, and how to
    change it."""
    from sglcore.cli.banner import ledger_table
    from sglcore.cli.render import json_text
    from sglcore.core.errors import ConfigError
    from sglcore.engine.model_download import is_hub_name
    from sglcore.engine.start import is_model, start

    if topic is not None and model is None and (is_model(Path(topic)) or is_hub_name(topic)):
        topic, model = None, topic
    started = start(resolve_config({"model": model, **engine_settings(settings)}))
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
