"""DeepSeek-V3.2 and V4 give transformers' numbers with the vendor's operators and without each of
them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglcore_npu import package
from sglcore_npu.kernels import OPERATORS
from sglcore_npu.sparse import OPERATORS as SPARSE
from tests.checkpoints import Oracle
from tests.laws.attention.sparse_models import *  # noqa: F403
from tests.laws.attention.sparse_models import hold
from tests.laws.vendor_libraries import Failing

pytestmark = pytest.mark.needs("simulator")


def test_with_the_operators_the_numbers_are_transformers(
    monkeypatch: pytest.MonkeyPatch, sparse_model: tuple[Oracle, Path]
) -> None:
    assert "first call failed" not in hold(sparse_model, package.name, monkeypatch)


@pytest.mark.parametrize(
    "missing",
    [*((each,) for each in SPARSE), tuple(OPERATORS)],
    ids=lambda names: names[0] if len(names) == 1 else "all",
)
def test_without_an_operator_the_numbers_are_the_same(
    monkeypatch: pytest.MonkeyPatch, sparse_model: tuple[Oracle, Path], missing: tuple[str, ...]
) -> None:
    for name in missing:
        monkeypatch.setattr(torch.ops.npu, name, Failing())
    told = hold(sparse_model, package.name, monkeypatch)
    # No operator serves DeepSeek-V4: its entries have another form, its norms another dtype.
    is_served = sparse_model[0].config.model_type != "deepseek_v4"
    assert is_served == ("its first call failed: RuntimeError" in told)
