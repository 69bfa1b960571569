"""The supported interpreters. Old interpreters read this file, so it uses nothing newer than Python
3.8."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
AGAIN = "make demo"
"""The command that messages tell the user to run again."""


def served(root=ROOT):
    """Return the versions in `[tool.sglcore] pythons` of the checkout, such as "3.11", in order."""
    found = re.search(r"^pythons = \[(.*)\]", (root / "pyproject.toml").read_text(), re.M)
    return re.findall(r'"([\d.]+)"', found.group(1)) if found else []


def refusal(version, executable, root=ROOT, which=shutil.which):
    """Return in one line why an interpreter of this version can not be used, and what to do; "" if
    it can."""
    known = served(root)
    own = "{}.{}".format(*version)
    if not known or own in known:
        return ""
    is_old = tuple(version[:2]) < tuple(map(int, known[0].split(".")))
    why = "is too old" if is_old else "is newer than the wheels of torch and others"
    others = [name for name in ("python" + each for each in reversed(known)) if which(name)]
    use = "use" if others else "install one of them and use"
    return (
        f"{executable} is Python {own}, which {why}: sglcore needs {known[0]} to {known[-1]}; "
        f"{use} it by {AGAIN} PYTHON={others[0] if others else 'python' + known[-1]}"
    )
