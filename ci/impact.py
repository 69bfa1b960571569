"""The impact record: which tests run which function. A full run writes it; later runs select tests
with it.

For each function the record lists up to KEPT cheap and KEPT slow tests, the most specific (which
run few functions and cost little) first. Watching a test doubles its cost, so each full run watches
one of PARTS parts of the tests and keeps the older entries of the others.
"""

from __future__ import annotations

import json
import lzma
import sqlite3
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ci.functions import bodies_of
from ci.lanes import ROOT

RAW = ROOT / "build" / "impact"
"""Where a run leaves coverage.py's files, in one folder per lane."""
STORED = Path("ci") / "data" / "impact.json.xz"
SOURCES = ("sglcore", "devices", "simulator")
"""The folders whose functions are recorded."""
PARTS = 8
"""Number of parts of the tests; a full run watches one of them."""
KEPT = 16
"""The most cheap tests, and the most slow tests, that the record lists for a function."""

Function = tuple[str, str]
"""A file of the checkout, and the dotted name of a function in it."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One test on one lane."""

    lane: str
    """The lane's name."""
    test: str
    """pytest's name of the test."""
    seconds: float
    """Its cost, including its share of the file's fixtures."""
    is_slow: bool
    """Whether it is one of `ci/slow.txt`."""
    functions: int = 0
    """How many functions it ran when it was watched; 0: never watched."""


@dataclass(frozen=True, slots=True)
class Impact:
    """The record."""

    commit: str
    """The commit at which the tests were run."""
    tests: tuple[Timed, ...]
    """The tests; `functions` refers to them by index."""
    functions: Mapping[str, Mapping[str, tuple[int, ...]]]
    """By file and function: indices of tests that run it, the most specific first."""
    part: int = 0
    """Which part of the tests was watched last."""

    def renamed(self, files: Mapping[str, str]) -> Impact:
        """Return the record with the new names of renamed source and test files."""
        tests = []
        for each in self.tests:
            file, separator, name = each.test.partition("::")
            tests.append(replace(each, test=f"{files.get(file, file)}{separator}{name}"))
        functions = {files.get(file, file): known for file, known in self.functions.items()}
        return replace(self, tests=tuple(tests), functions=functions)

    def of(self, function: Function) -> list[Timed]:
        """Return tests that run a function. If the record does not know the function (new code, or
        lines outside of functions), return up to 2 * KEPT tests of the file's other functions."""
        file, name = function
        known = self.functions.get(file, {})
        if name in known:
            return [self.tests[place] for place in known[name]]
        return [self.tests[place] for place in _in_turn(list(known.values()))][: 2 * KEPT]


def choose(
    impact: Impact,
    functions: Sequence[Function],
    seconds: float,
    accepts: Callable[[Timed], bool],
    first: Iterable[Timed] = (),
) -> list[Timed]:
    """Choose accepted tests that together cost at most `seconds`: `first`, then the most specific
    test of each function, then the second of each, and so on. Tests that do not fit are skipped."""
    chosen: dict[tuple[str, str], Timed] = {}
    left = seconds
    queue = [[each for each in impact.of(function) if accepts(each)] for function in functions]
    for each in (*(each for each in first if accepts(each)), *_in_turn(queue)):
        key = (each.lane, each.test)
        if key not in chosen and each.seconds <= left:
            chosen[key] = each
            left -= each.seconds
    return list(chosen.values())


def next_part(record: Impact | None) -> int:
    """Return the part of the tests to watch after the one that the record watched last."""
    return 0 if record is None else (record.part + 1) % PARTS


def is_due(test: str, part: int) -> bool:
    """Return whether a test belongs to a part."""
    return zlib.crc32(test.encode()) % PARTS == part


def gather(
    folder: Path, timed: Sequence[Timed], commit: str, before: Impact | None = None, root: Path = ROOT
) -> Impact:
    """Make the record from the files that `watch.Watcher` left below `folder`, one folder per lane.
    Tests that ran but were not watched keep their entries of the record `before`."""
    places = {(each.lane, each.test): place for place, each in enumerate(timed)}
    files: dict[tuple[str, str], list[int]] = defaultdict(list)
    for place, each in enumerate(timed):
        files[each.lane, each.test.partition("::")[0]].append(place)
    own: dict[Function, set[int]] = defaultdict(set)
    theirs: dict[Function, set[int]] = defaultdict(set)
    for lane in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        for context, function in _runs(folder / lane, root):
            if (place := places.get((lane, context))) is not None:
                own[function].add(place)
            else:
                theirs[function].update(files.get((lane, context), ()))
    counts = Counter(place for tests in own.values() for place in tests)
    kept = {} if before is None else _kept(before, places, counts.keys())
    for place, (count, functions) in kept.items():
        counts[place] = count
        for function in functions:
            if function[1] in bodies_of(root / function[0]):
                own[function].add(place)
    return replace(_reduced(commit, timed, own, theirs, counts), part=next_part(before))


def _kept(
    before: Impact, places: Mapping[tuple[str, str], int], watched: Collection[int]
) -> dict[int, tuple[int, list[Function]]]:
    """By index of each test that was not watched: how many functions it runs, and the functions
    under which the older record lists it."""
    found: dict[int, tuple[int, list[Function]]] = {}
    for file, functions in before.functions.items():
        for name, tests in functions.items():
            for each in (before.tests[number] for number in tests):
                place = places.get((each.lane, each.test))
                if place is not None and place not in watched:
                    found.setdefault(place, (each.functions, []))[1].append((file, name))
    return found


def save(impact: Impact, root: Path = ROOT) -> None:
    """Write the record."""
    values = {
        "commit": impact.commit,
        "tests": [[each.lane, each.test, each.seconds, each.is_slow, each.functions] for each in impact.tests],
        "functions": impact.functions,
        "part": impact.part,
    }
    (root / STORED).parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    (root / STORED).write_bytes(lzma.compress(text.encode(), preset=9))


def load(root: Path = ROOT) -> Impact | None:
    """Read the record; None if no full run has written one."""
    file = root / STORED
    if not file.is_file():
        return None
    values: dict[str, Any] = json.loads(lzma.decompress(file.read_bytes()))
    functions = {
        name: {function: tuple(tests) for function, tests in known.items()}
        for name, known in values["functions"].items()
    }
    return Impact(values["commit"], tuple(Timed(*row) for row in values["tests"]), functions, values.get("part", 0))


def _runs(folder: Path, root: Path) -> Iterable[tuple[str, Function]]:
    """Yield each context that coverage.py recorded with each function in which it ran a line. The
    schema of coverage.py's files is documented: a row of `line_bits` holds the lines of one file
    in one context, bit N of the number for line N."""
    for file in sorted(path for path in folder.iterdir() if path.suffix != ".ini"):
        with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as base:
            rows = base.execute(
                "select path, context, numbits from line_bits join file on file.id = file_id"
                " join context on context.id = context_id"
            )
            for path, context, bits in rows:
                lines = int.from_bytes(bits, "little")
                for function in _functions_of(path, lines, root):
                    yield context, function


@cache
def _functions_of(path: str, lines: int, root: Path) -> tuple[Function, ...]:
    """Return the functions of a file that contain at least one of the run lines."""
    source = Path(path)
    if not source.is_relative_to(root):
        return ()
    name = source.relative_to(root).as_posix()
    return tuple((name, function) for function, body in bodies_of(source).items() if lines & body)


def _reduced(
    commit: str,
    timed: Sequence[Timed],
    own: Mapping[Function, set[int]],
    theirs: Mapping[Function, set[int]],
    counts: Mapping[int, int],
) -> Impact:
    """Make the record with the most specific tests of each function, at most KEPT cheap and KEPT
    slow ones. Tests that ran it in their own process (`own`) come before tests of a file that ran
    it in a child process (`theirs`). `counts`: by index of a test, how many functions it runs."""
    order = _order(timed, counts)
    kept: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for function in sorted(own.keys() | theirs.keys()):
        known = own.get(function, set())
        ranked = [*_ranked(known, order), *_ranked(theirs.get(function, set()) - known, order)]
        left = {True: KEPT, False: KEPT}
        chosen = kept[function[0]].setdefault(function[1], [])
        for place in ranked:
            if left[timed[place].is_slow]:
                left[timed[place].is_slow] -= 1
                chosen.append(place)
    named = sorted({place for known in kept.values() for tests in known.values() for place in tests})
    new = {place: number for number, place in enumerate(named)}
    functions = {
        file: {name: tuple(new[place] for place in tests) for name, tests in known.items()}
        for file, known in kept.items()
    }
    return Impact(commit, tuple(replace(timed[place], functions=counts.get(place, 0)) for place in named), functions)


def _order(timed: Sequence[Timed], counts: Mapping[int, int]) -> list[tuple[float, int]]:
    """By index of a test: its cost times the number of functions it runs (lower is more specific),
    and the number of its test function, which its parametrised cases share."""
    numbers: dict[str, int] = {}
    return [
        (
            (0.1 + each.seconds) * counts.get(place, 1),
            numbers.setdefault(each.test.partition("[")[0], len(numbers)),
        )
        for place, each in enumerate(timed)
    ]


def _ranked(tests: Iterable[int], order: Sequence[tuple[float, int]]) -> list[int]:
    """Sort by specificity, with the best case of each test function before any second case."""
    cases: dict[int, int] = defaultdict(int)
    ranked = []
    for place in sorted(tests, key=order.__getitem__):
        function = order[place][1]
        ranked.append((cases[function], len(ranked), place))
        cases[function] += 1
    return [place for *_, place in sorted(ranked)]


def _in_turn(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """Interleave: the first of each list, then the second of each, and so on."""
    longest = max(map(len, lists), default=0)
    return [each[place] for place in range(longest) for each in lists if place < len(each)]
