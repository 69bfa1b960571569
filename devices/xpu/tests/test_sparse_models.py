"""DeepSeek-V3.2 and V4 give transformers' numbers. No library of the vendor serves them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore_xpu import package
from tests.checkpoints import Oracle
from tests.laws.attention.sparse_models import *  # noqa: F403
from tests.laws.attention.sparse_models import hold

pytestmark = pytest.mark.needs("simulator")


def test_the_numbers_are_transformers(monkeypatch: pytest.MonkeyPatch, sparse_model: tuple[Oracle, Path]) -> None:
    hold(sparse_model, package.name, monkeypatch)
