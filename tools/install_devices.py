"""Installs sglcore with the device packages that this machine needs into the interpreter that runs
this file.

The CPU package is always installed. An accelerator's package is installed if its probe finds the
hardware; it then determines the torch build. Declarations and probes are read from this checkout,
so nothing needs to be installed before. For tests, `--all` installs every package and the
simulator. Packages compile their native code while pip downloads torch. Standard library only; the
parts are in `installer`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.installer import commands, packages, running
from tools.installer.choice import Choice, Wanted, choose, installed
from tools.installer.needs import InstallError, needs_of, settings, takes
from tools.installer.packages import Found
from tools.installer.pythons import AGAIN, ROOT
from tools.installer.sources import Machine, Sources, asker, configured, this_machine

SIMULATOR = "simulator"
WHEELS = "build/wheels"
DEVICE = "SGLCORE_DEVICE"
"""The environment variable that selects the device of an engine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every package's probe results, then install. Returns 1 with one line about an error,
    130 when interrupted."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return install(options)
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: installed packages stay, and {AGAIN} continues from there", file=sys.stderr)
        return 130


def install(options: argparse.Namespace) -> int:
    """Run the steps in order. Waits; raises InstallError."""
    sys.path.insert(0, str(options.root))
    found = packages.find(options.root)
    shown = wanted_packages(found, options)
    for item in found:
        packages.show(item, item in shown)
    if any(item.error for item in found):
        return 1
    sources, machine = configured(), this_machine()
    for name in () if options.dry_run else running.forget_half_installed(Path(sysconfig.get_path("purelib"))):
        print(f"{name} was half installed and is installed again")
    choice = choose(wanted_torch(found, options, machine), installed(), sources, asker(sources), not options.dry_run)
    folders = with_simulator([item.folder for item in shown], choice, options)
    print("\n".join((choice.why, *choice.notes)), flush=True)
    if options.dry_run:
        planned = commands.in_order(options.root, folders, options.extra, choice, machine.system, choice.brings_triton)
        print("\n".join("+ " + " ".join(command[2:]) for command in planned), flush=True)
        return 0
    with running.place(options.root, sources, machine) as here, running.building(folders, here) as begun:
        carry_out(options, folders, choice, here, begun)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description="Install sglcore and the device packages that this machine needs.")
    parser.add_argument("--dry-run", action="store_true", help="print the facts and the commands only")
    parser.add_argument("--extra", default="", help="an extra to install of sglcore and of each package that has it")
    parser.add_argument("--all", action="store_true", help="every package, and the simulator: what the tests need")
    parser.add_argument(
        "--device", action="append", default=[], metavar="NAME", help="as if its hardware were there (repeatable)"
    )
    parser.add_argument("--processor", action="store_true", help="torch for the processor, whatever hardware is seen")
    parser.add_argument("--without-simulator", action="store_true", help="leave the simulator out of --all")
    parser.add_argument("--torch", default="", help="another version of torch that the packages support")
    parser.add_argument("--torch-index", default="", help="the package index to take torch from")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to install from")
    return parser.parse_args(arguments)


def wanted_packages(found: Sequence[Found], options: argparse.Namespace) -> list[Found]:
    """Return the packages to install: the CPU's and those of the chosen accelerators, or all."""
    devices = packages.chosen(found, named(found, options))
    return [item for item in found if options.all or item.is_host or item in devices]


def named(found: Sequence[Found], options: argparse.Namespace) -> list[str]:
    """Return the devices named by `--device`, or else by SGLCORE_DEVICE if a package has that
    name."""
    name = os.environ.get(DEVICE, "").partition(":")[0]
    return options.device or [item.folder.name for item in found if item.folder.name == name]


def wanted_torch(found: Sequence[Found], options: argparse.Namespace, machine: Machine) -> Wanted:
    """Return the requirements on torch. Raises InstallError."""
    devices = packages.chosen(found, named(found, options))
    hosts = [needs for item in found if item.is_host and (needs := needs_of(item.folder)) is not None]
    if len(hosts) != 1:
        has = f"{options.root}/devices has {len(hosts)} packages of processors with [tool.sglcore.torch]"
        raise InstallError(f"{has}; wanted one: give the package of the processor that table")
    names = ", ".join(item.folder.name for item in devices) or "no accelerator"
    reason = f"{names} was {'named' if named(found, options) else 'seen'}"
    return Wanted(
        host=hosts[0],
        devices=tuple(needs for item in devices if (needs := needs_of(item.folder)) is not None),
        reason="--processor was given" if options.processor else reason,
        machine=machine,
        version=options.torch,
        index=options.torch_index,
        only_processor=options.processor,
    )


def with_simulator(folders: list[Path], choice: Choice, options: argparse.Namespace) -> list[Path]:
    """Return the packages, followed by the simulator if it is wanted and supports this torch."""
    simulator = options.root / SIMULATOR
    if not options.all or options.without_simulator or not simulator.is_dir():
        return folders
    if takes(simulator, choice.number):
        if choice.brings_triton:
            print(
                "this torch has an accelerator's runtime, for which simulated devices are taken: their tests may fail"
            )
        return [*folders, simulator]
    print(f"the simulator is left out: it does not allow torch {choice.number}")
    return folders


def carry_out(
    options: argparse.Namespace,
    folders: Sequence[Path],
    choice: Choice,
    here: running.Place,
    begun: Sequence[running.Building],
) -> None:
    """Run the commands. Torch is installed first, because only its metadata says whether it brings
    Triton. Builds that run ahead are awaited before the last command, which would repeat them."""
    running.check_disk(choice, here)
    torch = commands.of_torch(choice, commands.constraints_for(options.root, choice.number))
    has_triton = choice.brings_triton
    if torch:
        running.run(torch, here, choice.megabytes[0])
        present = installed()
        has_triton = present is not None and present.brings_triton
    planned = commands.in_order(options.root, folders, options.extra, choice, here.machine.system, has_triton)
    *first, last = planned[1:] if torch else planned
    for command in first:
        running.run(command, here)
    running.wait_for(begun)
    running.run(last, here)
    if options.all:
        fetch_wheels(options.root, folders, here.sources)


def fetch_wheels(root: Path, folders: Sequence[Path], sources: Sources) -> None:
    """Download the vendors' wheels in each package's `[tool.sglcore] test-wheels`; tests read them
    but never install them. Without a wheel the tests that need it are skipped, which a run of all
    lanes reports."""
    for wheel in [wheel for folder in folders for wheel in settings(folder).get("test-wheels", ())]:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
        ran = subprocess.run((*pip, "-d", str(root / WHEELS), wheel), cwd=root, check=False, capture_output=True)
        said = "fetched for the tests" if ran.returncode == 0 else f"could not be fetched from {sources.index}"
        print(f"{wheel}: {said}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
