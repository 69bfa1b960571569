"""The pytest plugin that records which test runs which lines, by coverage.py.

What a test's own process runs is recorded with the test's name. What a process that it starts runs is recorded with the
name of the test's file, because a server serves all tests of a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage

from ci.impact import SOURCES
from ci.lanes import ROOT

CONTEXT = "IMPACT_FILE"
"""The environment variable in which a child finds the file of the test that started it."""
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
    """Watches from its making until pytest ends. `folder` is made; each process writes files of its own there."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sources = [str(ROOT / name) for name in SOURCES]
        settings = folder / "children.ini"
        settings.write_text(CHILDREN.format(sources="\n    ".join(sources), folder=folder, variable=CONTEXT))
        os.environ["COVERAGE_PROCESS_START"] = str(settings)
        file = folder / f"tests.{os.getpid()}"
        self._cover = Coverage(data_file=file, config_file=False, source=sources, messages=False)
        self._cover.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """All that is run until the next test is this test's."""
        os.environ[CONTEXT] = item.nodeid.partition("::")[0]
        self._cover.switch_context(item.nodeid)
        return (yield)

    def pytest_unconfigure(self) -> None:
        """Write what was seen."""
        self._cover.stop()
        self._cover.save()
