"""A device package to begin with: files from `template/`, filled in with a name, that pass C0 as
they are.

For a device with torch and Triton, files of `template_torch/` replace those of the same name. If
torch itself was built for the device, files of `template_built_in/` replace these too.
"""

from __future__ import annotations

import keyword
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType

from sglcore.core.errors import ConfigError
from sglcore.device.package import API

SUFFIX = ".in"
NAME = "NAME"
MODULE = re.compile(r"torch[._]([a-z][a-z0-9_]*)")
NEXT_STEPS = """
The package passes C0 as it is and reports that there is no hardware. Next:
  1. pip install -e {folder} && sglcore devices {name}
  2. sglcore conform {name} --level C0; without hardware, docs/add-a-device.md shows how to simulate a machine
  3. {folder}/sglcore_{name}/probe.py: how to detect the hardware and its driver
  4. {folder}/sglcore_{name}/facts.py: {facts}; then sglcore conform {name} --level C1
  5. {rest}; then continue with docs/add-a-device.md
"""
PLAIN = MappingProxyType(
    {
        "facts": "the device string of its tensors",
        "rest": "graphs.py and kernels.py, when C2 passes without them",
    }
)
TORCH = MappingProxyType(
    {
        "facts": "the features that it lacks; capability.py: the names of chip properties in {module}",
        "rest": "kernels.py: launch configurations for your compiler, when C3 passes",
    }
)
PRINT_ORDER = "from {package}.bring_up import BRING_UP; print(BRING_UP.text(), end='')"


def next_steps(name: str, folder: Path, module: str | None = None) -> str:
    """Return the text for the terminal that says what to fill in in the package that
    `write_package` wrote with these arguments, in what order."""
    words = {key: text.format(module=module) for key, text in (TORCH if module else PLAIN).items()}
    return NEXT_STEPS.format(name=name, folder=folder, **words)


def write_package(name: str, folder: Path, module: str | None = None) -> tuple[Path, ...]:
    """Write the files of a new device package to `folder` and return their paths, sorted. `module`:
    the device's module of torch, as `--torch` takes it; None: the device is not torch's. Raises
    ConfigError for a name that can not be a module's, for another module, or for a folder that has
    files already."""
    if not re.fullmatch(r"[a-z][a-z0-9]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} cannot name a device", wanted="a lower-case word, such as acme")
    values = {"name": name, "api": str(API), **_torch_values(f"torch_{name}" if module is None else module)}
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", remedy="give another --path")
    made: dict[Path, None] = {}
    for layer in _layers(module):
        for source, target in _sources(files("sglcore") / "conformance" / layer, folder, name):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_filled(source.read_text(encoding="utf-8"), values), encoding="utf-8")
            made[target] = None
    order = folder / f"sglcore_{name}" / "bring_up.txt"
    order.write_text(_order_text(f"sglcore_{name}", folder), encoding="utf-8")
    return tuple(sorted((*made, order)))


def _torch_values(module: str) -> dict[str, str]:
    found = MODULE.fullmatch(module)
    if found is None:
        raise ConfigError(
            f"{module!r} is not a device module of torch",
            wanted="torch.TYPE for a device type of torch's own, or torch_TYPE for an extension that registers one",
        )
    return {"module": module, "type": found[1], "TYPE": found[1].upper()}


def _layers(module: str | None) -> tuple[str, ...]:
    if module is None:
        return ("template",)
    return ("template", "template_torch", *(("template_built_in",) if "." in module else ()))


def _filled(text: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(f"{{{{{key}}}}}", value)
    return text


def _order_text(package: str, folder: Path) -> str:
    """Return the text of the start-up steps of the written package, computed in a process of its
    own, so that this process imports nothing of the package. Waits; raises CalledProcessError if
    that process fails."""
    words = (sys.executable, "-B", "-c", PRINT_ORDER.format(package=package))
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout


def _sources(source: Traversable, target: Path, name: str) -> list[tuple[Traversable, Path]]:
    found: list[tuple[Traversable, Path]] = []
    for entry in source.iterdir():
        place = target / entry.name.replace(NAME, name).removesuffix(SUFFIX)
        if entry.is_dir():
            found += _sources(entry, place, name)
        elif entry.name.endswith(SUFFIX):
            found.append((entry, place))
    return found
