"""The command `sglcore conform`: runs the conformance tests on a device, with pytest."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from sglcore.core.errors import ConfigError, SglcoreError
from sglcore.device.choice import Requested
from sglcore.device.discovery import discover
from sglcore.device.selection import find_installed


def conform(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help='The device, or "reference" for the kit\'s own.')] = "",
    level: Annotated[str, typer.Option(help="Run the conformance tests up to this level, C0 to C4.")] = "C4",
    law: Annotated[
        list[str] | None, typer.Option(help="Run only this conformance test (law); may be repeated.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Engine setting, such as dtype=bfloat16; may be repeated.")
    ] = None,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Check that each test fails on the seeded bugs (mutants) it must catch.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    result: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
    hardware: Annotated[
        str, typer.Option(help='Description of the hardware in the result; "simulated" if there is none.')
    ] = "",
    record: Annotated[Path | None, typer.Option(help="Record the steps of a run on this device to a file.")] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Replay recorded steps on this device and compare the results.")
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(help="Run nothing, and print the support table for the result files in this folder."),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(help="Write the table between its markers in this document. No effect without --table."),
    ] = None,
    plugin: Annotated[
        list[str] | None, typer.Option("-p", "--plugin", help="pytest plugin to load; may be repeated.")
    ] = None,
) -> None:
    """Run the conformance tests (laws) on a device and compare it with the reference. Arguments
    after -- go to pytest, and its exit code is the command's. With --table no test runs."""
    if table is not None:
        _show_table(table, into)
        return
    if not name:
        raise ConfigError("no device was named", wanted="sglcore conform NAME", remedy="sglcore devices lists them")
    if name != "reference":
        find_installed(discover(), Requested(name, "the argument"))
    with tempfile.TemporaryDirectory() as folder:
        file = result or (Path(folder) / "result.json" if as_json else None)
        words = [f"--conform-device={name}", f"--conform-level={level}"]
        words += [f"--conform-result={file}"] if file else []
        words += [f"--conform-hardware={hardware}"] if hardware else []
        words += [f"--conform-law={item}" for item in law or ()]
        words += [f"--conform-set={item}" for item in setting or ()]
        words += ["--conform-mutants"] if mutants else []
        words += [f"--conform-record={record.resolve()}"] if record else []
        words += [f"--conform-replay={replay.resolve()}"] if replay else []
        words += [word for item in plugin or () for word in ("-p", item)]
        code = _run_pytest([*words, *context.args], quiet=as_json)
        if as_json and file and file.is_file():
            typer.echo(file.read_text(encoding="utf-8"), nl=False)
    raise typer.Exit(code)


def _show_table(results: Path, into: Path | None) -> None:
    from sglcore.conformance.support_table import support_table, with_table

    try:
        made = support_table(results)
    except ValueError as error:
        raise ConfigError(f"no table can be made of {results}: {error}") from error
    if into is None:
        typer.echo(made, nl=False)
    else:
        into.write_text(with_table(into.read_text(encoding="utf-8"), made), encoding="utf-8")


def _run_pytest(words: list[str], quiet: bool) -> int:
    """Run the conformance tests in this process with `words` as additional arguments, and return
    pytest's exit code.

    Configuration files and `conftest.py` of the current folder are ignored. `quiet` sends pytest's
    output to the error stream. Raises SglcoreError if pytest or torch is not installed.
    """
    try:
        import pytest
    except ModuleNotFoundError:
        remedy = 'pip install "sglcore[conformance]"'
        raise SglcoreError("the conformance kit needs pytest, which is not installed", remedy=remedy) from None
    if find_spec("torch") is None:
        found = "the conformance kit's reference computes with torch, which is not installed"
        raise SglcoreError(found, remedy="pip install torch==2.13.0")
    fixed = ["-c", os.devnull, f"--rootdir={Path.cwd()}", "--noconftest"]
    fixed += ["-p", "no:cacheprovider", "-p", "sglcore.conformance.plugin"]
    with contextlib.redirect_stdout(sys.stderr) if quiet else contextlib.nullcontext():
        return int(pytest.main([*fixed, "-q", "--pyargs", "sglcore.conformance.suite", *words]))
