"""`python -m tools.wheels build | check | try | version`: release commands, which also run on a
developer's machine (`make wheels` builds and checks)."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.wheels import building, checking, trial
from tools.wheels.distributions import ReleaseError, check_tag, version, write_version

DIST = Path("dist")
NAMES = ("sglcore[conformance]", "sglcore-cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 1 with one line about a ReleaseError."""
    asked = _parsed(arguments)
    try:
        return asked.call(asked)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    built = commands.add_parser("build", help="source distributions and wheels of all distributions, and check them")
    checked = commands.add_parser("check", help="check what is in a folder")
    for command, call in ((built, _build), (checked, _check)):
        command.add_argument("--dist", type=Path, default=DIST, help="the folder of wheels")
        command.add_argument("names", nargs="*", help="distributions; default: all")
        command.set_defaults(call=call)
    tried = commands.add_parser("try", help="install into an empty environment away from the checkout, and use it")
    tried.add_argument("--dist", type=Path, default=DIST, help="the folder of wheels")
    tried.add_argument("--folder", type=Path, help="the folder to install into; default: a temporary one")
    tried.add_argument("--python", default=sys.executable, help="the interpreter")
    tried.add_argument("--torch", default="torch==2.13.0", help="pip arguments for torch, which is installed first")
    tried.set_defaults(call=_try)
    told = commands.add_parser("version", help="print the version, write it everywhere, or compare it with a tag")
    told.add_argument("new", nargs="?", help="the version to write")
    told.add_argument("--tag", help="fail unless this tag, such as v1.2.3, is of the version")
    told.set_defaults(call=_version)
    return parser.parse_args(arguments)


def _build(asked: argparse.Namespace) -> int:
    building.build(asked.dist.resolve(), asked.names)
    return _check(asked)


def _check(asked: argparse.Namespace) -> int:
    found = checking.problems(asked.dist.resolve(), asked.names)
    print("\n".join(found) if found else f"{asked.dist}: nothing is wrong")
    return 1 if found else 0


def _try(asked: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = trial.clear(asked.folder.resolve() if asked.folder else Path(scratch) / "trial")
        place = trial.install(asked.dist.resolve(), folder, asked.python, NAMES, asked.torch.split())
        text = trial.use(place)
    for step, seconds in place.seconds.items():
        print(f"{step:<16} {seconds:6.1f} s")
    print(f"it wrote: {text}")
    return 0


def _version(asked: argparse.Namespace) -> int:
    if asked.new:
        write_version(asked.new)
        print(f"{asked.new} is written; add an entry of that name to CHANGELOG.md")
        return 0
    print(check_tag(asked.tag) if asked.tag else version())
    return 0


if __name__ == "__main__":
    sys.exit(main())
