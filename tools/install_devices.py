"""Install sglcore with the device packages that this machine needs, into the interpreter that runs
this file.

The processor's package is always installed; an accelerator's package is installed when its probe
sees the hardware, and decides which build of torch is taken. The declarations and probes are read
from this checkout, so nothing need be installed before. For tests, `--all` takes every package and
the simulator. What a package compiles is begun while pip fetches torch. Standard library only;
`installer` has the parts.
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
"""The variable by which a start chooses its device."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the four facts of every package, then install; 1 with one line about what was wrong,
    130 when interrupted."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return install(options)
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: what is installed stays, and {AGAIN} goes on from there", file=sys.stderr)
        return 130


def install(options: argparse.Namespace) -> int:
    """The steps in order; raises InstallError."""
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
    """The options."""
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
    """Those that are installed: the processor's, and the accelerators that are to be usable, or
    all."""
    devices = packages.chosen(found, named(found, options))
    return [item for item in found if options.all or item.is_host or item in devices]


def named(found: Sequence[Found], options: argparse.Namespace) -> list[str]:
    """The devices that were asked for; the one that a start would be given by the variable is, if a
    package has it."""
    name = os.environ.get(DEVICE, "").partition(":")[0]
    return options.device or [item.folder.name for item in found if item.folder.name == name]


def wanted_torch(found: Sequence[Found], options: argparse.Namespace, machine: Machine) -> Wanted:
    """What torch must be for; raises InstallError."""
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
    """The packages, with the simulator after them where it is wanted and allows this torch."""
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
    """Run the commands. What torch asks for is known when it is there; what is compiled ahead,
    before it would be compiled."""
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
    """Vendors' wheels that tests read but never install, as a package's `[tool.sglcore]
    test-wheels` names them. Without one, the tests that need it are skipped, and a run of all lanes
    says so."""
    for wheel in [wheel for folder in folders for wheel in settings(folder).get("test-wheels", ())]:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
        ran = subprocess.run((*pip, "-d", str(root / WHEELS), wheel), cwd=root, check=False, capture_output=True)
        said = "fetched for the tests" if ran.returncode == 0 else f"could not be fetched from {sources.index}"
        print(f"{wheel}: {said}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
