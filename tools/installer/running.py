"""Runs pip and the early builds of packages, and cleans up after interruptions, so that a second
installation continues where the first ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.installer.choice import Choice, size
from tools.installer.failures import check_space, explain, is_spoiled
from tools.installer.needs import InstallError, settings
from tools.installer.sources import Machine, Sources

LOG = Path("build") / "install.log"
SCRATCH = "pip-"
TELL_EVERY = 15.0
"""Seconds between two progress lines of a large download."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Paths and configuration of an installation. `scratch`: pip's temporary folder, on the
    checkout's disk; `log`: all output of pip."""

    root: Path
    scratch: Path
    log: Path
    sources: Sources
    machine: Machine


@dataclass(frozen=True, slots=True)
class Building:
    """A running early build of a package, and the file with its output."""

    folder: Path
    child: subprocess.Popen[bytes]
    said: Path


@contextmanager
def place(root: Path, sources: Sources, machine: Machine) -> Iterator[Place]:
    """Make a scratch folder and remove it after the block; first remove those of killed
    installations."""
    build = root / "build"
    build.mkdir(exist_ok=True)
    for left in build.glob(f"{SCRATCH}*"):
        if not _is_running(left.name.removeprefix(SCRATCH)):
            shutil.rmtree(left, ignore_errors=True)
    scratch = build / f"{SCRATCH}{os.getpid()}"
    scratch.mkdir(exist_ok=True)
    log = root / LOG
    log.write_bytes(b"")
    try:
        yield Place(root=root, scratch=scratch, log=log, sources=sources, machine=machine)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_running(number: str) -> bool:
    try:
        os.kill(int(number), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True


def run(command: Sequence[str], here: Place, megabytes: int = 0) -> None:
    """Run one pip command. Waits; raises InstallError with one line if it fails. `megabytes`:
    approximate download size, for progress lines; 0: none."""
    print("+", " ".join(command[2:]), flush=True)
    status, said = _once(command, here, megabytes)
    if status and is_spoiled(said):
        # pip's cache may hold a proxy's page instead of the file and would return it every time.
        status, said = _once((*command, "--no-cache-dir"), here, megabytes)
    if status:
        raise InstallError(explain(said, here.sources, here.machine, here.log))


def _once(command: Sequence[str], here: Place, megabytes: int) -> tuple[int, str]:
    environment = {"TMPDIR": str(here.scratch), **os.environ}
    with here.log.open("r+b") as log:
        start = log.seek(0, os.SEEK_END)
        child = subprocess.Popen(command, cwd=here.root, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            _wait(child, Path(environment["TMPDIR"]), megabytes)
        finally:
            _end(child)
        log.seek(start)
        return child.returncode, log.read().decode(errors="replace")


def _wait(child: subprocess.Popen[bytes], scratch: Path, megabytes: int) -> None:
    told = time.monotonic()
    while True:
        try:
            child.wait(TELL_EVERY if megabytes else None)
            return
        except subprocess.TimeoutExpired:
            found = sum(map(_size, scratch.glob("pip-*/*"))) / 1e6
            print(f"  {size(found)} of about {size(megabytes)} after {time.monotonic() - told:.0f} s", flush=True)


def _size(file: Path) -> int:
    """Return the size of a file; 0 if pip has removed it."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def check_disk(choice: Choice, here: Place) -> None:
    """Raise InstallError if there is no room for torch: until it is unpacked, pip keeps a download
    in its temporary folder and in its cache."""
    download, disk = choice.megabytes
    cache = cache_folder()
    scratch = Path(os.environ.get("TMPDIR") or here.scratch)
    needed = [(Path(sysconfig.get_path("purelib")), disk), (scratch, download)]
    check_space([*needed, *([(cache, download)] if cache else [])], f"torch {choice.number}")


def cache_folder() -> Path | None:
    """Return pip's cache folder; None: no cache. Waits."""
    command = (sys.executable, "-m", "pip", "cache", "dir", "--disable-pip-version-check")
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return Path(ran.stdout.strip()) if ran.returncode == 0 and ran.stdout.strip() else None


def forget_half_installed(packages: Path) -> list[str]:
    """Remove the metadata of packages that pip was interrupted at, so that it installs them again,
    and the folders that it was removing. Returns the packages' names.

    pip writes INSTALLER after a package's files, but treats a package with a metadata folder as
    installed.
    """
    for left in packages.glob("~*"):
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
    half = [path for path in packages.glob("*.dist-info") if not (path / "INSTALLER").is_file()]
    for path in half:
        shutil.rmtree(path)
    return sorted(path.name.removesuffix(".dist-info") for path in half)


@contextmanager
def building(folders: Sequence[Path], here: Place) -> Iterator[list[Building]]:
    """Start the early builds of packages (`[tool.sglcore] early-build`), which compile in advance
    what an installation would. Those that still run at the end of the block are killed with their
    children."""
    begun: list[Building] = []
    try:
        for folder in folders:
            if words := settings(folder).get("early-build"):
                begun.append(_begin(folder, words, here.scratch / f"{folder.name}.txt"))
        yield begun
    finally:
        for each in begun:
            if each.child.poll() is None:
                os.killpg(each.child.pid, signal.SIGKILL)
                each.child.wait()


def _begin(folder: Path, words: Sequence[str], said: Path) -> Building:
    with said.open("wb") as out:
        command = (sys.executable, *words)
        child = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    return Building(folder, child, said)


def wait_for(begun: Sequence[Building]) -> None:
    """Wait until all have ended. Prints each failed build with the package's `without-build`
    advice; this is no error, the installation continues."""
    for each in begun:
        if each.child.wait():
            lines = each.said.read_text(errors="replace").strip().splitlines() or ["it failed"]
            remedy = str(settings(each.folder).get("without-build", "see its README"))
            print(f"{each.folder.name}: {lines[0]}: {remedy.format(python=sys.executable)}", flush=True)
