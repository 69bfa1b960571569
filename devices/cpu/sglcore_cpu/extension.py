"""Intel's extension for PyTorch: whether it is installed and fits the torch that runs, read from
their files. Importing one that does not fit fails, so nothing here imports it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from sglcore.device.ledger import Row

DISTRIBUTION = "intel-extension-for-pytorch"
ENDED = "it ended in March 2026, and 2.8.0 is its last on PyPI"


@dataclass(frozen=True, slots=True)
class Extension:
    """An installed extension and the version of the installed `torch`; empty if there is none."""

    version: str
    torch: str

    @property
    def gap(self) -> str:
        """The reason why it cannot serve; empty if it can. It needs a torch
        of the same major and minor version."""
        if release(self.version) == release(self.torch):
            return ""
        here = f"torch here is {self.torch}" if self.torch else "torch is not installed"
        return f"is built for torch {release(self.version)}, and {here}"

    def __str__(self) -> str:
        """What it is, and whether it can serve."""
        return f"{self.version}; " + (f"not used: it {self.gap}; {ENDED}" if self.gap else "--kernels ipex takes it")


def find_extension(torch: str) -> Extension | None:
    """Return the installed extension with this version of torch; None if none is installed."""
    try:
        return Extension(version(DISTRIBUTION), torch)
    except PackageNotFoundError:
        return None


def release(version: str) -> str:
    """The first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def extension_row(found: Extension, asked: bool, traced: bool) -> Row:
    """What the ledger says of it, `asked` for or not; `traced`: a compiler serves, which takes
    kernels of its own."""
    name = f"{DISTRIBUTION} {found.version}"
    if found.gap:
        return Row("extension", "auto", "not used", f"{name} {found.gap}; {ENDED}", f"pip uninstall {DISTRIBUTION}")
    if not asked:
        return Row("extension", "auto", "not used", f"{name} fits torch {found.torch}", "--kernels ipex")
    if traced:
        return Row("extension", "ipex", "not used", f"{name} fits, but a compiler traces torch's own", "--graph off")
    return Row("extension", "ipex", name, f"it fits torch {found.torch}", "--kernels auto")
