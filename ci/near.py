"""Selects the tests nearest to what has changed: for `make test`, and for a developer's short loop
(`python -m ci near`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ci import changes, impact, run
from ci.functions import MODULE, bodies_of
from ci.impact import Function, Impact, Timed
from ci.lanes import HOST, ROOT, Lane, LaneError, needs_of
from ci.selection import slow_tests

LOOP = 40.0
"""Seconds of tests that `python -m ci near` takes; starting the lanes comes on top."""
ADDED = 60.0
"""Seconds of slow tests that `make test` adds for what has changed."""
LANES = 2
"""The most lanes of `python -m ci near`; they run in parallel."""


def load_record() -> Impact | None:
    """Read the impact record, with the names that its files have now."""
    record = impact.load()
    return None if record is None else record.renamed(changes.renames(record.commit))


def slow_near(lanes: Sequence[Lane]) -> list[Timed]:
    """Return the slow tests that `make test` adds, ADDED seconds at most. Up to a half of the time:
    tests in changed, uncommitted test files, and tests that run uncommitted functions. Up to three
    quarters: tests that run functions changed since the record. The rest: tests in test files
    changed since the record."""
    record = load_record()
    if record is None:
        return []
    now, changed = changes.since("HEAD"), changes.since(record.commit)
    names, slow = {lane.name for lane in lanes}, slow_tests()
    own, others = (
        [each for each in record.tests if each.test.partition("::")[0] in found.tests] for found in (now, changed)
    )

    def accepts(each: Timed) -> bool:
        """By today's `ci/slow.txt`: a test may have become slow since the record."""
        return each.lane in names and bool(slow.name_of(each.test))

    first = impact.choose(record, now.functions, ADDED / 2, accepts, own)
    nearest = impact.choose(record, changed.functions, ADDED * 3 / 4, accepts, first)
    return impact.choose(record, (), ADDED, accepts, [*nearest, *others])


def write(chosen: Sequence[Timed], lanes: Sequence[Lane]) -> str:
    """Write the chosen tests to one file per lane; returns the pytest option that names the lane's
    file."""
    folder = ROOT / "build" / "near"
    folder.mkdir(parents=True, exist_ok=True)
    for lane in lanes:
        own = [each.test for each in chosen if each.lane == lane.name]
        (folder / f"{lane.name}.txt").write_text("".join(f"{test}\n" for test in own))
    return f"--near={folder / run.LANE}.txt"


def loop(files: Sequence[str], seconds: float, lanes: Sequence[Lane]) -> int:
    """Run the tests nearest to what has changed, or to these files, on the lanes that run them;
    waits. Returns the exit status. Raises LaneError."""
    record = load_record()
    if record is None:
        raise LaneError(f"there is no {impact.STORED}; `make test-all` writes it")
    functions, tests = _asked(files, record)
    chosen = _chosen(record, functions, tests, seconds, lanes)
    known = {each.test.partition("::")[0] for each in chosen}
    words = {lane.name: [each.test for each in chosen if each.lane == lane.name] for lane in lanes}
    for test in [test for test in tests if test not in known]:
        for lane in _able(test, lanes)[:1]:
            words[lane.name].append(test)
    taken = [lane for lane in lanes if words[lane.name]]
    print(_said(functions, tests, words), flush=True)
    if not taken:
        return 1
    runs = run.run_each([(lane, words[lane.name]) for lane in taken])
    print(run.report(runs))
    return 1 if any(ran.failure for ran in runs) else 0


def _asked(files: Sequence[str], record: Impact) -> tuple[list[Function], list[str]]:
    """Return the functions and test files to cover. Without `files`: the uncommitted changes, or if
    there are none, the changes since the record. With `files`: their uncommitted functions, or all
    their functions. Raises LaneError."""
    if not files:
        found = changes.since("HEAD")
        found = found if found.functions or found.tests else changes.since(record.commit)
        return list(found.functions), list(found.tests)
    changed = set(changes.since("HEAD").functions)
    functions: list[Function] = []
    tests: list[str] = []
    for word in files:
        path = (ROOT / word).resolve()
        if not path.is_file() or not path.is_relative_to(ROOT):
            raise LaneError(f"{word} is no file of the checkout")
        name = path.relative_to(ROOT).as_posix()
        if path.name.startswith("test_"):
            tests.append(name)
            continue
        own: list[Function] = [(name, function) for function in (*bodies_of(path), MODULE)]
        functions += [each for each in own if each in changed] or own
    return functions, tests


def _chosen(
    record: Impact, functions: Sequence[Function], tests: Sequence[str], seconds: float, lanes: Sequence[Lane]
) -> list[Timed]:
    """Choose tests on at most LANES lanes: the host's, and those with the most nearest tests."""
    names = {lane.name for lane in lanes}
    first = [each for each in record.tests if each.test.partition("::")[0] in tests]
    first.sort(key=lambda each: each.seconds)
    nearest = impact.choose(record, functions, seconds, lambda each: each.lane in names, first)
    counts = Counter(each.lane for each in nearest)
    host = [lane.name for lane in lanes if HOST in lane.capabilities and counts[lane.name]]
    others = [lane for lane, _ in counts.most_common() if lane not in host]
    taken = {*host, *others} if len(counts) <= LANES else {*host, *others[: LANES - len(host)]}
    return impact.choose(record, functions, seconds, lambda each: each.lane in taken, first)


def _able(test: str, lanes: Sequence[Lane]) -> list[Lane]:
    """Return the lanes that may run tests of a file that the record does not know, by the
    capabilities in its text."""
    source = (ROOT / test).read_text()
    found = []
    for lane in lanes:
        named = frozenset(word for word in lane.capabilities if f'"{word}"' in source)
        declared = named or (frozenset({"device"}) if "needs(" in source else frozenset())
        if not lane.missing(needs_of(Path(test), declared)):
            found.append(lane)
    return found


def _said(functions: Sequence[Function], tests: Sequence[str], words: dict[str, list[str]]) -> str:
    where = ", ".join(f"{len(own)} on {lane}" for lane, own in words.items() if own)
    what = f"{len(functions)} functions" + (f" and {len(tests)} files of tests" if tests else "")
    return f"near {what}: tests: {where}" if where else f"no test is known that runs any of {what}"
