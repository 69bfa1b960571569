"""`python -m ci run | near | since | lanes | table | workflows`: the commands of continuous
integration, which also run on a developer's machine."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ci import changes, impact, near, run, since, table, timings, workflows
from ci.groups import Group, groups, passed_whole, store
from ci.lanes import HOST, Lane, LaneError, lane_named, lanes
from ci.selection import SLOW, slow_tests


def main() -> int:
    """Run a command; returns the exit status: 0 if all passed, 2 on a LaneError."""
    try:
        return _do(_parser().parse_args())
    except LaneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ci", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listed = commands.add_parser("lanes", help="list the lanes")
    listed.add_argument("--json", action="store_true")
    ran = commands.add_parser("run", help="run lanes here; default: all that need no hardware")
    ran.add_argument("lane", nargs="*")
    ran.add_argument("--tests", default="", help="files or folders, instead of all that the lane may run")
    ran.add_argument(
        "--whole", action="store_true", help="run slow tests and groups whole, and record their cost and coverage"
    )
    ran.add_argument(
        "--unwatched",
        action="store_true",
        help="with --whole: record the cost of tests, but not the functions that they run",
    )
    ran.add_argument(
        "--every-lane", action="store_true", help="do not divide tests among lanes: each runs all that it can"
    )
    ran.add_argument("--turn", type=int, help="the number in the rotation; default: the number of commits")
    ran.add_argument(
        "--turns", type=int, default=1, help="number of parts of the slow tests to run at once; default: 1"
    )
    ran.add_argument("--workers", type=int, default=2, help="number of parallel processes; 0: in one process")
    narrow = commands.add_parser("near", help="run the tests nearest to what has changed, or to these files")
    narrow.add_argument("file", nargs="*")
    narrow.add_argument(
        "--seconds", type=float, default=near.LOOP, help="the time for tests, without the start of the lanes"
    )
    bisected = commands.add_parser("since", help="find the commit since which a test fails")
    bisected.add_argument("test", help="its name in pytest")
    bisected.add_argument("--lane", default="", help="default: the host's")
    bisected.add_argument("--good", default="", help="a commit at which it passes; default: search for one")
    joined = commands.add_parser("table", help="write the table of the recorded runs; red for tests that ran nowhere")
    joined.add_argument("--records", type=Path, default=run.RECORDS, help="a folder; all records below it are joined")
    written = commands.add_parser("workflows", help="check the stored workflows against the packages' declarations")
    written.add_argument("--write", action="store_true", help="rewrite them")
    return parser


def _do(options: argparse.Namespace) -> int:
    if options.command == "lanes":
        return _list(options.json)
    if options.command == "workflows":
        return workflows.main(options.write)
    if options.command == "table":
        return _table(sorted(options.records.rglob("*.json")), complete=True)
    if options.command == "near":
        return near.loop(options.file, options.seconds, [lane for lane in lanes() if not lane.needs_hardware])
    if options.command == "since":
        found = lanes()
        host = next(lane.name for lane in found if HOST in lane.capabilities)
        first = since.Bisection(options.test, lane_named(options.lane or host, found)).run(options.good)
        print(changes.git("show", "--stat", "--format=%h %an %ad%n%s%n", first))
        return 0
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    found, words = lanes(), options.tests.split()
    stale = [group for group in groups() if not group.is_fresh()]
    chosen = [lane_named(name, found) for name in options.lane] or _here(found, words, stale, options.whole)
    is_complete = not options.lane and not words
    taken = _taken(options, chosen, stale, is_complete)
    runs = run.run_all(chosen, options.workers, words, taken)
    records = [run.record_of(lane) for lane in chosen if run.record_of(lane).exists()]
    for name in store({name: digest for path in records for name, digest in passed_whole(_read(path)).items()}):
        print(f"ci/digests/{name} is written: the group has passed whole; commit it")
    if options.whole and is_complete:
        _remember(records, is_watched=not options.unwatched)
    status = _table(records, is_complete)
    print(run.report(runs))
    return 1 if any(ran.failure for ran in runs) else status


def _taken(
    options: argparse.Namespace, chosen: Sequence[Lane], stale: Sequence[Group], is_complete: bool
) -> tuple[str, ...]:
    """Return the pytest options that select each lane's tests, and print the selection."""
    if options.every_lane:
        print("everything is run, on every lane that can run it", flush=True)
        return ()
    turn = changes.commits() if options.turn is None else options.turn
    fresh = ",".join(sorted({group.name for group in groups()} - {group.name for group in stale}))
    shares = (f"--turn={turn}", f"--turns={options.turns}", f"--fresh={fresh}")
    whole = [group.name for group in stale if group.lane in {lane.name for lane in chosen}]
    if whole:
        print(f"whole, because what they cover has changed: {', '.join(whole)}", flush=True)
    if options.whole:
        print(f"turn {turn}: every test, and parts of closed groups that cover what they did", flush=True)
        return (*shares, "--whole", *(_watched() if is_complete and not options.unwatched else ()))
    added = near.slow_near(chosen) if is_complete else []
    part = f"{options.turns} of {slow_tests().turns} parts of the slow ones"
    text = f"every cheap test, {part}, and {len(added)} slow ones near what has changed"
    print(f"turn {turn}: {text}", flush=True)
    return (*shares, near.write(added, chosen))


def _watched() -> tuple[str, ...]:
    """Return the pytest options that record which test runs which function."""
    return (f"--impact={impact.RAW / run.LANE}", f"--impact-part={impact.next_part(impact.load())}")


def _here(found: Sequence[Lane], words: Sequence[str], stale: Sequence[Group], whole: bool) -> list[Lane]:
    """Return the lanes that need no hardware and run the requested files; a lane of a group only if
    the group runs whole."""
    running = {group.name for group in stale}
    return [
        lane
        for lane in found
        if not lane.needs_hardware
        and (whole or not lane.group or lane.group in running)
        and (not words or any(map(lane.takes, words)))
    ]


def _remember(records: Sequence[Path], is_watched: bool) -> None:
    """Write the results of a full run: the slow tests, and if watched, the impact record."""
    slow = timings.slow_of(records, slow_tests())
    new, gone = timings.write_slow(slow)
    print(f"{SLOW}: {len(slow.names)} slow tests, {new} new, {gone} no longer, taken in {slow.turns} turns")
    if not is_watched:
        return
    found = impact.gather(impact.RAW, timings.timed(records, slow), changes.head(), near.load_record())
    impact.save(found)
    shutil.rmtree(impact.RAW, ignore_errors=True)
    count = sum(map(len, found.functions.values()))
    print(f"{impact.STORED}: {count} functions and {len(found.tests)} tests that run them; commit both files")


def _read(path: Path) -> dict:
    return json.loads(path.read_text())


def _list(as_json: bool) -> int:
    rows = [{"name": x.name, "device": x.device, "simulator": x.simulator, "runner": list(x.runner)} for x in lanes()]
    if as_json:
        print(json.dumps(rows))
        return 0
    for lane in lanes():
        where = "hardware: " + ", ".join(lane.runner) if lane.needs_hardware else "any machine"
        what = "own: " + ", ".join(lane.environment) if lane.environment else "torch " + ", ".join(lane.torch)
        print(f"{lane.name:<16} {lane.device:<8} {where:<36} {what}")
    return 0


def _table(records: Sequence[Path], complete: bool) -> int:
    """Print and write the table; returns 1 if there is no record, or if all lanes ran and a test
    ran on none."""
    if not records:
        print("RED: there is no record of a lane; each lane's job leaves one", file=sys.stderr)
        return 1
    made = table.read(records)
    out = run.RECORDS / "table.md"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(table.markdown(made))
    print(table.summary(made))
    print(f"\nevery test and its lanes: {out.relative_to(run.ROOT)}")
    for lane, count in made.waiting.items():
        print(f"never ran, and waits for a run of lane {lane}: {count} tests")
    if made.not_taken:
        print(f"left to other turns: {made.not_taken} tests; `make test-all` takes all")
    if complete and made.never_ran:
        print("\nRED: tests that ran on no lane")
        for test in made.never_ran:
            print(f"  {test} ({made.why_not(test)})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
