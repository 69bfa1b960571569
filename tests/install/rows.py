"""The machines and options for which the installer's commands must resolve, and one run of pip for
such a row."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import sglcore
from tools.installer.choice import Wanted, choose
from tools.installer.commands import TESTS, in_order, pinned
from tools.installer.needs import needs_of, takes
from tools.installer.pythons import served
from tools.installer.sources import Machine, Sources

ROOT = Path(sglcore.__file__).parents[1]
LAUNCHER = Path(__file__).with_name("pip_elsewhere.py")
HOST = "cpu"
NAMES: Mapping[str, tuple[str, str, str]] = {
    "Linux x86-64": ("Linux", "x86_64", ""),
    "NVIDIA": ("Linux", "x86_64", "cuda"),
    "AMD": ("Linux", "x86_64", "hip"),
    "Intel": ("Linux", "x86_64", "xpu"),
    "Ascend": ("Linux", "x86_64", "npu"),
    "Ascend on Arm": ("Linux", "aarch64", "npu"),
    "Moore Threads": ("Linux", "x86_64", "musa"),
    "Linux Arm": ("Linux", "aarch64", ""),
    "macOS Arm": ("Darwin", "arm64", "mlx"),
}
"""System, processor and present device ("" for none)."""
WRITE = "import sys; from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel(sys.argv[1])"
GLIBC, MACOS = 35, 14
"""The newest versions that wheels may require: glibc 2.35 (Ubuntu 22.04), and macOS 14."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One installation. `everything`: the test environment of all packages; `torch`: another
    version than the preferred one."""

    name: str
    python: str
    extra: str = ""
    everything: bool = False
    torch: str = ""

    def __str__(self) -> str:
        words = (self.name, self.python, self.extra, "all" * self.everything, f"torch {self.torch}" * bool(self.torch))
        return ", ".join(word for word in words if word)

    @property
    def machine(self) -> Machine:
        """The machine as the installer sees it."""
        system, processor, _ = NAMES[self.name]
        return Machine(system=system, machine=processor, python=f"cp{self.python.replace('.', '')}")

    @property
    def needs_build(self) -> bool:
        """Whether some requirements accept only a torch build from a separate index, so that the
        row can not resolve with the public torch."""
        needs = needs_of(ROOT / "devices" / (NAMES[self.name][2] or HOST))
        if needs is None or not needs.beside:
            return False
        number, system = self.torch or needs.versions[0], NAMES[self.name][0]
        return not any(build.serves(number, system) and not build.index for build in needs.builds)

    def commands(self) -> list[tuple[str, ...]]:
        """Return the commands that the installer prints if every index is reachable."""
        device = NAMES[self.name][2]
        every = {path.parent.name: path.parent for path in sorted(ROOT.glob("devices/*/pyproject.toml"))}
        host = needs_of(every[HOST])
        needs = needs_of(every[device]) if device else None
        assert host is not None
        wanted = Wanted(
            host=host,
            devices=() if needs is None else (needs,),
            reason="planned",
            machine=self.machine,
            version=self.torch,
        )
        choice = choose(wanted, None, Sources(), lambda *_: "")
        folders = list(every.values()) if self.everything else [every[name] for name in (HOST, device) if name]
        if self.everything and takes(ROOT / "simulator", choice.number):
            folders.append(ROOT / "simulator")
        return in_order(ROOT, folders, self.extra, choice, self.machine.system, choice.brings_triton)


def rows() -> list[Row]:
    """Return every machine with every Python; the tests of all packages, and of one package with
    its hardware; and every other version of torch."""
    oldest, newest = served()[0], served()[-1]
    found = [Row(name=name, python=python) for name in NAMES for python in served()]
    found += [Row(name="Linux x86-64", python=python, extra="test", everything=True) for python in (oldest, newest)]
    found += [Row(name="Linux Arm", python=oldest, extra="test", everything=True)]
    found += [Row(name=name, python=oldest, extra="test") for name in NAMES if NAMES[name][2]]
    first = {device: name for name, (_, _, device) in reversed(list(NAMES.items()))}
    for device, name in first.items():
        needs = needs_of(ROOT / "devices" / (device or HOST))
        found += [Row(name=name, python="3.12", torch=version) for version in (needs.versions[1:] if needs else ())]
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of one run of pip: options for indexes, requirements, and constraint files."""

    options: tuple[str, ...]
    requirements: tuple[str, ...]
    constraints: tuple[str, ...]

    @property
    def without_build(self) -> Asked:
        """The same with torch from the public index."""
        plain = tuple(re.sub(r"^(torch==[\d.]+)\+.*", r"\1", text) for text in self.requirements)
        return Asked((), plain, self.constraints)


def asked(commands: Sequence[tuple[str, ...]]) -> Asked:
    """Join all commands into one run, which is stricter than separate runs. Folders of the checkout
    are replaced by their package names."""
    options, requirements, constraints = [], [], []
    for command in commands:
        words = list(command[4:])
        while words:
            word = words.pop(0)
            if word == "-c":
                constraints.append(words.pop(0))
            elif word in ("--extra-index-url", "--index-url"):
                options += [word, words.pop(0)]
            elif word == "-e":
                requirements.append(_named(words.pop(0)))
            elif word == "--progress-bar":
                words.pop(0)
            elif not word.startswith("-"):
                requirements.append(word)
    return Asked(tuple(options), tuple(requirements), tuple(dict.fromkeys(constraints)))


def contents(row: Row, what: Asked) -> tuple[object, ...]:
    """Return the input of pip for a row, with the checkout's packages replaced by their
    requirements: rows with equal input resolve alike."""
    projects = {_named(str(path.parent.relative_to(ROOT))): path for path in ROOT.glob("devices/*/pyproject.toml")}
    texts: list[str] = []
    for text in what.requirements:
        name, _, extra = text.partition("[")
        if name not in projects:
            texts.append(text)
            continue
        project = tomllib.loads(projects[name].read_text())["project"]
        own = project.get("optional-dependencies", {}).get(extra.rstrip("]"), [])
        texts += [project["requires-python"], *project["dependencies"], *own]
    return (row.python, NAMES[row.name][:2], tuple(sorted(set(texts))), what.constraints)


def of_triton(commands: Sequence[tuple[str, ...]]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Split the commands into those that install the tests' own Triton, which pip runs separately
    after torch, and the others."""
    own = [command for command in commands if command[-1] in pinned(ROOT / TESTS)]
    return own, [command for command in commands if command not in own]


def _named(folder: str) -> str:
    path, _, extra = folder.partition("[")
    name = tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"]["name"]
    return f"{name}[{extra}" if extra else name


def stand_ins(folder: Path) -> Path:
    """Make wheels of this checkout's packages with their metadata only, as the build backend writes
    it."""
    every = (ROOT, *(path.parent for path in sorted(ROOT.glob("devices/*/pyproject.toml"))), ROOT / "simulator")
    begun = []
    for each in every:
        own = folder / each.name
        own.mkdir(parents=True)
        command = (sys.executable, "-c", WRITE, str(own))
        begun.append(subprocess.Popen(command, cwd=each, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    assert not any(child.wait() for child in begun)
    for info in sorted(folder.glob("*/*.dist-info")):
        name = info.name.removesuffix(".dist-info")
        with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info.name}/METADATA", (info / "METADATA").read_text())
            wheel.writestr(f"{info.name}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info.name}/RECORD", "")
    return folder


@dataclass(frozen=True, slots=True)
class Pip:
    """A pip that resolves without downloading, an index, and the stand-in wheels."""

    folder: Path
    index: str
    wheels: Path

    def resolve(self, row: Row, what: Asked, report: Path, *further: str) -> tuple[str, dict[str, str]]:
        """Return pip's error ("" if it found everything) and the version of each package; waits
        some seconds."""
        options = ("--isolated", "--dry-run", "--ignore-installed", "--no-cache-dir", "--disable-pip-version-check")
        options = (*options, "--timeout", "300")
        files = [word for path in what.constraints for word in ("-c", str(ROOT / path))]
        target = ("--only-binary", ":all:", "--implementation", "cp", "--python-version", row.python, *platforms(row))
        sources = ("--index-url", self.index, "--find-links", str(self.wheels), *what.options)
        words = (*options, *sources, *target, *files, *further, "--report", str(report), *what.requirements)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environ |= {
            "PIP_CONFIG_FILE": os.devnull,
            "PYTHONPATH": str(self.folder),
            "PIP_CERT": os.environ.get("PIP_CERT", ""),
        }
        environ = {name: value for name, value in environ.items() if value}
        command = (sys.executable, str(LAUNCHER), json.dumps(markers(row)), "install", *words)
        ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if ran.returncode:
            return "\n".join((ran.stdout + ran.stderr).strip().splitlines()[-12:]), {}
        found = json.loads(report.read_text())["install"]
        return "", {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in found}


def platforms(row: Row) -> list[str]:
    """Return the platform tags of wheels that a row accepts."""
    system, processor, _ = NAMES[row.name]
    if system == "Darwin":
        names = [f"macosx_{number}_0_{kind}" for number in range(MACOS, 10, -1) for kind in (processor, "universal2")]
        names += [f"macosx_10_{number}_universal2" for number in range(16, 8, -1)]
    else:
        names = [f"manylinux_2_{number}_{processor}" for number in range(GLIBC, 4, -1)]
        names += [
            f"manylinux2014_{processor}",
            f"manylinux2010_{processor}",
            f"manylinux1_{processor}",
            f"linux_{processor}",
        ]
    return [word for name in names for word in ("--platform", name)]


def markers(row: Row) -> dict[str, str]:
    """Return the values of environment markers on a row's machine."""
    system, processor, _ = NAMES[row.name]
    return {
        "python_version": row.python,
        "python_full_version": f"{row.python}.0",
        "implementation_version": f"{row.python}.0",
        "platform_system": system,
        "sys_platform": {"Linux": "linux", "Darwin": "darwin"}[system],
        "platform_machine": processor,
        "os_name": "posix",
        "platform_release": "",
        "platform_version": "",
    }
