"""Checkouts with made-up devices, and an environment with a scripted pip, for the tests of the
installer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import sglcore
from sglcore.device.package import API, DevicePackage
from sglcore.device.probe import Fact, ProbeReport
from tools import install_devices
from tools.installer.choice import Choice, Installed, choose
from tools.installer.commands import in_order
from tools.installer.packages import Found
from tools.installer.sources import Asker, Machine, Sources

LINUX = Machine(system="Linux", machine="x86_64", python="cp312")
ROOT = Path(sglcore.__file__).parents[1]
INSTALLER = ROOT / "tools" / "install_devices.py"

PROBE = """
from sglcore.device.probe import Fact, ProbeReport
def probe(named, system):
    {body}
    return ProbeReport(hardware=Fact({hardware}, "seen"), driver=Fact(True, ""), package=Fact(True, ""), runtime=Fact(True, ""))
"""
DECLARATION = """
from sglcore.device.package import API, DevicePackage
package = DevicePackage(name={name!r}, api=API, summary="planted", is_host={is_host}, probe="sglcore_{name}.probe:probe",
    facts="a:b", worker="a:b", attention={{}}, graphs={{}}, kernels={{"own": "a:b"}}, bring_up="a:b")
"""
PLAIN = """[tool.sglcore.torch]
versions = ["1.2.3", "1.1.0"]
[[tool.sglcore.torch.builds]]
name = "the plain build"
systems = ["Linux", "Darwin"]
megabytes = [1, 2]
brings_triton = {triton}
"""
LABELLED = """[tool.sglcore.torch]
versions = ["1.1.0"]
[[tool.sglcore.torch.builds]]
name = "the build for {name}"
systems = ["Linux", "Darwin"]
index = "http://127.0.0.1:9/whl"
label = "{name}9"
megabytes = [1, 2]
"""
BOTH = """[tool.sglcore.torch]
versions = ["1.2.3", "1.1.0"]
[[tool.sglcore.torch.builds]]
name = "the build for {name}"
systems = ["Linux"]
index = "http://127.0.0.1:9/cpu"
label = "{name}9"
megabytes = [1, 2]
brings_triton = false
[[tool.sglcore.torch.builds]]
name = "the plain build"
systems = ["Linux", "Darwin"]
megabytes = [3, 4]
"""
"""Two builds, as for the CPU: one from its own index, then the public one."""
BESIDE = """[tool.sglcore.torch]
versions = ["1.1.0"]
beside = ["extension=={{torch}}"]
vendor = ["no-such-vendor"]
note = "take the rest from the vendor"
[[tool.sglcore.torch.builds]]
name = "the plain build"
systems = ["Linux"]
megabytes = [1, 2]
"""
PIP = """
import json, os, pathlib, sys, time
asked = json.loads(pathlib.Path(os.environ["FAKE_PIP"]).read_text())
if sys.argv[1] == "config":
    print(asked["config"])
elif sys.argv[1] == "cache":
    print(asked["cache"])
else:
    with open(asked["ran"], "a") as out:
        print(json.dumps(sys.argv[1:]), file=out)
    for word, status, said, program in asked["answers"]:
        if word in " ".join(sys.argv):
            print(said, flush=True)
            exec(program)
            sys.exit(status)
"""


def checkout(
    root: Path, name: str, *, is_host: bool = False, hardware: bool = True, body: str = "pass", torch: str = PLAIN
) -> Path:
    """Plant a device package in a checkout with this repository's core; return the package's
    folder."""
    if not (root / "sglcore").exists():
        (root / "sglcore").symlink_to(ROOT / "sglcore")
        (root / "constraints.txt").write_text("# pins\ntorch==1.2.3\nnumpy==2\n")
        (root / "constraints-tests.txt").write_text("# Triton\ntriton==4.5.6\n")
    module = root / "devices" / name / f"sglcore_{name}"
    module.mkdir(parents=True)
    entry = f'[project.entry-points."sglcore.devices"]\n{name} = "sglcore_{name}:package [api-{API}]"\n'
    table = torch.format(name=name, triton="true")
    (module.parent / "pyproject.toml").write_text(entry + table)
    (module / "__init__.py").write_text(DECLARATION.format(name=name, is_host=is_host))
    (module / "probe.py").write_text(PROBE.format(hardware=hardware, body=body))
    return module.parent


def seen(root: Path, name: str, *, is_host: bool = False, hardware: bool = True, torch: str = PLAIN) -> Found:
    """Plant a package; return it with its probe's report, made in this process."""
    folder = checkout(root, name, is_host=is_host, hardware=hardware, torch=torch)
    words = dict.fromkeys(("probe", "facts", "worker", "bring_up"), "a:b")
    package = DevicePackage(
        name=name, api=API, summary="planted", is_host=is_host, attention={}, graphs={}, kernels={"own": "a:b"}, **words
    )
    fact = Fact(True, "seen")
    report = ProbeReport(hardware=Fact(hardware, "seen"), driver=fact, package=fact, runtime=fact)
    return Found(folder, package, report)


def refuse(index: str, version: str, machine: Machine) -> str:
    """An index that does not exist."""
    return "does not answer (planted)"


def offer(index: str, version: str, machine: Machine) -> str:
    """An index that has every version."""
    return ""


@dataclass(frozen=True)
class Plan:
    """The installer's plan: the choice of torch, and the arguments of each command after the common
    options."""

    choice: Choice
    commands: list[str]


def plan(
    root: Path,
    found: Sequence[Found],
    *words: str,
    ask: Asker = refuse,
    present: Installed | None = None,
    sources: Sources = Sources(),
    machine: Machine = LINUX,
    may_fail: bool = True,
) -> Plan:
    """Make the plan in this process, without pip and network."""
    options = install_devices.parse(["--root", str(root), *words])
    shown = install_devices.wanted_packages(found, options)
    wanted = install_devices.wanted_torch(found, options, machine)
    choice = choose(wanted, present, sources, ask, may_fail)
    folders = install_devices.with_simulator([item.folder for item in shown], choice, options)
    every = in_order(root, folders, options.extra, choice, machine.system, choice.brings_triton)
    return Plan(choice, [" ".join(words[words.index("-c") + 2 :]) for words in every])


def dry_run(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the installer without site packages, as on a fresh machine."""
    command = (sys.executable, "-I", "-S", str(INSTALLER), "--dry-run", "--root", str(root))
    return subprocess.run((*command, *words), capture_output=True, text=True, timeout=60, check=False)


def commands(ran: subprocess.CompletedProcess[str], constraints: str = "constraints.txt") -> list[str]:
    """The pip commands, without the common options."""
    lines = (line for line in ran.stdout.splitlines() if line.startswith("+ "))
    return [line.partition(f"-c {constraints} ")[2] for line in lines]


@dataclass
class Environment:
    """An environment of its own with a scripted pip.

    `answers`: (word, exit status, output, program to run); the first one with a word of the command
    applies.
    """

    folder: Path
    root: Path
    answers: list[tuple[str, int, str, str]] = field(default_factory=list)
    config: str = ""

    @property
    def packages(self) -> Path:
        """The folder of installed packages."""
        return next(self.folder.glob("lib/python*/site-packages"))

    @property
    def ran(self) -> list[list[str]]:
        """The arguments of pip's commands that install or download."""
        path = self.root / "ran.txt"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def start(
        self, *words: str, variables: Mapping[str, str] | None = None, python: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """Start the installer in a session of its own."""
        told = {"config": self.config, "cache": str(self.root / "cache"), "ran": str(self.root / "ran.txt")}
        (self.root / "fake-pip.json").write_text(json.dumps({**told, "answers": self.answers}))
        command = (str(self.folder / "bin" / "python"), *python, str(INSTALLER), "--root", str(self.root), *words)
        environ = {**os.environ, "FAKE_PIP": str(self.root / "fake-pip.json"), **(variables or {})}
        return subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def install(self, *words: str, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run the installer to its end."""
        child = self.start(*words, variables=variables)
        out, err = child.communicate(timeout=60)
        return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def environment(folder: Path, root: Path) -> Environment:
    """Make an environment without the real pip."""
    venv.create(folder, symlinks=True)
    made = Environment(folder, root)
    (made.packages / "pip").mkdir()
    (made.packages / "pip" / "__init__.py").write_text("")
    (made.packages / "pip" / "__main__.py").write_text(PIP)
    return made
