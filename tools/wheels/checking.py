"""Checks every distribution before publication: its files, metadata and size.

A wheel must contain exactly the files of the package's folder that git knows. This finds missing
package data patterns and stray files without a list to maintain.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

from tools.wheels.distributions import ROOT, Distribution, ReleaseError, distributions, version
from tools.wheels.environment import interpreter, run

MEGABYTES = {"sglcore": 18.0, "sglcore-cpu": 4.0}
OTHERS = 0.5
"""The maximum size of a file in megabytes: an index stores it forever, and every user downloads
it."""
LIBRARY = "sglcore_cpu/libsglcore_cpu.so"
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
"""e_machine in the ELF header, by architecture."""
WHEEL = re.compile(r"(?P<stem>[^-]+)-(?P<version>[^-]+)-py3-none-(?P<platform>any|\S+)\.whl")
LINUX = re.compile(r"manylinux_2_\d+_(?P<machine>\w+?)(\.|$)")


@dataclass(frozen=True, slots=True)
class Wheel:
    """An opened wheel. `machine`: its architecture; empty if it fits all."""

    path: Path
    machine: str
    files: zipfile.ZipFile

    @property
    def names(self) -> set[str]:
        """The names of its files."""
        return {name for name in self.files.namelist() if not name.endswith("/")}

    def info(self, name: str) -> str:
        """Return the path of a metadata file."""
        stem, number, *_ = self.path.name.split("-")
        return f"{stem}-{number}.dist-info/{name}"

    def message(self, name: str) -> Message:
        """Parse a metadata file with headers."""
        return BytesParser().parsebytes(self.files.read(self.info(name)))


def problems(folder: Path, names: Sequence[str] = (), root: Path = ROOT) -> list[str]:
    """Return the problems of the distributions in a folder, one line each; all distributions of
    the checkout, or the named ones, must be there. Raises ReleaseError if a tool can not run."""
    wanted, found = version(root), []
    for each in distributions(root):
        if names and each.name not in names:
            continue
        wheels = sorted(folder.glob(f"{each.stem}-{wanted}-*.whl"))
        sources = folder / f"{each.stem}-{wanted}.tar.gz"
        if not wheels or not sources.is_file():
            found.append(f"{each.name} {wanted}: found no {'wheel' if not wheels else sources.name} in {folder}")
            continue
        for wheel in wheels:
            found += [f"{wheel.name}: {problem}" for problem in wheel_problems(wheel, each)]
        found += [f"{sources.name}: {problem}" for problem in source_problems(sources, each)]
    return found + _described(folder)


def undeclared(each: Distribution) -> list[str]:
    """Return the non-Python files of a distribution's packages that no package data pattern
    matches."""
    data, found = each.declared["tool"]["setuptools"]["package-data"], []
    for target, folder in _packaged(each).items():
        base = each.folder / folder
        named = {path for pattern in data.get(target.replace("/", "."), ()) for path in base.glob(pattern)}
        named |= {path for pattern in data.get("*", ()) for path in base.rglob(pattern)}
        found += [name for name in git_files(base, ".") if not name.endswith(".py") and base / name not in named]
    return found


def wheel_problems(path: Path, each: Distribution) -> list[str]:
    """Return the problems of one wheel."""
    match = WHEEL.fullmatch(path.name)
    linux = LINUX.search(match["platform"]) if match else None
    if match is None or (match["platform"] != "any" and linux is None):
        return ["wanted a wheel for any Python on any machine, or on manylinux"]
    with zipfile.ZipFile(path) as files:
        wheel = Wheel(path, linux["machine"] if linux else "", files)
        held = (_files(wheel, each), _record(wheel), _metadata(wheel, each), _native(wheel), _size(path, each))
    return [problem for problems in held for problem in problems]


def source_problems(path: Path, each: Distribution) -> list[str]:
    """Return the problems of one source distribution: it must have all sources of the wheel, and no
    tests."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = git_files(each.folder, ".")
    folders = {target.partition("/")[0] for target in _packaged(each)}
    wanted = {name for name in tracked if name.split("/")[0] in {*folders, "csrc", "setup.py", "pyproject.toml"}}
    missing = sorted({*wanted, "LICENSE", "README.md"} - names)
    stray = sorted(name for name in names if re.match(r"(tests|build|docs|devices|ci)(/|$)", name))
    found = [f"{name} is missing" for name in missing] + [f"{name} is stray" for name in stray]
    return found + _size(path, each)


def git_files(folder: Path, *below: str) -> list[str]:
    """Return the existing files of a folder that git knows, or those below the paths `below`.
    Raises ReleaseError."""
    command = ("git", "-c", "safe.directory=*", "ls-files", "-z", *below)
    try:
        listed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ReleaseError(f"wheels contain the files that git tracks: {error}; check in a clone") from None
    return [name for name in listed.split("\0") if name and (folder / name).is_file()]


def _packaged(each: Distribution) -> dict[str, str]:
    """Return the package folders in the wheel, each with its folder in the checkout."""
    where = each.declared["tool"]["setuptools"].get("package-dir", {})
    return {module.replace(".", "/"): folder for module, folder in (where or {each.stem: each.stem}).items()}


def _files(wheel: Wheel, each: Distribution) -> list[str]:
    """Check that the wheel has exactly the files that git knows."""
    wanted = {
        f"{target}/{name}"
        for target, folder in _packaged(each).items()
        for name in git_files(each.folder / folder, ".")
    }
    own = wheel.info("")
    found = {name for name in wheel.names if not name.startswith(own)} - ({LIBRARY} if wheel.machine else set())
    missing, stray = sorted(wanted - found), sorted(found - wanted)
    return [f"{name} is missing" for name in missing] + [f"{name} is stray" for name in stray]


def _record(wheel: Wheel) -> list[str]:
    """Check that RECORD lists every file with its digest, and no other."""
    rows = [line.rsplit(",", 2) for line in wheel.files.read(wheel.info("RECORD")).decode().splitlines()]
    told = {name: digest for name, digest, _ in rows if name != wheel.info("RECORD")}
    found = []
    for name in sorted(wheel.names - {wheel.info("RECORD")}):
        digest = base64.urlsafe_b64encode(hashlib.sha256(wheel.files.read(name)).digest()).rstrip(b"=").decode()
        if told.pop(name, "") != f"sha256={digest}":
            found.append(f"{name} differs from RECORD")
    return found + [f"RECORD lists {name}, which is missing" for name in told]


def _metadata(wheel: Wheel, each: Distribution) -> list[str]:
    """Check name, summary, licence, Python versions, description type and purity."""
    told, project = wheel.message("METADATA"), each.declared["project"]
    wanted = {
        "Name": each.name,
        "Summary": project["description"],
        "License-Expression": "Apache-2.0",
        "Requires-Python": project["requires-python"],
        "Description-Content-Type": "text/markdown",
    }
    found = [f"{key} is {told[key]!r}, wanted {value!r}" for key, value in wanted.items() if told[key] != value]
    if told.get_all("License-File") != ["LICENSE"] or wheel.info("licenses/LICENSE") not in wheel.names:
        found.append("the text of the licence is missing")
    if wheel.message("WHEEL")["Root-Is-Purelib"] != ("false" if wheel.machine else "true"):
        found.append("Root-Is-Purelib does not match the machine in the wheel's name")
    return found


def _native(wheel: Wheel) -> list[str]:
    """Check that a wheel has a library exactly if its name has an architecture, and for that
    architecture."""
    binaries = {name for name in wheel.names if re.search(r"\.(so|dylib|pyd|dll|o|a)(\.|$)", name)}
    if binaries != ({LIBRARY} if wheel.machine else set()):
        return [f"binaries are {', '.join(sorted(binaries)) or 'missing'}"]
    if not wheel.machine:
        return []
    number = int.from_bytes(wheel.files.read(LIBRARY)[18:20], "little")
    wanted = ELF_MACHINES.get(wheel.machine)
    return [] if number == wanted else [f"{LIBRARY} is for the machine {number}, wanted {wanted} for {wheel.machine}"]


def _size(path: Path, each: Distribution) -> list[str]:
    size, most = path.stat().st_size / 1e6, MEGABYTES.get(each.name, OTHERS)
    return [f"{size:.2f} MB, at most {most}"] if size > most else []


def _described(folder: Path) -> list[str]:
    """Check with twine what the index would refuse in metadata and description."""
    files = sorted(str(path) for path in (*folder.glob("*.whl"), *folder.glob("*.tar.gz")))
    if not files:
        return []
    try:
        run((str(interpreter()), "-m", "twine", "--no-color", "check", "--strict", *files))
    except ReleaseError as error:
        return [str(error)]
    return []
