"""What has changed in the checkout, as git tells it: functions, and files of tests."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ci.functions import MODULE, bodies_of, functions_at
from ci.impact import SOURCES, Function
from ci.lanes import ROOT

_HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed, the uncommitted first."""

    functions: tuple[Function, ...]
    """Functions with a changed line."""
    tests: tuple[str, ...]
    """Files of tests."""


def commits(root: Path = ROOT) -> int:
    """How many commits lead to the one that is checked out; 0 where there is no git."""
    return int(git("rev-list", "--count", "HEAD", root=root) or 0)


def head(root: Path = ROOT) -> str:
    """The commit that is checked out; empty where there is no git."""
    return git("rev-parse", "HEAD", root=root).strip()


def since(commit: str, root: Path = ROOT) -> Changes:
    """What has changed since a commit, or, where it is not known here, since the one before the
    last."""
    bases = ("HEAD", commit if git("cat-file", "-t", commit, root=root) else "HEAD~1")
    changed: dict[str, list[int]] = {}
    order: dict[Function | str, None] = {}
    for base in bases:
        changed = changed_lines(git("diff", "--unified=0", "--no-color", base, root=root))
        untracked = git("ls-files", "--others", "--exclude-standard", root=root).splitlines()
        for name in (*changed, *untracked):
            for each in _named(root, name, changed.get(name)):
                order[each] = None
    functions = tuple(each for each in order if isinstance(each, tuple))
    return Changes(functions, tuple(each for each in order if isinstance(each, str)))


def changed_lines(diff: str) -> dict[str, list[int]]:
    """The lines of each file as it is now that a diff touches; where lines were taken out, those
    around the place."""
    found: dict[str, list[int]] = {}
    name = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            name = line[6:] if line.startswith("+++ b/") else ""
        elif name and (hunk := _HUNK.match(line)):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            touched = range(first, first + count) if count else range(max(first, 1), first + 2)
            found.setdefault(name, []).extend(touched)
    return found


def git(*words: str, root: Path = ROOT) -> str:
    """What git prints; empty where it fails or is not there."""
    try:
        ran = subprocess.run(("git", *words), cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return ran.stdout if ran.returncode == 0 else ""


def _named(root: Path, name: str, lines: list[int] | None) -> list[Function | str]:
    """A file's changed functions, all without `lines`; the file itself if it holds tests."""
    path = root / name
    if path.suffix != ".py" or not path.is_file():
        return []
    if path.name.startswith("test_"):
        return [name]
    if Path(name).parts[0] not in SOURCES or "tests" in Path(name).parts:
        return []
    functions = functions_at(path, lines) if lines is not None else [*bodies_of(path), MODULE]
    return [(name, function) for function in functions]
