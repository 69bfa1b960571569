"""Install sglcore with the device packages that this machine needs, into the interpreter that runs this file.

The processor's package is always installed; an accelerator's package is installed when its probe sees the hardware. The
declarations and probes are read from this checkout, so nothing need be installed before. For tests, `--all` takes every
package and the simulator. What a package compiles is begun while pip fetches torch. Standard library only.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglcore.device.package import DevicePackage
    from sglcore.device.probe import ProbeReport

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = "constraints.txt"
SIMULATOR = "simulator"
WHEELS = "build/wheels"
BUILDER = "setuptools>=77"
"""What every package of this checkout is built with."""


@dataclass(frozen=True, slots=True)
class Found:
    """A folder of `devices/`, and what its probe said or raised."""

    folder: Path
    package: DevicePackage | None = None
    report: ProbeReport | None = None
    error: Exception | None = None

    @property
    def is_wanted(self) -> bool:
        """The host's package always is, an accelerator's when its hardware is there."""
        return self.package is not None and self.report is not None and (self.package.is_host or self.report.present)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the four facts of every package, then install; 1 when a package or its probe raised."""
    options = parse(arguments)
    sys.path.insert(0, str(options.root))
    found = tuple(examine(path.parent) for path in sorted(options.root.glob("devices/*/pyproject.toml")))
    for item in found:
        show(item)
    if any(item.error for item in found):
        return 1
    wanted = [item.folder for item in found if item.is_wanted or options.all]
    if options.all and (options.root / SIMULATOR).is_dir():
        wanted.append(options.root / SIMULATOR)
    building = [] if options.dry_run else begin_builds(options.root, wanted)
    commands = pip_commands(options.root, wanted, options.extra, options.torch_index, options.torch)
    for command in commands:
        print("+", " ".join(command[2:]), flush=True)
        if not options.dry_run:
            wait_for(building if command is commands[-1] else [])
            subprocess.run(command, cwd=options.root, check=True)
    if options.all and not options.dry_run:
        fetch_wheels(options.root, wanted)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Install sglcore and the device packages that this machine needs.")
    parser.add_argument("--dry-run", action="store_true", help="print the facts and the commands only")
    parser.add_argument("--extra", default="", help="an extra to install of sglcore and of each package that has it")
    parser.add_argument("--all", action="store_true", help="every package, and the simulator: what the tests need")
    parser.add_argument("--torch", default="", help="a version of torch other than that of constraints.txt")
    parser.add_argument("--torch-index", default="", help="the package index to take torch from")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to install from")
    return parser.parse_args(arguments)


def examine(folder: Path) -> Found:
    """Load the declaration of one package from its folder and call its probe; what raises is kept."""
    from sglcore.device.candidate import run_probe
    from sglcore.device.discovery import GROUP, discover

    try:
        declared = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        points = [EntryPoint(name, value, GROUP) for name, value in declared.items()]
        package = discover(points)[0].loaded()
        return Found(folder, package, run_probe(package, False))
    except Exception as error:
        return Found(folder, error=error)


def show(item: Found) -> None:
    """Print the four facts, or the traceback of what was raised."""
    if item.error is not None:
        print(f"{item.folder.name}: raised")
        traceback.print_exception(item.error)
    if item.package is None or item.report is None:
        return
    print(
        f"{item.package.name}: {item.package.summary}: {'to be installed' if item.is_wanted else 'not on this machine'}"
    )
    for name, fact in item.report.facts.items():
        print(f"  {name:<9} {'yes' if fact.holds else 'no ':<4} {fact.evidence}")


def pip_commands(
    root: Path, folders: Sequence[Path], extra: str, torch_index: str, torch_version: str = ""
) -> tuple[tuple[str, ...], ...]:
    """The pinned torch on its own, so that pip takes no other; what builds packages, once for all of them; then the core and
    the packages from this checkout. Python compiles what is imported when it is: pip would compile everything."""
    constraints = other_torch(root, torch_version) if torch_version else CONSTRAINTS
    quiet = ("--quiet", "--disable-pip-version-check", "--no-compile")
    pip = (sys.executable, "-m", "pip", "install", *quiet, "-c", constraints)
    lines = (root / constraints).read_text().splitlines()
    torch = tuple(line.strip() for line in lines if line.startswith("torch=="))
    index = ("--index-url", torch_index) if torch_index else ()
    checkouts = tuple(word for folder in folders for word in ("-e", with_extra(root, folder, extra)))[1:]
    core = f".[{extra}]" if extra else "."
    editable = (*pip, "--no-build-isolation", "-e")
    return ((*pip, *index, *torch), (*pip, BUILDER), (*editable, core), (*editable, *checkouts))


def begin_builds(root: Path, folders: Sequence[Path]) -> list[subprocess.Popen[bytes]]:
    """Programs of packages, as their `[tool.sglcore] early-build` names them, that compile ahead what an installation would;
    one that fails is no error: the installation says what is wrong."""
    found = [(folder, setting(folder, "early-build")) for folder in folders]
    return [subprocess.Popen((sys.executable, *words), cwd=folder) for folder, words in found if words]


def wait_for(building: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended."""
    for child in building:
        child.wait()


def setting(folder: Path, name: str) -> tuple[str, ...]:
    """A list in a package's `[tool.sglcore]`."""
    declared = tomllib.loads((folder / "pyproject.toml").read_text()).get("tool", {}).get("sglcore", {})
    return tuple(declared.get(name, ()))


def with_extra(root: Path, folder: Path, extra: str) -> str:
    """A package's folder as pip takes it, with an extra if it declares that."""
    declared = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
    offers = extra in declared.get("optional-dependencies", {})
    return f"{folder.relative_to(root)}[{extra}]" if offers else str(folder.relative_to(root))


def fetch_wheels(root: Path, folders: Sequence[Path]) -> None:
    """Vendors' wheels that tests read but never install, as a package's `[tool.sglcore] test-wheels` names them. Without
    one, the tests that need it are skipped, and a run of all lanes says so."""
    for folder in folders:
        for wheel in setting(folder, "test-wheels"):
            pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
            ran = subprocess.run((*pip, "-d", str(root / WHEELS), wheel), cwd=root, check=False)
            print(f"{wheel}: {'fetched for the tests' if ran.returncode == 0 else 'could not be fetched'}", flush=True)


def other_torch(root: Path, version: str) -> str:
    """The constraints with another torch, as a file below `build`."""
    path = root / "build" / f"constraints-torch-{version}.txt"
    lines = (root / CONSTRAINTS).read_text().splitlines()
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(f"torch=={version}" if line.startswith("torch==") else line for line in lines) + "\n")
    return str(path.relative_to(root))


if __name__ == "__main__":
    sys.exit(main())
