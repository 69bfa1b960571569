"""Whole engines on the device: every attention backend, eager and by every graph kind, is transformers within half precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglcore.engine.llm import LLM
from sglcore.sampling.params import SamplingParams
from sglcore_musa import package
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
    return half.check(folder, oracle, package.name, attention, graph, **settings)


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
def test_a_model_with_windows_is_served_by_all(windowed: tuple[Any, Path], attention: str) -> None:
    assert any(path.startswith("full:") for path in run(windowed, attention, "full"))


def test_replays_equal_eager_forwards_of_the_same_inputs(model: tuple[Any, Path]) -> None:
    paths = run(model, "flash_attention", "breakable", shadow=1)
    assert {"full", "breakable"} <= {path.partition(":")[0] for path in paths}


def test_the_embedded_model_speaks() -> None:
    # Small graphs: every capture runs its kernels in Triton's interpreter.
    with LLM(device=package.name, max_requests=2, max_batch_tokens=16, graph_buckets=(1,)) as engine:
        rows = {row.topic: row for row in engine.ledger.rows}
        (output,) = engine.generate(["Once upon a time"], SamplingParams(max_tokens=4, temperature=0.0))
    assert rows["attention"].effective in package.attention and rows["extension"].effective.startswith("torch_musa")
    assert output.outputs[0].text
