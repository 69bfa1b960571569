"""A pytest plugin that makes this process's machine one with an acme accelerator, simulated on torch's private backend."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import sglcore_sim


def lay_out(root: Path) -> Path:
    """The files by which acme's driver shows."""
    for name in ("dev/acme0", "usr/lib/libacme.so.1"):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return root


def acme_kind() -> object:
    """A kind that no package and no simulator knows."""
    from sglcore_sim.simulator import PlainKind

    return PlainKind("acme", "acme")


simulator = sglcore_sim.install(acme_kind())
os.environ["SGLCORE_SYSTEM_ROOT"] = str(lay_out(Path(tempfile.mkdtemp(prefix="acme-machine-"))))
