"""The system files of a simulated machine: device nodes, driver libraries, the PCI bus and the
torch build, as plain files in a folder."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from sglcore_sim.kinds import Kind

FIELDS = ("i", "node", "render", "bus", "torch")
"""Fields in `Kind.files`: the device's index, its topology node, its render node, its bus, torch's
release."""


def lay_out(kind: Kind, devices: int) -> Path:
    """Write the system files of `devices` devices of this kind (`Kind.files`) to a new temporary
    folder, which is removed when the process ends. Return the folder, which stands for the
    machine's root."""
    root = Path(tempfile.mkdtemp(prefix=f"sglcore-sim-{kind.name}-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for path, text in kind.files.items():
        for fields in _fields(devices):
            file = root / path.format_map(fields)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.format_map(fields))
    return root


def _fields(devices: int) -> Iterable[dict[str, Any]]:
    release = torch.__version__.partition("+")[0]
    for i in range(devices):
        yield {"i": i, "node": i + 1, "render": 128 + i, "bus": f"{i + 1:02x}", "torch": release}
