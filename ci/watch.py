"""The pytest plugin that records with coverage.py which test runs which lines.

Lines that run in the test's process are recorded under the test's name. Lines that run in a child
process are recorded under the test's file, because a server serves all tests of a file. A shared
fixture is recorded under the first test that uses it, if that test is watched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage

from ci.impact import SOURCES
from ci.lanes import ROOT

CONTEXT = "IMPACT_FILE"
"""The environment variable that tells a child process the file of the test that started it."""
START = "COVERAGE_PROCESS_START"
"""The environment variable that makes coverage.py watch a child process."""
CHILDREN = """[run]
source =
    {sources}
data_file = {folder}/child
parallel = true
sigterm = true
patch = _exit
context = ${{{variable}}}
disable_warnings = no-data-collected,module-not-imported,module-not-measured,couldnt-parse
"""


class Watcher:
    """Watches the tests for which `is_due` is true, until pytest ends. Creates `folder`; each
    process writes its own files there."""

    def __init__(self, folder: Path, is_due: Callable[[str], bool]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sources = [str(ROOT / name) for name in SOURCES]
        self._settings = folder / "children.ini"
        self._settings.write_text(CHILDREN.format(sources="\n    ".join(sources), folder=folder, variable=CONTEXT))
        self._is_due = is_due
        self._cover = Coverage(
            data_file=folder / f"tests.{os.getpid()}", config_file=False, source=sources, messages=False
        )
        self._is_started = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Record all lines until the next test under this test's name, if it is due."""
        if self._is_due(item.nodeid):
            os.environ[START] = str(self._settings)
            os.environ[CONTEXT] = item.nodeid.partition("::")[0]
            self._run()
            self._cover.switch_context(item.nodeid)
        else:
            os.environ.pop(START, None)
            self._pause()
        return (yield)

    def pytest_unconfigure(self) -> None:
        """Stop, and write the recorded lines."""
        self._pause()
        self._cover.save()

    def _run(self) -> None:
        if not self._is_started:
            self._cover.start()
            self._is_started = True

    def _pause(self) -> None:
        if self._is_started:
            self._cover.stop()
            self._is_started = False
