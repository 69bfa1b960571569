"""A folder of installed packages, as pip would leave them, and processes that run the kit on
them."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests import warm


@dataclass(frozen=True, slots=True)
class Site:
    """`path` is on the path of the processes, and so are the folders that were added."""

    path: Path
    folders: tuple[Path, ...] = ()

    def with_package(self, name: str, folder: Path) -> Site:
        """Install the device package that lies in a folder, with all entry points that it
        declares."""
        info = self.path / f"sglcore_{name}-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglcore-{name}\nVersion: 0.1.0\n")
        declared = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]
        groups = (
            f"[{group}]\n" + "".join(f"{point} = {value}\n" for point, value in points.items())
            for group, points in declared.items()
        )
        (info / "entry_points.txt").write_text("".join(groups))
        return Site(self.path, (*self.folders, folder))

    def run(
        self, *words: str, environ: Mapping[str, str] | None = None, timeout: float = 3600
    ) -> subprocess.CompletedProcess[str]:
        """`python WORDS` in this folder."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SGLCORE_")}
        around = filter(None, (os.environ.get("PYTHONPATH"),))
        path = os.pathsep.join((*map(str, (self.path, *self.folders)), *around))
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        return warm.run(words, self.path, {**clean, **own, **(environ or {})}, timeout=timeout)

    def sglcore(self, *words: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """`sglcore WORDS` in this folder."""
        return self.run("-m", "sglcore.cli", *words, environ=environ)
