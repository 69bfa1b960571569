"""The commands. Each is a function with annotated parameters, in a module that imports heavy things only inside it."""

from __future__ import annotations

import typer

from sglcore.cli.bench import make_bench
from sglcore.cli.chat import chat
from sglcore.cli.conform import conform
from sglcore.cli.devices import devices
from sglcore.cli.doctor import doctor
from sglcore.cli.explain import explain
from sglcore.cli.generate import generate
from sglcore.cli.new_device import new_device
from sglcore.cli.serve import serve
from sglcore.cli.settings import with_settings
from sglcore.device.config import EngineConfig
from sglcore.device.server_config import ServerConfig


def make_app() -> typer.Typer:
    """The application with one line for each command, in the order in which help lists them."""
    app = typer.Typer(
        help="One LLM inference engine; every accelerator is a package.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=True,
        rich_markup_mode=None,
    )
    app.callback()(options)
    app.command("generate")(with_settings(generate, EngineConfig))
    app.command("chat")(with_settings(chat, EngineConfig))
    app.command("serve")(with_settings(serve, EngineConfig, ServerConfig))
    app.add_typer(make_bench(), name="bench")
    app.command()(devices)
    app.command("explain")(with_settings(explain, EngineConfig))
    app.command()(doctor)
    app.command(context_settings={"allow_extra_args": True})(conform)
    app.command()(new_device)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        from sglcore import __version__

        typer.echo(f"sglcore {__version__}")
        raise typer.Exit


def options(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=_version
    ),
) -> None:
    """One LLM inference engine; every accelerator is a package."""
