"""Builds source distributions and wheels of a checkout; the same commit, compiler and pins give the
same bytes.

Each distribution is built from a copy of the files that git knows, so that stray files of a
checkout get into no wheel.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tools.wheels.distributions import ROOT, Distribution, ReleaseError, distributions
from tools.wheels.environment import interpreter, run

LICENSE = "LICENSE"
OBJECTS = ROOT / "build" / "native" / "objects"
LEFT_OUT = ("tests/", "ci.toml")
"""Files of a package's folder that are not distributed: only a checkout uses them."""
CORE = ("sglcore/", "pyproject.toml", "README.md", LICENSE)
"""Files of the checkout that belong to the core's distribution."""


def build(out: Path, names: Sequence[str] = (), root: Path = ROOT, say: Callable[[str], None] = print) -> list[Path]:
    """Build all distributions, or the named ones, into a folder, which is emptied first. Waits,
    minutes if the native kernels are not compiled yet. Raises ReleaseError."""
    chosen = [each for each in distributions(root) if not names or each.name in names]
    if unknown := set(names) - {each.name for each in chosen}:
        known = ", ".join(each.name for each in distributions(root))
        raise ReleaseError(f"found no distribution {', '.join(sorted(unknown))}; wanted some of {known}")
    python, epoch = interpreter(), _epoch(root)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for each in chosen:
        with tempfile.TemporaryDirectory() as scratch:
            for path in _built(each, root, Path(scratch), python, epoch):
                shutil.copy(path, out)
                say(f"{path.stat().st_size / 1e6:8.2f} MB  {path.name}")
    return sorted(out.iterdir())


def _built(each: Distribution, root: Path, scratch: Path, python: Path, epoch: int) -> list[Path]:
    """Build the source distribution and the wheels of one distribution in a scratch folder."""
    tree = _copied(each, root, scratch / "tree")
    environ = _environment(epoch)
    is_native = (tree / "setup.py").exists()
    made = scratch / "made"
    call = (str(python), "-m", "build", "--no-isolation", "--outdir")
    run((*call, str(made), str(tree)), cwd=tree, environ=environ)
    if is_native:
        _make_portable(made, python, environ)
        plain = {**environ, "SGLCORE_CPU_BUILD": "none"}
        run((*call, str(made), "--wheel", str(tree)), cwd=tree, environ=plain)
    for archive in made.glob("*.tar.gz"):
        normalise(archive, epoch)
    return sorted(made.iterdir())


def _environment(epoch: int) -> dict[str, str]:
    """Return the caller's environment without variables that would change the result."""
    taken = {name: value for name, value in os.environ.items() if not name.startswith(("SGLCORE_", "PYTHON"))}
    native = {"SGLCORE_CPU_BUILD": "all", "SGLCORE_CPU_OBJECTS": str(OBJECTS)}
    return {**taken, **native, "SOURCE_DATE_EPOCH": str(epoch)}


def _epoch(root: Path) -> int:
    """Return SOURCE_DATE_EPOCH, or else the commit's time. Raises ReleaseError if there is
    neither."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return int(given) if given else int(_git(root, "log", "-1", "--format=%ct").strip())


def _git(root: Path, *words: str) -> str:
    """Return git's output in a checkout of any owner. Raises ReleaseError if git fails."""
    try:
        command = ("git", "-c", "safe.directory=*", *words)
        ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ReleaseError(f"wheels are built from the files that git tracks, but git cannot be run: {error}") from None
    if ran.returncode:
        raise ReleaseError(f"wheels are built from the files that git tracks: {ran.stderr.strip()}; build in a clone")
    return ran.stdout


def _copied(each: Distribution, root: Path, tree: Path) -> Path:
    """Copy the current files of a distribution, and the licence, to `tree`."""
    for name in _git(each.folder, "ls-files", "-z", ".").split("\0"):
        source, target = each.folder / name, tree / name
        if name and source.is_file() and _belongs(name, is_core=each.folder == root):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    shutil.copyfile(root / LICENSE, tree / LICENSE)
    for path in tree.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return tree


def _belongs(name: str, is_core: bool) -> bool:
    return name.startswith(CORE) if is_core else not name.startswith(LEFT_OUT)


def _make_portable(made: Path, python: Path, environ: Mapping[str, str]) -> None:
    """Give a wheel with native code its manylinux platform tag with auditwheel, which reads the
    needed symbols. Raises ReleaseError if the native kernels were not compiled."""
    (wheel,) = made.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    if not any(name.endswith(".so") for name in names):
        said = [zipfile.ZipFile(wheel).read(name).decode().strip() for name in names if name.endswith(".error")]
        raise ReleaseError(f"the native kernels are not compiled: {'; '.join(said) or 'the wheel has no library'}")
    if sys.platform != "linux":
        return
    path = f"{python.parent}{os.pathsep}{environ.get('PATH', '')}"
    words = ("-m", "auditwheel", "repair", "--strip", "--wheel-dir", str(made), str(wheel))
    run((str(python), *words), cwd=made, environ={**environ, "PATH": path})
    wheel.unlink()


def normalise(archive: Path, epoch: int) -> None:
    """Repack a source distribution, so that its bytes do not depend on user or time of the
    build."""
    packed = io.BytesIO()
    with tarfile.open(archive) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            entry = tarfile.TarInfo(member.name)
            entry.type, entry.size, entry.mtime = member.type, member.size, epoch
            entry.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(entry, old.extractfile(member) if member.isfile() else None)
    with archive.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=epoch) as zipped:
        zipped.write(packed.getvalue())
