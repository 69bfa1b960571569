"""Which tests run which function: a record that a run of everything writes, and what later runs
choose by it.

The record names for each function some tests of each kind, the most specific first: those that run
the fewest functions. To watch a test costs as much again as to run it, so a run watches one part of
them, the next run the next part; what the record says of the rest stays.
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
"""Where a run leaves what coverage.py wrote, a folder for each lane."""
STORED = Path("ci") / "data" / "impact.json.xz"
SOURCES = ("sglcore", "devices", "simulator")
"""The folders whose functions are recorded."""
PARTS = 8
"""A run of everything watches one of so many parts of the tests."""
KEPT = 16
"""How many cheap tests the record names for a function, and how many slow ones."""

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
    """What it costs, its part of the file's fixtures counted."""
    is_slow: bool
    """Whether it is one of `ci/slow.txt`."""
    functions: int = 0
    """How many functions it ran when it was watched; 0 before."""


@dataclass(frozen=True, slots=True)
class Impact:
    """The record."""

    commit: str
    """The commit whose tests were run."""
    tests: tuple[Timed, ...]
    """The tests that `functions` names by their places here."""
    functions: Mapping[str, Mapping[str, tuple[int, ...]]]
    """By file and function: tests that run it, the most specific first."""
    part: int = 0
    """Which part of the tests was watched last."""

    def of(self, function: Function) -> list[Timed]:
        """Tests that run a function; for one that is not known, and for lines outside of functions,
        some of the file's."""
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
    """As many accepted tests as fit into so many seconds: `first`, then for each function the most
    specific, then the next."""
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
    """Which part of the tests to watch after those of a record."""
    return 0 if record is None else (record.part + 1) % PARTS


def is_due(test: str, part: int) -> bool:
    """Whether a test is one of a part."""
    return zlib.crc32(test.encode()) % PARTS == part


def gather(
    folder: Path, timed: Sequence[Timed], commit: str, before: Impact | None = None, root: Path = ROOT
) -> Impact:
    """Make the record of what `watch.Watcher` left below `folder`, a folder for each lane; reads
    all of it. What the record `before` says of tests that ran and were not watched stays."""
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
    """By the place of a test that was not watched: how many functions it runs, and those that an
    older record has it for."""
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
    """The record; None where no run of everything has written one."""
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
    """Every context that coverage.py recorded, with each function of which it ran a line. The
    schema of its files is documented: a row of `line_bits` holds the lines of one file in one
    context, bit N of the number for line N."""
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
    """The functions of a file of which lines were run."""
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
    """Of each function's tests the most specific, those of its own process first; by its place how
    many functions each runs."""
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
    """By place: what a test costs times how many functions it runs, the less the more specific; and
    its function's number."""
    numbers: dict[str, int] = {}
    return [
        (
            (0.1 + each.seconds) * counts.get(place, 1),
            numbers.setdefault(each.test.partition("[")[0], len(numbers)),
        )
        for place, each in enumerate(timed)
    ]


def _ranked(tests: Iterable[int], order: Sequence[tuple[float, int]]) -> list[int]:
    """The most specific first, each test function's best case before any second one."""
    cases: dict[int, int] = defaultdict(int)
    ranked = []
    for place in sorted(tests, key=order.__getitem__):
        function = order[place][1]
        ranked.append((cases[function], len(ranked), place))
        cases[function] += 1
    return [place for *_, place in sorted(ranked)]


def _in_turn(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """The first of each, then the second of each, and so on."""
    longest = max(map(len, lists), default=0)
    return [each[place] for place in range(longest) for each in lists if place < len(each)]
