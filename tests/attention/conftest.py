"""Kernels in Triton's interpreter, without what it does over and over."""

from __future__ import annotations

import pytest

from sglcore_sim.lanes import prepare_once


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    prepare_once()
