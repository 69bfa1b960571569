"""Rules about folders and names of files, in the form of the rules in `rules.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.rules import sources

MOST_FILES = 25
"""A folder with more modules has no order that a reader finds by its names."""
REPEATED = frozenset(
    {
        *("__init__", "__main__"),
        *("answers", "body", "events", "models", "request", "route"),
        "bring_up",
    }
)
"""Names of modules that may occur more than once in `sglcore`: the parts of each HTTP API, and the
start-up order, which the contract for device packages names."""

OLDER_NAMES = "sglcore/device/api3/"
"""The modules that moved, by their older names."""


def crowded_folders(root: Path) -> list[str]:
    """Find folders of the core, of device packages and of `tests` with more than MOST_FILES
    modules."""
    counts: dict[Path, int] = defaultdict(int)
    for name in (*(source.name for source in sources(root)), *_tests(root)):
        counts[Path(name).parent] += 1
    return [
        f"{folder}: {count} modules, at most {MOST_FILES}" for folder, count in counts.items() if count > MOST_FILES
    ]


def _tests(root: Path) -> Iterator[str]:
    return (path.relative_to(root).as_posix() for path in (root / "tests").rglob("*.py"))


def repeated_names(root: Path) -> list[str]:
    """Find modules of the core with the same file name, which a traceback or an editor's tab does
    not tell apart."""
    named: dict[str, list[str]] = defaultdict(list)
    for source in sources(root):
        if source.name.startswith("sglcore/") and not source.name.startswith(OLDER_NAMES):
            named[Path(source.name).stem].append(source.name)
    return [
        f"{files[0]}: the same name as {', '.join(files[1:])}"
        for name, files in named.items()
        if len(files) > 1 and name not in REPEATED
    ]
