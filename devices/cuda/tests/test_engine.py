"""Whole engines on the device: every attention backend, eager and by every graph kind, is transformers within half precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglcore.device.errors import ConfigError
from sglcore_cuda import package
from tests.laws import half

NAMES = [name for name in package.attention if name != "reference"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    yield half.checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    yield half.checkpoint(tmp_path_factory.mktemp("windowed"), 7)


def run(model: tuple[Any, Path], attention: str, graph: str, **settings: Any) -> set[str]:
    oracle, folder = model
    try:
        return half.check(folder, oracle, package.name, attention, graph, **settings)
    except ConfigError as error:
        if "pip install" in str(error) or "build it from" in str(error):
            pytest.skip(f"needs the library of {attention}")
        raise


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("attention", NAMES)
def test_eager(model: tuple[Any, Path], attention: str, overlap: bool) -> None:
    assert run(model, attention, "off", overlap=overlap) == {"eager"}


@pytest.mark.parametrize("graph", list(package.graphs))
@pytest.mark.parametrize("attention", NAMES)
def test_graphs(model: tuple[Any, Path], attention: str, graph: str) -> None:
    kinds = {path.partition(":")[0] for path in run(model, attention, graph)}
    assert {"full", graph} <= kinds


@pytest.mark.parametrize("attention", NAMES)
def test_a_model_with_windows_is_served_by_decode_and_prefill_graphs(
    windowed: tuple[Any, Path], attention: str
) -> None:
    kinds = {path.partition(":")[0] for path in run(windowed, attention, "breakable")}
    assert {"full", "breakable"} <= kinds
