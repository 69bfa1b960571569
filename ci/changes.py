"""Finds changed functions and changed test files of the checkout with git."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ci.functions import MODULE, bodies_of, functions_at
from ci.impact import SOURCES, Function
from ci.lanes import ROOT

_RENAMES = ("--find-renames=40%", "-l5000")
"""Compare each new file with up to 5000 removed ones: a reorganisation moves hundreds at once."""
_HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes; uncommitted ones come first."""

    functions: tuple[Function, ...]
    """Functions with a changed line."""
    tests: tuple[str, ...]
    """Changed test files."""


def commits(root: Path = ROOT) -> int:
    """Return the number of commits up to HEAD; 0 without git."""
    return int(git("rev-list", "--count", "HEAD", root=root) or 0)


def head(root: Path = ROOT) -> str:
    """Return the commit of HEAD; empty without git."""
    return git("rev-parse", "HEAD", root=root).strip()


def since(commit: str, root: Path = ROOT) -> Changes:
    """Return the changes since a commit, or since HEAD~1 if this checkout does not know the
    commit."""
    bases = ("HEAD", commit if git("cat-file", "-t", commit, root=root) else "HEAD~1")
    changed: dict[str, list[int]] = {}
    order: dict[Function | str, None] = {}
    for base in bases:
        changed = changed_lines(git("diff", "--unified=0", "--no-color", *_RENAMES, base, root=root))
        untracked = git("ls-files", "--others", "--exclude-standard", root=root).splitlines()
        for name in (*changed, *untracked):
            for each in _named(root, name, changed.get(name)):
                order[each] = None
    functions = tuple(each for each in order if isinstance(each, tuple))
    return Changes(functions, tuple(each for each in order if isinstance(each, str)))


def renames(commit: str, root: Path = ROOT) -> dict[str, str]:
    """Return the new name of each file that was renamed since a commit; empty if this checkout does
    not know the commit."""
    words = git("diff", "--name-status", "--diff-filter=R", "-z", *_RENAMES, commit, root=root).split("\0")
    return dict(zip(words[1::3], words[2::3], strict=False))


def changed_lines(diff: str) -> dict[str, list[int]]:
    """Return the lines of each file, in its new version, that a diff changes; for removed lines,
    the lines before and after."""
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
    """Return the output of a git command; empty if it fails or git is not installed. Waits."""
    try:
        ran = subprocess.run(("git", *words), cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return ran.stdout if ran.returncode == 0 else ""


def _named(root: Path, name: str, lines: list[int] | None) -> list[Function | str]:
    """Return a file's changed functions (all functions if `lines` is None), or the file itself if
    it is a test file."""
    path = root / name
    if path.suffix != ".py" or not path.is_file():
        return []
    if path.name.startswith("test_"):
        return [name]
    if Path(name).parts[0] not in SOURCES or "tests" in Path(name).parts:
        return []
    functions = functions_at(path, lines) if lines is not None else [*bodies_of(path), MODULE]
    return [(name, function) for function in functions]
