"""What must hold of every distribution that is published: the files that are in it, their metadata
and their size.

A file is in a wheel exactly if git knows it in the package's folder; so a forgotten pattern of
package data and a stray file are both found, with no list to keep.
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
"""The most that a file may have: what an index stores for ever, and every user downloads."""
LIBRARY = "sglcore_cpu/libsglcore_cpu.so"
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
"""The number of a kind of machine in the header of its binaries."""
WHEEL = re.compile(r"(?P<stem>[^-]+)-(?P<version>[^-]+)-py3-none-(?P<platform>any|\S+)\.whl")
LINUX = re.compile(r"manylinux_2_\d+_(?P<machine>\w+?)(\.|$)")


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that was opened. `machine` is empty where it fits all."""

    path: Path
    machine: str
    files: zipfile.ZipFile

    @property
    def names(self) -> set[str]:
        """Of its files."""
        return {name for name in self.files.namelist() if not name.endswith("/")}

    def info(self, name: str) -> str:
        """The path of one of its own metadata's files."""
        stem, number, *_ = self.path.name.split("-")
        return f"{stem}-{number}.dist-info/{name}"

    def message(self, name: str) -> Message:
        """One of them that has headers."""
        return BytesParser().parsebytes(self.files.read(self.info(name)))


def problems(folder: Path, names: Sequence[str] = (), root: Path = ROOT) -> list[str]:
    """What is wrong with the distributions in a folder, one line each; all that the checkout has,
    or those named, must be there. Raises ReleaseError where a tool can not be run."""
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
    """Files of a distribution's packages that are no Python and that no pattern of its package data
    names."""
    data, found = each.declared["tool"]["setuptools"]["package-data"], []
    for target, folder in _packaged(each).items():
        base = each.folder / folder
        named = {path for pattern in data.get(target.replace("/", "."), ()) for path in base.glob(pattern)}
        named |= {path for pattern in data.get("*", ()) for path in base.rglob(pattern)}
        found += [name for name in git_files(base, ".") if not name.endswith(".py") and base / name not in named]
    return found


def wheel_problems(path: Path, each: Distribution) -> list[str]:
    """What is wrong with one wheel."""
    match = WHEEL.fullmatch(path.name)
    linux = LINUX.search(match["platform"]) if match else None
    if match is None or (match["platform"] != "any" and linux is None):
        return ["wanted a wheel for any Python on any machine, or on manylinux"]
    with zipfile.ZipFile(path) as files:
        wheel = Wheel(path, linux["machine"] if linux else "", files)
        held = (_files(wheel, each), _record(wheel), _metadata(wheel, each), _native(wheel), _size(path, each))
    return [problem for problems in held for problem in problems]


def source_problems(path: Path, each: Distribution) -> list[str]:
    """What is wrong with one source distribution: it has all that the wheel is made of, and no
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
    """The files of a folder that git knows and that are there, or those below some of its
    folders."""
    command = ("git", "-c", "safe.directory=*", "ls-files", "-z", *below)
    try:
        listed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ReleaseError(f"what belongs into wheels is what git knows: {error}; check in a clone") from None
    return [name for name in listed.split("\0") if name and (folder / name).is_file()]


def _packaged(each: Distribution) -> dict[str, str]:
    """The folders that are packages, as a wheel has them, each with its folder in the checkout."""
    where = each.declared["tool"]["setuptools"].get("package-dir", {})
    return {module.replace(".", "/"): folder for module, folder in (where or {each.stem: each.stem}).items()}


def _files(wheel: Wheel, each: Distribution) -> list[str]:
    """As git has them, and nothing else."""
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
    """Every file is listed with the digest that it has."""
    rows = [line.rsplit(",", 2) for line in wheel.files.read(wheel.info("RECORD")).decode().splitlines()]
    told = {name: digest for name, digest, _ in rows if name != wheel.info("RECORD")}
    found = []
    for name in sorted(wheel.names - {wheel.info("RECORD")}):
        digest = base64.urlsafe_b64encode(hashlib.sha256(wheel.files.read(name)).digest()).rstrip(b"=").decode()
        if told.pop(name, "") != f"sha256={digest}":
            found.append(f"{name} is not what RECORD says")
    return found + [f"RECORD lists {name}, which is not there" for name in told]


def _metadata(wheel: Wheel, each: Distribution) -> list[str]:
    """The licence, its text, who it is for, and the description."""
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
        found.append("Root-Is-Purelib does not fit the machine that its name says")
    return found


def _native(wheel: Wheel) -> list[str]:
    """A library exactly where the name says a kind of machine, and for that."""
    binaries = {name for name in wheel.names if re.search(r"\.(so|dylib|pyd|dll|o|a)(\.|$)", name)}
    if binaries != ({LIBRARY} if wheel.machine else set()):
        return [f"binaries are {', '.join(sorted(binaries)) or 'missing'}"]
    if not wheel.machine:
        return []
    number = int.from_bytes(wheel.files.read(LIBRARY)[18:20], "little")
    wanted = ELF_MACHINES.get(wheel.machine)
    return [] if number == wanted else [f"{LIBRARY} is for the machine {number}, wanted {wanted} of {wheel.machine}"]


def _size(path: Path, each: Distribution) -> list[str]:
    size, most = path.stat().st_size / 1e6, MEGABYTES.get(each.name, OTHERS)
    return [f"{size:.2f} MB, at most {most}"] if size > most else []


def _described(folder: Path) -> list[str]:
    """What the index would refuse of the metadata and of the description."""
    files = sorted(str(path) for path in (*folder.glob("*.whl"), *folder.glob("*.tar.gz")))
    if not files:
        return []
    try:
        run((str(interpreter()), "-m", "twine", "--no-color", "check", "--strict", *files))
    except ReleaseError as error:
        return [str(error)]
    return []
