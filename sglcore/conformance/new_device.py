"""A device package to begin with: files from `template/`, filled in with a name, that pass C0 as they are."""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from sglcore.device.errors import ConfigError
from sglcore.device.package import API

SUFFIX = ".in"
NAME = "NAME"
NEXT_STEPS = """
The package passes C0 as it is, and says that there is no hardware. Next:
  1. pip install -e {folder} && sglcore devices {name}
  2. sglcore conform {name} --level C0
  3. {folder}/sglcore_{name}/probe.py: what shows that the hardware and its driver are here
  4. {folder}/sglcore_{name}/facts.py: the device string of its tensors; then sglcore conform {name} --level C1
  5. graphs.py and kernels.py, when C2 passes without them; docs/add-a-device.md goes on from here
"""


def write_package(name: str, folder: Path) -> tuple[Path, ...]:
    """Write the files and give their paths. Raises ConfigError for a name that can not be a module's, or a folder that
    has files already."""
    if not re.fullmatch(r"[a-z][a-z0-9]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} can not name a device", wanted="a lower-case word, such as acme")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", remedy="give another --path")
    made: list[Path] = []
    for source, target in _sources(files("sglcore") / "conformance" / "template", folder, name):
        text = source.read_text(encoding="utf-8").replace("{{name}}", name).replace("{{api}}", str(API))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        made.append(target)
    order = folder / f"sglcore_{name}" / "bring_up.txt"
    order.write_text(_order_text(), encoding="utf-8")
    return tuple(sorted((*made, order)))


def _order_text() -> str:
    """The order that the template's bring-up has in this release."""
    from sglcore.runtime.bring_up import STANDARD
    from sglcore.runtime.memory.accelerator import device_memory

    return STANDARD.insert(device_memory, before="sizes").text()


def _sources(source: Traversable, target: Path, name: str) -> list[tuple[Traversable, Path]]:
    found: list[tuple[Traversable, Path]] = []
    for entry in source.iterdir():
        place = target / entry.name.replace(NAME, name).removesuffix(SUFFIX)
        if entry.is_dir():
            found += _sources(entry, place, name)
        elif entry.name.endswith(SUFFIX):
            found.append((entry, place))
    return found
