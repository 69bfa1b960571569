"""Whole engines on a device: every attention backend, eager and with every graph kind, equals
transformers within half precision.

A package's test file has `from tests.laws.device_engines import *` and imports its `package`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglcore.core.errors import ConfigError
from sglcore.device.package import DevicePackage, resolve
from tests.attention.on_packages import over_heads
from tests.checkpoints import gemma2, gpt_oss
from tests.laws import half

__all__ = [
    "capped",
    "engines",
    "grounded",
    "model",
    "pytest_generate_tests",
    "test_a_model_with_windows_and_sinks_is_served_or_refused_by_name",
    "test_a_model_with_windows_and_softcaps_is_served_by_decode_and_prefill_graphs_or_refused_by_name",
    "test_eager",
    "test_graphs",
    "test_replays_equal_eager_forwards_of_the_same_inputs",
]

Oracle = tuple[Any, Path]


class Engines:
    """Runs the engines of a package; a library that is not installed skips the test."""

    def __init__(self, package: DevicePackage) -> None:
        self.package = package

    def backend(self, attention: str) -> Any:
        """Return the class of a backend."""
        try:
            return resolve(self.package.attention[attention], self.package.name)
        except ImportError as error:
            pytest.skip(f"needs the library of {attention}: {error}")

    def run(self, model: Oracle, attention: str, graph: str, **settings: Any) -> set[str]:
        """Run a model, check its numbers, and return the kinds of paths that its steps took."""
        oracle, folder = model
        sizes = self.backend(next(iter(self.package.attention))).facts.page_sizes
        page_size = 16 if sizes is None or 16 in sizes else sizes[0]
        self.backend(attention)
        paths = half.check(folder, oracle, self.package.name, attention, graph, page_size=page_size, **settings)
        return {path.partition(":")[0] for path in paths}

    def refused(self, model: Oracle, attention: str, asked: set[str]) -> bool:
        """Whether a backend lacks features that a model needs; if it does, also check that it is
        refused and that they are named."""
        missing = sorted(asked - self.backend(attention).facts.features)
        if missing:
            with pytest.raises(ConfigError, match=f"{attention} refused: it lacks {', '.join(missing)}"):
                self.run(model, attention, "off")
        return bool(missing)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize over the package's attention backends and graph kinds, and over `overlap` (graphs
    only with it)."""
    package: DevicePackage = vars(metafunc.module)["package"]
    names = over_heads(package)
    ahead = [True] if metafunc.function is test_graphs else [True, False]
    for name, values in (("attention", names), ("graph", list(package.graphs)), ("overlap", ahead)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    yield half.checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    yield half.checkpoint(tmp_path_factory.mktemp("capped"), gemma2)


@pytest.fixture(scope="module")
def grounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    yield half.checkpoint(tmp_path_factory.mktemp("grounded"), gpt_oss)


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest) -> Engines:
    return Engines(vars(request.module)["package"])


def test_eager(engines: Engines, model: Oracle, attention: str, overlap: bool) -> None:
    assert engines.run(model, attention, "off", overlap=overlap) == {"eager"}


def test_graphs(engines: Engines, model: Oracle, attention: str, graph: str, overlap: bool) -> None:
    assert {"full", graph} <= engines.run(model, attention, graph, overlap=overlap)


def test_a_model_with_windows_and_softcaps_is_served_by_decode_and_prefill_graphs_or_refused_by_name(
    engines: Engines, capped: Oracle, attention: str
) -> None:
    if not engines.refused(capped, attention, {"sliding_window", "softcap"}):
        assert {"full", "breakable"} <= engines.run(capped, attention, "breakable")


def test_a_model_with_windows_and_sinks_is_served_or_refused_by_name(
    engines: Engines, grounded: Oracle, attention: str
) -> None:
    if not engines.refused(grounded, attention, {"sliding_window", "sinks"}):
        assert engines.run(grounded, attention, "off") == {"eager"}


def test_replays_equal_eager_forwards_of_the_same_inputs(engines: Engines, model: Oracle, overlap: bool) -> None:
    preferred = next(iter(engines.package.attention))
    assert {"full", "breakable"} <= engines.run(model, preferred, "breakable", shadow=1, overlap=overlap)
