"""DeepSeek-V3.2 and V4 give transformers' numbers with the vendor's libraries and without each of
them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore_cuda import package
from tests.checkpoints import Oracle
from tests.laws.attention.sparse_models import *  # noqa: F403
from tests.laws.attention.sparse_models import Library, hold, hold_without

pytestmark = pytest.mark.needs("simulator")

LIBRARIES = (
    Library("flash_mla", ("sglcore_cuda.sparse_flashmla",), "sglcore_cuda.sparse_flashmla"),
    Library(
        "flashinfer",
        ("sglcore_cuda.sparse_flashinfer", "sglcore_cuda.attention_flashinfer"),
        "sglcore_cuda.sparse_flashinfer",
    ),
)


def test_with_the_libraries_the_numbers_are_transformers(
    monkeypatch: pytest.MonkeyPatch, sparse_model: tuple[Oracle, Path]
) -> None:
    told = hold(sparse_model, package.name, monkeypatch)
    assert any(f": {library.module}: {library.origin}: first candidate" in told for library in LIBRARIES)


@pytest.mark.parametrize(
    "missing", [*((each,) for each in LIBRARIES), LIBRARIES], ids=lambda m: "-".join(e.module for e in m)
)
def test_without_a_library_the_numbers_are_the_same(
    monkeypatch: pytest.MonkeyPatch, sparse_model: tuple[Oracle, Path], missing: tuple[Library, ...]
) -> None:
    hold_without(missing, sparse_model, package.name, monkeypatch)
