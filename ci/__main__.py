"""`python -m ci lanes | run [LANE...] | table | workflows`: what continuous integration does, also on a desk."""

from __future__ import annotations

import argparse
import json
import sys

from ci import run, table, workflows
from ci.lanes import LaneError, lane_named, lanes


def main() -> int:
    """The exit status: 0 when all is green."""
    parser = argparse.ArgumentParser(prog="python -m ci", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listed = commands.add_parser("lanes", help="list the lanes")
    listed.add_argument("--json", action="store_true")
    ran = commands.add_parser("run", help="run lanes here; left out, all that need no hardware")
    ran.add_argument("lane", nargs="*")
    ran.add_argument("--workers", type=int, default=2, help="processes side by side; 0: in one process")
    ran.add_argument("--tests", default="", help="files or folders, instead of all that the lane may run")
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
    found = lanes()
    words = options.tests.split()
    here = [lane for lane in found if not lane.needs_hardware and (not words or any(map(lane.takes, words)))]
    chosen = [lane_named(name, found) for name in options.lane] or here
    runs = [run.run(lane, options.workers, [word for word in words if lane.takes(word)]) for lane in chosen]
    status = _table(complete=not options.lane and not options.tests)
    print(run.report(runs))
    return 1 if any(ran.failure for ran in runs) else status


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
        print(f"never ran, and waits for a machine of lane {lane}: {count} tests")
    if complete and made.never_ran:
        print("\nRED: tests that ran on no lane")
        for test in made.never_ran:
            print(f"  {test} ({made.why_not(test)})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
