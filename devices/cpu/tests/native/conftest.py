"""Fixtures for tests of native kernels: `library`, with every instruction set, and `engine`, once
for each instruction set.

A run with its own library (see `run_with.py`) registers it as a plugin.
"""

from __future__ import annotations

import pytest

from ci.selection import Selection
from devices.cpu.tests.native.far import FarLibrary
from devices.cpu.tests.native.libraries import PLUGIN, GivenLibrary, every_set
from sglcore_cpu.compile import Variant
from sglcore_cpu.native import Engine, Library

CAPABILITIES = {"avx2": "AVX2 with FMA and F16C", "neon": "NEON with bf16, i8mm and dotprod"}
ABOVE = "AVX-512 (F, BW, VL, DQ), by which the others are emulated"


def given(config: pytest.Config) -> GivenLibrary | None:
    """Return the library that this run registered, if any."""
    plugin = config.pluginmanager.get_plugin(PLUGIN)
    return plugin if isinstance(plugin, GivenLibrary) else None


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config, selection: Selection) -> Library | FarLibrary:
    """The library of the run, or one with every instruction set, which takes minutes if it must be
    built."""
    own = given(pytestconfig)
    return own.library if own else every_set(selection)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `engine` with each instruction set, with one thread and with two."""
    if "engine" in metafunc.fixturenames:
        own = given(metafunc.config)
        names = own.names if own else [one.name for one in Variant().instruction_sets]
        cases = [(name, threads) for name in names for threads in (own.threads if own else (1, 2))]
        metafunc.parametrize("engine", cases, indirect=True, ids=[f"{name}-{threads}" for name, threads in cases])


@pytest.fixture
def engine(request: pytest.FixtureRequest, library: Library) -> Engine:
    """An engine of one instruction set, with one thread or two."""
    name, threads = request.param
    if name not in library.usable():
        pytest.skip(f"this processor lacks {CAPABILITIES.get(name, ABOVE)}")
    return library.engine(name, threads)
