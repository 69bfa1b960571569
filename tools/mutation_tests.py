"""Runs tests in forks of this process, which has imported all their dependencies except the
project, and records which test runs which lines."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

PROFILE = "mutation"
WALL = 6
"""Factor between the CPU limit and the wall-clock limit of a run: other processes may use the
machine."""


@dataclass(frozen=True, slots=True)
class Record:
    """`lines`: tests by file and line; `seconds`: seconds by test; `modules`: the modules that
    the tests import from outside the tree; `failing`: tests that fail without a mutant, which
    `seconds` and `lines` leave out."""

    seconds: dict[str, float]
    lines: dict[str, dict[str, list[str]]]
    modules: list[str]
    failing: list[str]

    def tests_of(self, file: str, lines: Iterable[int], seconds: float) -> list[str]:
        """Choose tests that together fit into `seconds`, at least one: first tests that run these
        lines, then tests that run other lines of the file, because some code runs once per process.
        If no test runs the lines (they run at import), tests of the file's folders are added.
        Within each group, tests in the nearest folder come first, and the fastest case of each test
        function before any second case."""
        of_file = self.lines.get(file, {})
        folders = [f"tests/{name}/" for name in reversed(Path(file).parts[1:-1])]
        nearest = {test for line in lines for test in of_file.get(str(line), ())}
        others = {test for tests in of_file.values() for test in tests}
        if not nearest:
            others |= {test for test in self.seconds if test.startswith(tuple(folders))}
        chosen, total = [], 0.0
        for test in (*self._by_case(nearest, folders), *self._by_case(others - nearest, folders)):
            if not chosen or total + self.seconds[test] <= seconds:
                total += self.seconds[test]
                chosen.append(test)
        return chosen

    def _by_case(self, tests: set[str], folders: Sequence[str]) -> Iterator[str]:
        cases: dict[str, int] = {}
        ranked = []
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            function = test.partition("[")[0]
            cases[function] = cases.get(function, -1) + 1
            place = next((place for place, folder in enumerate(folders) if test.startswith(folder)), len(folders))
            ranked.append((place, cases[function], self.seconds[test], test))
        return (test for *_, test in sorted(ranked))


class Tests:
    """The tests of a copy of the tree; `tree` is absolute."""

    def __init__(self, tree: Path, log: Path, waits: bool = False) -> None:
        """`waits`: tests wait, so their time is measured by a clock; False: CPU time."""
        self._tree = tree
        self._clock = time.monotonic if waits else time.process_time
        self._log = log
        os.environ.update(OMP_NUM_THREADS="1", TRITON_INTERPRET="1")
        settings.register_profile(PROFILE, deadline=None, database=None, phases=(Phase.explicit, Phase.generate))

    def record(self, folders: Sequence[str], sources: Sequence[str], file: Path) -> Record:
        """Run all tests of these folders once with coverage, write the record, and import the
        modules that they import. Waits. Raises RuntimeError if pytest ends before all of them
        ran."""
        process = _forked(self._watched, folders, sources, file)
        process.join()
        if process.exitcode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise RuntimeError(f"the tests do not run without a mutant; see {self._log}")
        return self.recorded(file)

    def recorded(self, file: Path) -> Record:
        """Read an earlier run's record and import its modules."""
        record = Record(**json.loads(file.read_text()))
        for name in record.modules:
            # Some modules existed for one run only (generated code).
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        return record

    def run(self, tests: Sequence[str], seconds: float) -> str:
        """Run tests until one fails. Returns "passed", "failed" or "timeout" (more than `seconds`
        of CPU time). Waits."""
        process = _forked(self._limited, tests, seconds)
        process.join(WALL * seconds)
        if process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        code = process.exitcode or 0
        return "passed" if code == 0 else "timeout" if code in (-signal.SIGKILL, -signal.SIGXCPU) else "failed"

    def _watched(self, folders: Sequence[str], sources: Sequence[str], file: Path) -> int:
        import coverage  # pyright: ignore[reportMissingImports]

        cover = coverage.Coverage(data_file=None, config_file=False, source=[str(self._tree / s) for s in sources])
        cover.start()
        watcher = _Watcher(cover, self._clock)
        code = self._pytest(folders, [watcher])
        cover.stop()
        data = cover.get_data()
        seconds = {test: spent for test, spent in watcher.seconds.items() if test not in watcher.failing}
        lines = {
            str(Path(name).relative_to(self._tree)): {
                str(line): kept
                for line, tests in data.contexts_by_lineno(name).items()
                if (kept := [test for test in tests if test in seconds])
            }
            for name in data.measured_files()
        }
        record = Record(seconds, lines, self._modules(), sorted(watcher.failing))
        file.write_text(json.dumps(asdict(record)))
        return code

    def _modules(self) -> list[str]:
        """Return the imported modules from outside the tree, in import order."""
        places = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
        return [name for name, file in places if file and not Path(file).is_relative_to(self._tree)]

    def _limited(self, tests: Sequence[str], seconds: float) -> int:
        sys.dont_write_bytecode = True
        limit = int(time.process_time() + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        return self._pytest(["-x", *tests])

    def _pytest(self, arguments: Sequence[str], plugins: Sequence[Any] = ()) -> int:
        os.setsid()
        with self._log.open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.chdir(self._tree)
        folders = (self._tree, self._tree / "simulator", *sorted((self._tree / "devices").iterdir()))
        sys.path[:0] = [str(folder) for folder in folders]
        # For processes that tests start.
        os.environ["PYTHONPATH"] = os.pathsep.join(str(folder) for folder in folders)
        fixed = (
            "-n0",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            f"--hypothesis-profile={PROFILE}",
            "--hypothesis-seed=0",
        )
        return int(pytest.main([*fixed, *arguments], plugins=list(plugins)))


class _Watcher:
    """Tells coverage which test runs, and records each test's seconds."""

    def __init__(self, cover: Any, clock: Callable[[], float]) -> None:
        self._cover, self._clock = cover, clock
        self.seconds: dict[str, float] = {}
        self.failing: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._cover.switch_context(item.nodeid)
        started = self._clock()
        result = yield
        self.seconds[item.nodeid] = self._clock() - started
        self._cover.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failing.add(report.nodeid)


def _forked(call: Any, *arguments: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=_exit_with, args=(call, *arguments))
    process.start()
    return process


def _exit_with(call: Any, *arguments: Any) -> None:
    sys.exit(call(*arguments))
