"""Makes the virtual environment that `make` installs into, from the interpreter that runs this
file: `python3 tools/make_environment.py .venv`.

An environment that works stays. One that is incomplete, or has lost its interpreter, is made again.
If the interpreter has a vendor's torch, the environment sees the interpreter's packages. Standard
library only.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.installer.choice import has_any
from tools.installer.needs import needs_of, takes
from tools.installer.pythons import AGAIN, ROOT, served

BARE = "import json, sys; print(json.dumps('%d.%d' % sys.version_info[:2]))"
CHECK = f"import importlib.metadata as m; assert m.distribution('pip').read_text('INSTALLER'); {BARE}"
"""Programs that print an interpreter's version; the second fails if pip is missing or
incomplete."""
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
PLAIN = re.compile(r"[\d.]+(\+cpu)?")
"""Versions of torch that are not a vendor's: from the public index, or the CPU build."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the environment. Returns 0 if it is ready, 1 with one line about an error, 130 when
    interrupted."""
    parser = argparse.ArgumentParser(description="Make the environment that make installs into.")
    parser.add_argument("--works", action="store_true", help="print whether this interpreter's environment works")
    parser.add_argument("--same", action="store_true", help="replace an environment of another Python version")
    parser.add_argument("what", nargs="?", default="", help="the folder; with --works, the requested Python")
    asked = parser.parse_args(arguments)
    if asked.works:
        print("yes" if works(asked.what) else "no")
        return 0
    try:
        return make(Path(asked.what or ".venv"), asked.same)
    except KeyboardInterrupt:
        print(f"interrupted: {asked.what} is incomplete; {AGAIN} makes it again", file=sys.stderr)
        return 130


def works(asked: str) -> bool:
    """Return whether this interpreter's environment is complete and has the version of the
    requested Python, if one is given."""
    return sys.prefix != sys.base_prefix and has_whole_pip() and (not asked or _version(asked, BARE) in ("", OWN))


def has_whole_pip() -> bool:
    """Return whether pip is installed completely: installers write the file INSTALLER last."""
    try:
        return bool(distribution("pip").read_text("INSTALLER"))
    except PackageNotFoundError:
        return False


def make(folder: Path, same: bool = False) -> int:
    """Make the environment unless it works; returns the exit status. `same`: make an environment of
    another Python version again. Waits."""
    if has_pip(folder, same) or mend(folder, same):
        return 0
    if folder.exists():
        print(f"{folder} is incomplete, or of another Python: it is made again", flush=True)
        shutil.rmtree(folder)
    torch = vendors_torch()
    if torch:
        print(
            f"torch {torch} of {sys.executable} is a vendor's: it is kept, and {folder} sees its packages", flush=True
        )
    command = (sys.executable, "-m", "venv", *(["--system-site-packages"] if torch else []), str(folder))
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode == 0:
        return 0
    shutil.rmtree(folder, ignore_errors=True)
    print(explain(ran.stdout + ran.stderr), file=sys.stderr)
    return 1


def explain(said: str) -> str:
    """Return in one line why no environment could be made."""
    if "No space left" in said or "Errno 28" in said:
        return f"no space is left on the disk of this folder: free some; then {AGAIN} again"
    if "ensurepip" in said:
        package = f"apt-get install python{OWN}-venv, or your system's equivalent package"
        return f"{sys.executable} cannot make an environment with pip: {package}; then {AGAIN} again"
    last = said.strip().splitlines()[-1:] or ["it printed nothing"]
    return f"{sys.executable} cannot make an environment: {last[0]}; fix that, then {AGAIN} again"


def has_pip(folder: Path, same: bool = False) -> bool:
    """Return whether the environment has pip and a supported interpreter; `same`: one of this
    interpreter's version."""
    is_one = (folder / "pyvenv.cfg").is_file()  # without it, its python is the interpreter below it
    return is_one and _version(str(folder / "bin" / "python"), CHECK) in ([OWN] if same else served())


def mend(folder: Path, same: bool = False) -> bool:
    """Install pip into an environment that lacks only pip, as other tools make them; returns
    whether it then works."""
    python = folder / "bin" / "python"
    if not (folder / "pyvenv.cfg").is_file() or _version(str(python), BARE) not in ([OWN] if same else served()):
        return False
    return _run(str(python), "-m", "ensurepip") is not None and has_pip(folder, same)


def vendors_torch() -> str:
    """Return the version of a vendor's torch in this interpreter that all packages support; "" if
    there is none."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return ""
    folders = [path.parent for path in sorted(ROOT.glob("devices/*/pyproject.toml"))]
    vendors = [name for folder in folders if (needs := needs_of(folder)) is not None for name in needs.vendor]
    if PLAIN.fullmatch(found) and not has_any(vendors):
        return ""
    if all(takes(folder, found) for folder in folders):
        return found
    print(f"torch {found} of {sys.executable} is not one that sglcore works with: it is left alone", flush=True)
    return ""


def _version(python: str, program: str) -> str:
    said = _run(python, "-c", program)
    return json.loads(said) if said else ""


def _run(*words: str) -> str | None:
    try:
        ran = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return ran.stdout if ran.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
