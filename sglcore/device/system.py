"""The machine as a probe sees it: device nodes, driver libraries and python modules below a root.
Standard library only.

The root is `/` on a real machine. Another root is a folder with the same structure, for a container
that mounts its host's files, for fixtures, and for simulated machines. Only plain files are opened,
and nothing is imported.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from sglcore.device.pci import PCI_DEVICES, PciClaim, PciDevice, claimed_devices, pci_devices

VARIABLE = "SGLCORE_SYSTEM_ROOT"
LIBRARY_FOLDERS = ("usr/lib64", "usr/lib/*-linux-gnu*", "usr/lib", "usr/local/lib", "lib64", "lib/*-linux-gnu*", "lib")
_ASSIGNED = re.compile(r"^(\w+)\s*(?::[^=]+)?=\s*(.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class System:
    """A machine as a probe sees it: what is below `root`, with the environment `environ` of the
    process.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def is_this_machine(self) -> bool:
        """Whether the root is that of the machine itself."""
        return self.root == Path("/")

    def path(self, path: str) -> Path:
        """Return the place below `root` of an absolute path of the system. It need not exist."""
        return self.root / path.lstrip("/")

    def exists(self, path: str) -> bool:
        """Return whether this absolute path exists below the root; False also without permission to
        look."""
        try:
            return self.path(path).exists()
        except OSError:
            return False

    def glob(self, pattern: str) -> tuple[str, ...]:
        """Return the absolute paths (as seen from the root) that match an absolute pattern, sorted;
        empty if nothing matches or a folder cannot be read.
        """
        try:
            found = sorted(self.root.glob(pattern.lstrip("/")))
        except OSError:
            return ()
        return tuple(f"/{path.relative_to(self.root)}" for path in found)

    def numbered(self, pattern: str) -> tuple[str, ...]:
        """Return the absolute paths that match a pattern, sorted by the number at their end. All of
        them must be equal up to that number, because paths are ordered by length and then by text.
        """
        return tuple(sorted(self.glob(pattern), key=lambda path: (len(path), path)))

    def read(self, path: str) -> str | None:
        """Return the text of a file; None if there is none, or it cannot be read."""
        try:
            return self.path(path).read_text(errors="replace")
        except OSError:
            return None

    def library(self, name: str, *folders: str) -> str | None:
        """Return the absolute path, as seen from the root, of a shared library such as "libm.so.6",
        or None; a name with wildcards finds the first match. Nothing is loaded.

        Searches `folders` (absolute), LD_LIBRARY_PATH, the loader's configured folders, then the
        usual ones.
        """
        given = (*folders, *self._variable_folders(), *self._configured_folders())
        for pattern in (*(folder.lstrip("/") for folder in given if folder.startswith("/")), *LIBRARY_FOLDERS):
            for found in self.glob(f"{pattern}/{name}"):
                return found
        return None

    def module(self, name: str) -> bool:
        """Return whether a top-level module can be found: in `site-packages` of the root, or by
        this interpreter.
        """
        return self._planted(name) is not None or _findable(name)

    def torch_build(self) -> Mapping[str, str]:
        """Return version and build targets of the installed torch: each name that its `version.py`
        assigns a text literal, without the underscores at its ends (such as "version"), with that
        text. Read without an import. Empty if torch is not installed.
        """
        planted = self._planted("torch")
        text = _read(planted / "version.py") if planted else _installed_version_file("torch")
        return MappingProxyType(dict(_assignments(text)))

    def pci(self, claims: Collection[PciClaim] | None = None) -> tuple[PciDevice, ...]:
        """Return the PCI devices, sorted by address: those that `claims` cover, or all (None)."""
        found = pci_devices(self.path(PCI_DEVICES))
        return found if claims is None else claimed_devices(claims, found)

    def _planted(self, name: str) -> Path | None:
        folder = self.root / "site-packages" / name
        return folder if not self.is_this_machine and folder.is_dir() else None

    def _variable_folders(self) -> tuple[str, ...]:
        return tuple(self.environ.get("LD_LIBRARY_PATH", "").split(":"))

    def _configured_folders(self) -> tuple[str, ...]:
        texts = (self.read(path) or "" for path in ("/etc/ld.so.conf", *self.glob("/etc/ld.so.conf.d/*.conf")))
        return tuple(line.strip() for text in texts for line in text.splitlines())


def host_system(environ: Mapping[str, str] = os.environ, root: str | None = None) -> System:
    """Return the system below `root`, or else below the folder in `SGLCORE_SYSTEM_ROOT`, or else
    this machine.
    """
    return System(Path(root or environ.get(VARIABLE) or "/"), MappingProxyType(dict(environ)))


def _findable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:
        return True  # It is loaded, by something that gave it no specification.


def _installed_version_file(name: str) -> str:
    spec = find_spec(name)
    return _read(Path(spec.origin).with_name("version.py")) if spec is not None and spec.origin else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _assignments(text: str) -> list[tuple[str, str]]:
    """Return the pairs (name, text) for each text literal that a version file assigns. Underscores
    at both ends of a name are removed; other values are left out."""
    found: list[tuple[str, str]] = []
    for name, value in _ASSIGNED.findall(text):
        try:
            literal = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            continue
        if isinstance(literal, str):
            found.append((name.strip("_"), literal))
    return found
