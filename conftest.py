"""For every test: the lane it runs on (ci/lanes.py); hypothesis sets no deadline, and prints how to repeat a failure."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from ci import pytest_lanes
from ci.lanes import Lane

settings.register_profile("sglcore", deadline=None, print_blob=True)
settings.load_profile("sglcore")


def pytest_addoption(parser: pytest.Parser) -> None:
    pytest_lanes.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    pytest_lanes.configure(config)
    run = config.pluginmanager.get_plugin("lane")
    if run is None or not run.lane.needs_hardware:
        # Triton asks once, when it is first imported: without hardware its kernels run in the interpreter.
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def lane(pytestconfig: pytest.Config) -> Iterator[Lane]:
    """Where this run happens: its device and capabilities."""
    yield from pytest_lanes.current_lane(pytestconfig)
