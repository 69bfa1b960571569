"""Detection of Intel's extension for PyTorch: whether it is installed and fits the installed torch.
The versions are read from package metadata; nothing is imported, because importing an extension
that does not fit fails."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from sglcore.core.ledger import Row

DISTRIBUTION = "intel-extension-for-pytorch"
ENDED = "it ended in March 2026, and 2.8.0 is its last release on PyPI"


@dataclass(frozen=True, slots=True)
class Extension:
    """An installed extension, as `find_extension` returns it. `version`: its own; `torch`: that of
    the installed torch (empty: none)."""

    version: str
    torch: str

    @property
    def gap(self) -> str:
        """Why it can not serve, as the end of a sentence with the extension as subject; empty if it
        can. It needs a torch of the same major and minor version."""
        if release(self.version) == release(self.torch):
            return ""
        here = f"torch here is {self.torch}" if self.torch else "torch is not installed"
        return f"is built for torch {release(self.version)}, but {here}"

    def __str__(self) -> str:
        """Return a phrase with its version and whether it can serve."""
        return f"{self.version}; " + (
            f"not used: it {self.gap}; {ENDED}" if self.gap else "select it with --kernels ipex"
        )


def find_extension(torch: str) -> Extension | None:
    """Return the installed extension, with `torch`, the version of the installed torch; None if no
    extension is installed. It may not fit: see `gap`."""
    try:
        return Extension(version(DISTRIBUTION), torch)
    except PackageNotFoundError:
        return None


def release(version: str) -> str:
    """Return the first two numbers of a version as text: "2.8" of "2.8.0+cpu"."""
    return ".".join(version.split(".")[:2])


def extension_row(found: Extension, asked: bool, traced: bool) -> Row:
    """Return the ledger row that says whether the installed extension is used, and why. It is used
    if it fits torch, `asked` (`--kernels ipex` was given), and not `traced` (`--graph compiled`,
    which uses torch's kernels only). Decides nothing."""
    name = f"{DISTRIBUTION} {found.version}"
    if found.gap:
        return Row("extension", "auto", "not used", f"{name} {found.gap}; {ENDED}", f"pip uninstall {DISTRIBUTION}")
    if not asked:
        return Row("extension", "auto", "not used", f"{name} fits torch {found.torch}", "--kernels ipex")
    if traced:
        return Row(
            "extension", "ipex", "not used", f"{name} fits, but a compiler traces only torch's kernels", "--graph off"
        )
    return Row("extension", "ipex", name, f"it fits torch {found.torch}", "--kernels auto")
