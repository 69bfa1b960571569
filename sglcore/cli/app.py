"""The program `sglcore` as a typer application with all its commands.

Each command is a function with annotated parameters. Its module imports heavy modules only inside
the function, so that help appears quickly.
"""

from __future__ import annotations

import typer

from sglcore.cli.advise import advise
from sglcore.cli.bench import make_bench
from sglcore.cli.chat import chat
from sglcore.cli.conform import conform
from sglcore.cli.device_report import devices
from sglcore.cli.doctor import doctor
from sglcore.cli.explain import explain
from sglcore.cli.generate import generate
from sglcore.cli.new_device import new_device
from sglcore.cli.serve import serve
from sglcore.cli.setting_flags import with_settings
from sglcore.cli.usage import Command
from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig


def make_app() -> typer.Typer:
    """Return the application of all commands, in the order in which help lists them."""
    app = typer.Typer(
        help="One LLM inference engine; every accelerator is a package.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    app.command("generate", cls=Command, short_help="Complete a prompt.")(with_settings(generate, EngineConfig))
    app.command("chat", cls=Command, short_help="Chat with a local model or a server.")(
        with_settings(chat, EngineConfig)
    )
    app.command("serve", cls=Command, short_help="Serve a model over HTTP, with a chat page.")(
        with_settings(serve, EngineConfig, ServerConfig)
    )
    app.add_typer(make_bench(), name="bench")
    app.command(cls=Command, short_help="List the devices: installed, found, chosen.")(devices)
    app.command("explain", cls=Command, short_help="Show every start-up decision and how to change it.")(
        with_settings(explain, EngineConfig)
    )
    app.command(cls=Command, short_help="Estimate the fastest parallel layout for a cluster.")(advise)
    app.command(cls=Command, short_help="Diagnose why something does not run here.")(doctor)
    app.command(
        cls=Command, context_settings={"allow_extra_args": True}, short_help="Run the conformance tests on a device."
    )(conform)
    app.command(cls=Command, short_help="Generate the skeleton of a device package.")(new_device)
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
