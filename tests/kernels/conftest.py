"""Makes Triton's interpreter faster for these tests by preparing each kernel once."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Prepare kernels once, if the simulator is installed. Without it, as on hardware, the tests
    give the same results and take longer in the interpreter."""
    if find_spec("sglcore_sim") is not None:
        from sglcore_sim.lanes import prepare_once

        prepare_once()
