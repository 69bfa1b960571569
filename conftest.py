"""For every test: the lane it runs on (ci/lanes.py); hypothesis sets no deadline, and prints how to
repeat a failure."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from ci import pytest_lanes
from ci.lanes import Lane
from ci.selection import Selection

settings.register_profile("sglcore", deadline=None, print_blob=True)
settings.load_profile("sglcore")


def pytest_addoption(parser: pytest.Parser) -> None:
    pytest_lanes.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    pytest_lanes.configure(config)
    if not pytest_lanes.run_of(config).lane.needs_hardware:
        # Triton asks once, when it is first imported: without hardware its kernels run in the
        # interpreter.
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def lane(pytestconfig: pytest.Config) -> Lane:
    """Where this run happens: its device and capabilities."""
    return pytest_lanes.run_of(pytestconfig).lane


@pytest.fixture(scope="session")
def selection(pytestconfig: pytest.Config) -> Selection:
    """What this run takes, for tests that take a part of many checks themselves."""
    return pytest_lanes.run_of(pytestconfig).selection
