"""DeepSeek-V3.2 and V4 give transformers' numbers with the vendor's libraries and without each of
them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore_hip import package
from tests.checkpoints import Oracle
from tests.laws.attention.sparse_models import *  # noqa: F403
from tests.laws.attention.sparse_models import Library, hold, hold_without

pytestmark = pytest.mark.needs("simulator")

LIBRARIES = (Library("aiter", ("sglcore_hip.sparse_aiter", "sglcore_hip.attention_aiter"), "sglcore_hip.sparse_aiter"),)


def test_with_the_libraries_the_numbers_are_transformers(
    monkeypatch: pytest.MonkeyPatch, sparse_model: tuple[Oracle, Path]
) -> None:
    told = hold(sparse_model, package.name, monkeypatch)
    (library,) = LIBRARIES
    # It takes lists with sinks, which DeepSeek-V3.2 does not have.
    is_served = sparse_model[0].config.model_type == "deepseek_v4"
    assert is_served == (f": aiter: {library.origin}: first candidate" in told)


@pytest.mark.parametrize("missing", [LIBRARIES], ids=lambda m: "-".join(e.module for e in m))
def test_without_a_library_the_numbers_are_the_same(
    monkeypatch: pytest.MonkeyPatch, sparse_model: tuple[Oracle, Path], missing: tuple[Library, ...]
) -> None:
    hold_without(missing, sparse_model, package.name, monkeypatch)
