"""Runs the command line (`run`), lays out its help (`Command`), and raises SglcoreError for invalid
arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperCommand

from sglcore.core.errors import SglcoreError

OWN = "Options"
HYPHEN = "\u2011"
"""A non-breaking hyphen, which replaces a hyphen while lines are broken: a flag on two lines cannot
be copied."""
WORDS = re.compile(r"\S+-\S+")
KINDS: Mapping[str, str] = MappingProxyType({"int": "an integer", "float": "a number"})
"""Part of a flag's metavariable -> description of a valid value."""
# Typer does not export it; BadParameter has the same base in all versions of Typer.
UsageError: Any = typer.BadParameter.__base__


class Command(TyperCommand):
    """A typer command whose help has one section for each panel of flags.

    Each flag stands under its main name, with its other names after its help text.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of arguments and flags to the formatter; overrides
        `TyperCommand.format_options`, which typer calls for help."""
        parts: dict[str, list[tuple[str, str]]] = {}
        params: Any = self.get_params(ctx)
        for param in params:
            record = param.get_help_record(ctx)
            if record is not None:
                is_flag = param.param_type_name == "option"
                part = (param.rich_help_panel or OWN) if is_flag else "Arguments"
                parts.setdefault(part, []).append(_under_own_name(param, *record) if is_flag else record)
        for part, rows in parts.items():
            with formatter.section(part):
                formatter.write_dl([(names, WORDS.sub(_whole, text)) for names, text in rows])
        formatter.buffer[:] = [text.replace(HYPHEN, "-") for text in formatter.buffer]


def _whole(found: re.Match[str]) -> str:
    return found[0].replace("-", HYPHEN)


def _under_own_name(param: Any, names: str, text: str) -> tuple[str, str]:
    own = next((name for name in param.opts if name.startswith("--")), param.opts[0])
    others = [name for name in param.opts if name != own]
    short = [name for name in others if len(name) == 2]
    metavar = names.rpartition(" <")[2] if names.endswith(">") else ""
    against = f" / {param.secondary_opts[0]}" if param.secondary_opts else ""
    also = [name for name in (*others, *param.secondary_opts[1:]) if name not in short]
    shown = ", ".join([*short, own]) + against + (f" <{metavar}" if metavar else "")
    return shown, f"{text} Also {', '.join(also)}." if also else text


def run(application: typer.Typer, words: Sequence[str]) -> int:
    """Run the program with `words` as its arguments, and return the exit code: the command's; 2,
    after the help, if the command is missing; 1 if the user aborted it.

    Raises SglcoreError for arguments that no command accepts, and what the command raises.
    """
    try:
        code = application(args=list(words), prog_name="sglcore", standalone_mode=False)
    except UsageError as error:
        text, context = error.format_message(), error.ctx
        if context is not None and text == context.get_help():
            typer.echo(text, err=True)
            return 2
        path = context.command_path if context is not None else f"sglcore {words[0]}"
        remedy = f"{path} --help lists what there is"
        found = _found(error, words) or f"{text[:1].lower()}{text[1:]}".rstrip(".")
        raise SglcoreError(found, remedy=remedy) from None
    except typer.Abort:
        return 1
    return code if isinstance(code, int) else 0


def _found(error: Any, words: Sequence[str]) -> str:
    """Return "FLAG: found VALUE, wanted TYPE" for a typer error about the value of a numeric flag;
    "" for another error. `words`: the command line."""
    if not isinstance(error, typer.BadParameter) or error.param is None or error.ctx is None:
        return ""
    names = error.param.get_help_record(error.ctx)
    wanted = next((KINDS[kind] for kind in KINDS if names and kind in names[0].lower().rpartition(" ")[2]), "")
    for place, word in enumerate(words if wanted else ()):
        flag, given, value = word.partition("=")
        if flag in error.param.opts:
            value = value if given else "".join(words[place + 1 : place + 2])
            return f"{flag}: found {value!r}, wanted {wanted}"
    return ""
