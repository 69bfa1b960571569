"""The command `sglcore doctor`: finds out why the engine does not run here.

It imports only the standard library and modules of sglcore that do the same, so that it works where
other packages are missing or broken. `python -m sglcore.cli.doctor` runs it without typer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from types import MappingProxyType

from sglcore.core.errors import SglcoreError
from sglcore.device.candidate import Candidate, claims_of, try_package
from sglcore.device.choice import requested_device
from sglcore.device.control_group import memory_limits
from sglcore.device.discovery import Installed, discover
from sglcore.device.pci import unclaimed_devices
from sglcore.device.selection import decide
from sglcore.device.system import System, host_system
from sglcore.engine.process_end import leave

NATIVE: Mapping[str, str] = MappingProxyType(
    {
        "numpy": "numpy",
        "tokenizers": "tokenizers",
        "safetensors": "safetensors",
        "msgspec": "msgspec",
        "llguidance": "llguidance",
        "httptools": "httptools",
        "pyzmq": "zmq",
    }
)
"""Distribution with compiled code that the core needs -> module whose import shows that it
works."""
PURE = ("typer", "rich", "jinja2", "fastapi", "uvicorn", "prometheus-client")
"""Other distributions that the core needs."""
LEAST_PYTHON = (3, 11)
TORCH_SECONDS = 120.0
IMPORT_SECONDS = 60.0
LEAST_MEMORY = 2 << 30
"""Bytes of memory below which even the embedded model may not run."""

_OTHER_VARIABLES = frozenset({"SGLCORE_DOCTOR_TORCH_SECONDS"})

_IMPORT_TORCH = """
import sys
from importlib.util import find_spec
sys.path[:] = sys.argv[1:]
print("absent" if find_spec("torch") is None else __import__("torch").__version__)
"""


_IMPORT = """
import os, sys
names, sys.path[:] = sys.argv[1].split(","), sys.argv[2:]
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for name in names:
    try:
        __import__(name)
        print(name, file=out, flush=True)
    except BaseException as error:
        said = [line for line in str(error).splitlines() if line.strip()] or ["no message"]
        print(name, f"{type(error).__name__}: {said[-1].strip()}", file=out, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding of `sglcore doctor`: what it is about (`topic`), and what was found. The verdict
    is `ok`, `note` (no problem in itself) or `bad` (something will not run). `remedy` says what to
    do, and may be empty."""

    topic: str
    verdict: str
    found: str
    remedy: str = ""


Examination = Callable[[], Iterable[Check]]


def doctor(as_json: bool = False) -> None:
    """Check this machine and print what was found, with a remedy for each problem. The exit code is
    1 if something will not run."""
    sys.exit(main(("--json",) if as_json else ()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks and print the findings (with `--json` as JSON); return 1 if any is bad, else
    0.

    `arguments` are the command's words; None reads `sys.argv`. Raises SystemExit for unknown ones.
    """
    parser = argparse.ArgumentParser(prog="sglcore doctor", description="Check this machine.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    checks = examine(EXAMINATIONS)
    is_bad = any(check.verdict == "bad" for check in checks)
    if options.json:
        print(json.dumps({"healthy": not is_bad, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _print(checks)
    return int(is_bad)


def examine(examinations: Mapping[str, Examination]) -> tuple[Check, ...]:
    """Run all examinations and return their findings, in order. An exception of an examination
    becomes a bad finding under the name it has in `examinations`, with its traceback."""
    checks: list[Check] = []
    for topic, examination in examinations.items():
        try:
            checks.extend(examination())
        except Exception as error:
            checks.append(_raised(topic, error))
    return tuple(checks)


def check_python() -> Iterable[Check]:
    """Yield one Check of Python's version and place, `bad` if it is older than 3.11."""
    found = f"{platform.python_version()} at {sys.executable} on {platform.system()} {platform.machine()}"
    if sys.version_info < LEAST_PYTHON:
        yield Check("python", "bad", found, f"use Python {'.'.join(map(str, LEAST_PYTHON))} or newer")
    else:
        yield Check("python", "ok", found)


def check_distributions() -> Iterable[Check]:
    """Yield a Check for each distribution that the core needs: `bad` if it is not installed, or if
    it is compiled and its import fails.

    The imports run in another process, because a broken one may crash it.
    """
    found: dict[str, str] = {}
    for name in ("sglcore", *NATIVE, *PURE):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            yield Check(name, "bad", "not installed", f"pip install {name}")
    faults = import_faults([module for name, module in NATIVE.items() if name in found])
    for name, number in found.items():
        if fault := faults.get(NATIVE.get(name, "")):
            remedy = f"pip install --force-reinstall {name}=={number}"
            yield Check(name, "bad", f"{number}, but import {NATIVE[name]} fails: {fault}", remedy)
        else:
            yield Check(name, "ok", number)


def import_faults(modules: Sequence[str]) -> dict[str, str]:
    """Import modules in another process; return the error by module, for each that failed, so {} if
    all can be imported.

    If a module ends the process or exceeds IMPORT_SECONDS (a minute for all together), it has
    failed, and the remaining ones are imported in a new process.
    """
    faults: dict[str, str] = {}
    left = list(modules)
    while left:
        command = (sys.executable, "-c", _IMPORT, ",".join(left), *sys.path)
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
            lines, end = ran.stdout.splitlines(), f"its process ended with {ran.returncode}"
        except subprocess.TimeoutExpired as late:
            lines = (late.stdout or b"").decode().splitlines()
            end = f"it did not end in {IMPORT_SECONDS:g} s"
        for line in lines:
            name, _, fault = line.partition(" ")
            faults |= {name: fault} if fault else {}
        if len(lines) < len(left):
            faults[left[len(lines)]] = end
        left = left[len(lines) + 1 :]
    return faults


def check_devices() -> Iterable[Check]:
    """Yield Checks of every device package (the facts that its probe found), of accelerators that
    no package supports, and of the choice that a start would make."""
    found, requested = discover(), requested_device(None)
    if not found:
        yield Check("devices", "bad", "no device package is installed", "pip install sglcore-cpu")
    system = host_system()
    bus = system.pci()
    candidates = tuple(try_package(item, item.name == requested.name, system) for item in found)
    for candidate in candidates:
        yield from _check_device(candidate)
    for device in unclaimed_devices(claims_of(found), bus):
        yield Check("accelerator", "note", f"no installed package supports {device}", "install its vendor's package")
    try:
        chosen = decide(candidates, requested, bus).chosen
        yield Check("choice", "ok", f"{chosen}, because {chosen.reason}")
    except SglcoreError as error:
        yield Check("choice", "bad", str(error), error.remedy)
    except Exception as error:
        yield _raised("choice", error)


def _check_device(candidate: Candidate) -> Iterable[Check]:
    topic, report = f"device {candidate.name}", candidate.report
    if report is None:
        line, remedy = candidate.trouble()
        text = line if isinstance(candidate.error, SglcoreError) else f"{line}\n{_traceback(candidate.error)}"
        yield Check(topic, "bad", text, f"{remedy}; --device NAME of another starts without it")
        return
    for name, fact in report.facts.items():
        failing = "bad" if report.present and report.hiding is None else "note"
        yield Check(
            f"{topic}: {name}", "ok" if fact.holds else failing, fact.evidence, "" if fact.holds else fact.remedy
        )
    for name, text in report.details.items() if report.present else ():
        if text:
            yield Check(f"{topic}: {name}", "note", text)
    for device in report.devices:
        yield Check(f"{topic}:{device.index}", "ok", str(device))
    if report.hidden:
        yield Check(f"{topic}: hidden", "note", report.hidden)


def check_memory(system: System | None = None) -> Iterable[Check]:
    """Yield one Check of the machine's memory and the limits of this process's control groups,
    `bad` below 2 GiB.

    `system` replaces the files of this machine in tests.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for limit, *_ in memory_limits(system or host_system()) if limit < total]
    usable = min((total, *limits))
    found = f"{_gib(total)} in the machine" + (f", limited to {_gib(usable)} by the control group" if limits else "")
    if usable < LEAST_MEMORY:
        yield Check("memory", "bad", found, f"give the process at least {_gib(LEAST_MEMORY)}")
    else:
        yield Check("memory", "ok", found)


def check_compiler() -> Iterable[Check]:
    """Yield one Check for a C++ compiler, which compiled graphs need: the command in CXX, c++, g++
    or clang++, the first that is on the PATH. `note` if none is found."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if path:
        yield Check("compiler", "ok", path)
    else:
        yield Check("compiler", "note", "no C++ compiler", "install g++ or clang++, or run with --graph off")


def check_torch() -> Iterable[Check]:
    """Yield one Check of whether torch can be imported, which is tried in another process, because
    a broken torch may crash it. `note` if it is not installed, `bad` if the import fails or takes
    too long.

    The variable SGLCORE_DOCTOR_TORCH_SECONDS replaces the time limit TORCH_SECONDS.
    """
    seconds = float(os.environ.get("SGLCORE_DOCTOR_TORCH_SECONDS", TORCH_SECONDS))
    command = (sys.executable, "-c", _IMPORT_TORCH, *sys.path)
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        yield Check("torch", "bad", f"import torch did not end in {seconds:g} s", "reinstall torch==2.13.0")
        return
    answer, complaint = ran.stdout.strip(), ran.stderr.strip().splitlines()
    if ran.returncode == 0 and answer == "absent":
        yield _absent_torch(discover())
    elif ran.returncode == 0 and answer:
        yield Check("torch", "ok", answer)
    else:
        last = complaint[-1] if complaint else "no message"
        is_numpys = "numpy" in import_faults(["numpy"])
        remedy = "repair numpy, which torch imports" if is_numpys else "reinstall torch==2.13.0"
        yield Check("torch", "bad", f"import torch ended with {ran.returncode}: {last}", remedy)


def _absent_torch(found: Sequence[Installed]) -> Check:
    """Return the finding for a missing torch, always a `note`; its text and remedy depend on which
    of the installed device packages require torch."""
    asking = [item.distribution for item in found if item.distribution and _requires_torch(item.distribution)]
    if asking:
        return Check("torch", "note", f"not installed; needed by {', '.join(asking)}", "pip install torch==2.13.0")
    if found:
        return Check("torch", "note", "not installed, and no installed device package needs it")
    return Check("torch", "note", "not installed", "pip install torch==2.13.0, unless your device does not use it")


def _requires_torch(distribution: str) -> bool:
    """Return whether a distribution requires torch without one of its extras. False if it is not
    installed."""
    try:
        wanted = requires(distribution) or ()
    except PackageNotFoundError:
        return False
    return any(re.match(r"torch\b(?!-)", text) and "extra ==" not in text for text in wanted)


def check_environment() -> Iterable[Check]:
    """Yield a `note` for each variable with a name that begins with SGLCORE_: its value unless it
    is secret, or that sglcore does not read it."""
    from sglcore.config.engine_config import EngineConfig
    from sglcore.config.server_config import ServerConfig
    from sglcore.config.settings import PREFIX, settings_of

    known = {item.variable: item for record in (EngineConfig, ServerConfig) for item in settings_of(record).values()}
    for name in sorted(name for name in os.environ if name.startswith(PREFIX)):
        value, item = os.environ[name], known.get(name)
        if item is not None and item.is_secret:
            yield Check(name, "note", "set; its value is secret")
        elif item is not None or name in _OTHER_VARIABLES:
            yield Check(name, "note", value)
        else:
            yield Check(name, "note", "set, but sglcore does not read it", "unset it, or correct its name")


EXAMINATIONS: Mapping[str, Examination] = MappingProxyType(
    {
        "python": check_python,
        "distributions": check_distributions,
        "devices": check_devices,
        "memory": check_memory,
        "compiler": check_compiler,
        "torch": check_torch,
        "environment": check_environment,
    }
)


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def _raised(topic: str, error: Exception) -> Check:
    return Check(topic, "bad", _traceback(error), "report it to the maintainers of this part")


def _traceback(error: Exception | None) -> str:
    return "".join(traceback.format_exception(error)).strip()


def _print(checks: Sequence[Check]) -> None:
    width = max(len(check.topic) for check in checks)
    counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in ("ok", "note", "bad")}
    said = "something will not run" if counts["bad"] else "no problem was found"
    print(f"{said}: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}\n")
    for check in checks:
        found = check.found.replace("\n", "\n    ")
        print(f"{check.verdict:<5} {check.topic:<{width}}  {found}")
        if check.remedy:
            print(f"{'':<5} {'':<{width}}  -> {check.remedy}")


if __name__ == "__main__":
    leave(main())
