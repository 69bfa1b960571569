"""`python -m ci lanes | run [LANE...] | renew [GROUP...] | table | workflows`: what continuous integration does, also on a
desk."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence

from ci import run, table, workflows
from ci.groups import Group, group_named, groups, passed_whole, store
from ci.lanes import Lane, LaneError, lane_named, lanes

SEEDS = 1 << 31


def main() -> int:
    """The exit status: 0 when all is green."""
    parser = argparse.ArgumentParser(prog="python -m ci", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listed = commands.add_parser("lanes", help="list the lanes")
    listed.add_argument("--json", action="store_true")
    ran = commands.add_parser("run", help="run lanes here; left out, all that need no hardware")
    ran.add_argument("lane", nargs="*")
    ran.add_argument("--tests", default="", help="files or folders, instead of all that the lane may run")
    ran.add_argument("--whole", action="store_true", help="no samples: everything; groups that pass are renewed")
    ran.add_argument("--seed", type=int, default=random.randrange(SEEDS), help="of the samples, to repeat a run")
    renewed = commands.add_parser("renew", help="run groups of exhaustive tests whole and store what they covered")
    renewed.add_argument("group", nargs="*", help="left out: all that are stale")
    for command in (ran, renewed):
        command.add_argument("--workers", type=int, default=2, help="processes side by side; 0: in one process")
    commands.add_parser("table", help="write the table of the recorded runs")
    written = commands.add_parser("workflows", help="say whether the stored workflows are what the packages declare")
    written.add_argument("--write", action="store_true", help="write them anew")
    options = parser.parse_args()
    try:
        return _do(options)
    except LaneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _do(options: argparse.Namespace) -> int:
    if options.command == "lanes":
        return _list(options.json)
    if options.command == "workflows":
        return workflows.main(options.write)
    if options.command == "table":
        return _table(complete=True)
    return _renew(options.group, options.workers) if options.command == "renew" else _run(options)


def _run(options: argparse.Namespace) -> int:
    found = lanes()
    words = options.tests.split()
    stale = [group for group in groups() if not group.is_fresh()]
    fresh = ",".join(sorted({group.name for group in groups()} - {group.name for group in stale}))
    chosen = [lane_named(name, found) for name in options.lane] or _here(found, words, stale, options.whole)
    taken = () if options.whole else (f"--sample={options.seed}", f"--fresh={fresh}")
    print(_plan(stale, options), flush=True)
    runs = run.run_all(chosen, options.workers, words, taken)
    if options.whole:
        _store(chosen)
    red = [] if options.whole else [group for group in stale if group.lane in {lane.name for lane in chosen}]
    status = _table(complete=not options.lane and not options.tests)
    print(run.report(runs))
    for group in red:
        print(f"RED: what the group {group.name} covers has changed; python -m ci renew {group.name}")
    return 1 if red or any(ran.failure for ran in runs) else status


def _here(found: Sequence[Lane], words: Sequence[str], stale: Sequence[Group], whole: bool) -> list[Lane]:
    """The lanes that a machine without hardware runs; one that is a group only where that is run whole."""
    running = {group.name for group in stale}
    return [
        lane
        for lane in found
        if not lane.needs_hardware
        and (whole or not lane.group or lane.group in running)
        and (not words or any(map(lane.takes, words)))
    ]


def _plan(stale: Sequence[Group], options: argparse.Namespace) -> str:
    """What a run takes of the groups."""
    if options.whole:
        return "everything is run"
    whole = f"; whole, because they have changed: {', '.join(group.name for group in stale)}" if stale else ""
    return f"exhaustive groups: samples of seed {options.seed}{whole}"


def _renew(names: Sequence[str], workers: int) -> int:
    """Run groups whole where that has not just happened; 1 if one does not pass."""
    known, found = groups(), lanes()
    wanted = [group_named(name, known) for name in names] or [group for group in known if not group.is_fresh()]
    for lane in [lane for lane in found if lane.name in {group.lane for group in wanted}]:
        _store([lane])
        for group in wanted:
            if group.lane == lane.name and (names or not group.is_fresh()) and not _has_just_passed(group, lane):
                run.run(lane, workers, taken=(f"--group={group.name}",))
                _store([lane])
    still = [group.name for group in wanted if not group.is_fresh()]
    print(f"not renewed: {', '.join(still)}" if still else "every group that was asked for is renewed")
    return 1 if still else 0


def _has_just_passed(group: Group, lane: Lane) -> bool:
    return _passed(lane).get(group.name) == group.digest()


def _store(chosen: Sequence[Lane]) -> None:
    """Store the digests of groups that passed whole in the last run of these lanes."""
    store({name: digest for lane in chosen for name, digest in _passed(lane).items()})


def _passed(lane: Lane) -> dict[str, str]:
    record = run.record_of(lane)
    return passed_whole(json.loads(record.read_text())) if record.exists() else {}


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


def _table(complete: bool) -> int:
    """Print and write the table; 1 when all lanes ran and some test ran on none."""
    records = [run.record_of(lane) for lane in lanes() if run.record_of(lane).exists()]
    made = table.read(records)
    out = run.RECORDS / "table.md"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(table.markdown(made))
    print(table.summary(made))
    print(f"\nevery test and its lanes: {out.relative_to(run.ROOT)}")
    for lane, count in made.waiting.items():
        print(f"never ran, and waits for a run of lane {lane}: {count} tests")
    if made.not_taken:
        print(f"not in the samples of these runs: {made.not_taken} tests; `make test-all` takes all")
    if complete and made.never_ran:
        print("\nRED: tests that ran on no lane")
        for test in made.never_ran:
            print(f"  {test} ({made.why_not(test)})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
