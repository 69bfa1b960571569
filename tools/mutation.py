"""Mutation testing of a set of folders with cosmic-ray: mutants of a sample of source positions,
each against the fastest tests that run its line. The sample depends only on the code at a position:
a change elsewhere does not change it.

    python tools/mutation.py                 # the whole sample of the set `step`
    python tools/mutation.py --set server    # of another set in mutation.toml
    python tools/mutation.py --minutes 20    # the part that fits, equally from each folder
    python tools/mutation.py --again   # only mutants that survived and are not in mutation.toml
    python tools/mutation.py --file sglcore/step/emitting_rows.py --all   # every mutant of a file

Works in a copy of the tree below build/mutation/SET, and leaves cosmic-ray's session (for
`cr-report`, `cr-html`) and report.md there. Fails if the share of killed mutants of a folder is
below the floor in mutation.toml.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import zip_longest
from math import inf
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "mutation"
sys.path.append(str(BUILD / "tool"))

import cosmic_ray.plugins  # noqa: E402  # pyright: ignore[reportMissingImports]
from cosmic_ray.commands import init  # noqa: E402  # pyright: ignore[reportMissingImports]
from cosmic_ray.mutating import mutate_code, use_mutation  # noqa: E402  # pyright: ignore[reportMissingImports]
from cosmic_ray.work_db import WorkDB, use_db  # noqa: E402  # pyright: ignore[reportMissingImports]
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult  # noqa: E402  # pyright: ignore[reportMissingImports]
from mutation_operator import Chosen  # noqa: E402
from mutation_tests import Record, Tests  # noqa: E402

Name = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A cosmic-ray mutant: change number `occurrence` of `operator` in `file`; line `line`, `was`,
    becomes `becomes`."""

    job: str
    file: str
    definition: str
    operator: str
    occurrence: int
    line: int
    was: str
    becomes: str

    @property
    def name(self) -> Name:
        """Its identity, which does not change with the code around it."""
        return self.file, self.definition, self.was, self.becomes


def main() -> int:
    """Run the mutants and write the report; returns 0 if enough are killed in every folder."""
    asked = _arguments()
    config = tomllib.loads((ROOT / "tools" / "mutation.toml").read_text())
    providers = cosmic_ray.plugins.OPERATOR_PROVIDERS
    providers["core"] = Chosen(providers["core"], "|".join(config["operators"]))
    config |= config["sets"][asked.set]
    folders = tuple(f"{folder}/" for folder in config["folders"])
    answers = {
        (e["file"], e["in"], e["was"], e["becomes"]) for e in config["equivalent"] if e["file"].startswith(folders)
    }
    build = BUILD / asked.set
    tree, session_file = build / "tree", build / "session.sqlite"
    known = dict.fromkeys(answers, "passed") | _killed(session_file) if asked.again else {}
    _copy_tree(tree)
    os.chdir(tree)
    total, items = _sample(config, asked)
    mutants = [_mutant(item) for item in items]
    with use_db(session_file, WorkDB.Mode.create) as session:
        session.clear()
        session.add_work_items(items)
        tests = Tests(tree, build / "tests.log", config.get("waits", False))
        if asked.recorded:
            record = tests.recorded(build / "record.json")
        else:
            record = tests.record(config["tests"], config["folders"], build / "record.json")
        began = time.monotonic()
        for mutant in mutants:
            if mutant.name in known:
                session.set_result(mutant.job, _result(known[mutant.name], mutant))
        tried = [mutant for mutant in mutants if mutant.name not in known]
        for number, mutant in enumerate(tried, 1):
            if time.monotonic() - began > 60 * asked.minutes:
                break
            result = _tried(mutant, tests, record, config)
            session.set_result(mutant.job, result)
            print(f"{number}/{len(tried)} {result.output} {mutant.file}:{mutant.line} {mutant.becomes}", flush=True)
        is_part = bool(asked.file) or asked.minutes < inf
        report, is_good = _report(session, mutants, total, config["floor"], answers, is_part)
    report += f"{time.monotonic() - began:.0f} s\n"
    report += "".join(f"fails without a mutant: {test}\n" for test in record.failing)
    (build / "report.md").write_text(report)
    print(report)
    return 0 if is_good else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="mutation testing of a set of folders")
    parser.add_argument("--set", default="step", help="a set of tools/mutation.toml")
    parser.add_argument(
        "--again", action="store_true", help="leave out mutants that the last run killed or that are answered"
    )
    parser.add_argument("--all", action="store_true", help="every mutant, no sample")
    parser.add_argument(
        "--recorded", action="store_true", help="use the last run's record of the lines that each test runs"
    )
    parser.add_argument("--minutes", type=float, default=inf, help="start no mutant after this time")
    parser.add_argument("--file", action="append", help="only this file")
    return parser.parse_args()


def _copy_tree(tree: Path) -> None:
    """Copy the files that git knows or would add, and built libraries, in their current state."""
    shutil.rmtree(tree, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    built = [str(file.relative_to(ROOT)) for file in (ROOT / "devices").glob("*/*/*.so")]
    for name in filter(None, {*names, *built}):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def _files(config: dict[str, Any], only: list[str] | None) -> list[Path]:
    files = (str(f) for folder in config["folders"] for f in Path(folder).rglob("*.py"))
    left_out = config["leave_out"]
    wanted = (name for name in sorted(files) if not any(fnmatchcase(name, pattern) for pattern in left_out))
    return [Path(name) for name in wanted if only is None or name in only]


def _sample(config: dict[str, Any], asked: argparse.Namespace) -> tuple[dict[str, int], list[Any]]:
    """Return how many mutants each folder has, and the sample. Positions are ranked by a digest of
    their code, so that a change elsewhere does not change the sample; each gives the mutant with
    the lowest digest. The folders alternate."""
    dull = re.compile("|".join(config["leave_out_lines"]))
    counts: dict[str, int] = dict.fromkeys(config["folders"], 0)
    places: dict[str, dict[Any, tuple[str, Any]]] = {folder: {} for folder in counts}
    for item in _listed(_files(config, asked.file)):
        spec = item.mutations[0]
        file, (row, column) = str(spec.module_path), spec.start_pos
        line = _lines(file)[row - 1].strip()
        if dull.match(line) or _is_annotation(file, spec.start_pos):
            continue
        folder = next(folder for folder in counts if file.startswith(f"{folder}/"))
        counts[folder] += 1
        sign = spec.occurrence % 2 if spec.operator_name.endswith("NumberReplacer") else 0
        named = (config["seed"], file, spec.definition_name, line, column, spec.operator_name, sign)
        drawn = hashlib.sha256(repr(named).encode()).hexdigest()
        place = item.job_id if asked.all else (file, row, column)
        places[folder][place] = min(places[folder].get(place, (drawn, item)), (drawn, item), key=lambda pair: pair[0])
    most = None if asked.all else config["sample"]
    found = (sorted(of_folder.values(), key=lambda pair: pair[0])[:most] for of_folder in places.values())
    return counts, [pair[1] for of_all in zip_longest(*found) for pair in of_all if pair is not None]


def _listed(files: list[Path]) -> tuple[Any, ...]:
    """Return all cosmic-ray mutants of these files."""
    with use_db(":memory:", WorkDB.Mode.create) as session:
        init(files, session, {})
        return session.work_items


@cache
def _lines(file: str) -> tuple[str, ...]:
    return tuple(Path(file).read_text().splitlines())


@cache
def _parsed(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text())


def _is_annotation(file: str, place: tuple[int, int]) -> bool:
    """Return whether a position is in a type annotation, which is not executed."""
    return any(
        (note.lineno, note.col_offset) <= place < (note.end_lineno or 0, note.end_col_offset or 0)
        for note in _annotations(file)
    )


@cache
def _annotations(file: str) -> tuple[ast.expr, ...]:
    nodes = list(ast.walk(_parsed(file)))
    found = [node.annotation for node in nodes if isinstance(node, ast.arg | ast.AnnAssign)]
    return tuple(note for note in (*found, *(n.returns for n in nodes if isinstance(n, ast.FunctionDef))) if note)


def _mutant(item: Any) -> Mutant:
    spec = item.mutations[0]
    file, operator = str(spec.module_path), cosmic_ray.plugins.get_operator(spec.operator_name)()
    changed = (mutate_code(Path(file).read_text(), operator, spec.occurrence) or "").splitlines()
    row = spec.start_pos[0] - 1
    becomes = changed[row].strip() if len(changed) == len(_lines(file)) else ""
    was = _lines(file)[row].strip()
    return Mutant(
        item.job_id, file, spec.definition_name or "", spec.operator_name, spec.occurrence, row + 1, was, becomes
    )


def _statement(file: str, line: int) -> range:
    """Return the lines of the innermost statement at a line: for a compound statement its header;
    for a function's signature or decorators the function's body."""
    found = range(line, line + 1)
    for node in ast.walk(_parsed(file)):
        if not isinstance(node, ast.stmt):
            continue
        first, last = node.lineno, node.end_lineno or node.lineno
        body = getattr(node, "body", None)
        if isinstance(node, ast.FunctionDef):
            decorated = min((d.lineno for d in node.decorator_list), default=first)
            if decorated <= line < node.body[0].lineno:
                return range(node.body[0].lineno, last + 1)
        elif first <= line <= last and body is None:
            found = range(first, last + 1)
        elif body and first <= line < body[0].lineno:
            found = range(first, body[0].lineno)
    return found


def _tried(mutant: Mutant, tests: Tests, record: Record, config: dict[str, Any]) -> WorkResult:
    chosen = record.tests_of(mutant.file, _statement(mutant.file, mutant.line), config["seconds"])
    if not chosen:
        return _result("untested", mutant)
    path = Path(mutant.file)
    stamps = path.stat()
    estimate = sum(record.seconds[test] for test in chosen)
    with use_mutation(path, cosmic_ray.plugins.get_operator(mutant.operator)(), mutant.occurrence):
        outcome = tests.run(chosen, 2 * estimate + 8)
        if outcome == "passed" and mutant.file.startswith(f"{config['streams']['folder']}/"):
            outcome = tests.run(config["streams"]["arguments"], 40)
    # Restore the timestamps, so that Python's compiled file stays valid.
    os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
    return _result(outcome, mutant)


def _result(outcome: str, mutant: Mutant) -> WorkResult:
    is_killed = outcome in ("failed", "timeout")
    return WorkResult(
        worker_outcome=WorkerOutcome.NORMAL,
        output=outcome,
        test_outcome=TestOutcome.KILLED if is_killed else TestOutcome.SURVIVED,
        diff="\n".join((mutant.file, mutant.definition, mutant.was, mutant.becomes)),
    )


def _killed(session_file: Path) -> dict[Name, str]:
    """Return the mutants that the last run killed, with the outcome."""
    if not session_file.is_file():
        return {}
    with use_db(session_file, WorkDB.Mode.open) as session:
        killed = [result for _, result in session.results if result.test_outcome == TestOutcome.KILLED]
    return {tuple(result.diff.split("\n")): result.output for result in killed}


def _report(
    session: WorkDB, mutants: Iterable[Mutant], total: dict[str, int], floor: int, answers: set[Name], is_part: bool
) -> tuple[str, bool]:
    """Report on the mutants that were tried: a table of folders, then survivors that are not in
    `answers`. Also returns whether enough were killed."""
    outcomes = {job: result.output for job, result in session.results}
    mutants = [mutant for mutant in mutants if mutant.job in outcomes]
    rows, is_good = [], True
    for folder, count in total.items():
        of_folder = [m for m in mutants if m.file.startswith(f"{folder}/")]
        alive = [m for m in of_folder if outcomes[m.job] in ("passed", "untested")]
        equivalent = [m for m in alive if m.name in answers]
        timeouts = sum(outcomes[m.job] == "timeout" for m in of_folder)
        score = 100 * (len(of_folder) - len(alive)) / max(1, len(of_folder) - len(equivalent))
        is_good &= score >= floor
        rows.append(
            f"| `{folder}` | {count} | {len(of_folder)} | {len(of_folder) - len(alive)} | {timeouts} "
            f"| {len(equivalent)} | {len(alive) - len(equivalent)} | {score:.0f} % |"
        )
    head = (
        "| folder | mutants | sample | killed | of them by time | equivalent | survived | score |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    lives = [m for m in mutants if outcomes[m.job] in ("passed", "untested")]
    listed = [
        f"{m.file}:{m.line} in {m.definition} ({outcomes[m.job]})\n  - {m.was}\n  + {m.becomes}"
        for m in lives
        if m.name not in answers
    ]
    stale = answers - {m.name for m in lives}
    listed += [f"mutation.toml answers a mutant that did not survive: {name}" for name in sorted(stale) if not is_part]
    return "\n".join([head, *rows, "", *listed, ""]), is_good


if __name__ == "__main__":
    sys.exit(main())
