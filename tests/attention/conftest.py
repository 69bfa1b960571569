"""Kernels in Triton's interpreter, without what it does over and over."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Where the simulator is installed; without it, as on hardware, tests only take longer in the
    interpreter."""
    if find_spec("sglcore_sim") is not None:
        from sglcore_sim.lanes import prepare_once

        prepare_once()
