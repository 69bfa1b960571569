"""An AITER that lacks a name or fails is a refused candidate, and the start goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglcore.runtime.kernels.kernel_choice import Refusals, choose
from sglcore.runtime.kernels.table import KernelTable
from sglcore_hip import package
from sglcore_hip.capability import read_capability
from sglcore_hip.kernels import with_libraries
from tests.laws.vendor_libraries import *  # noqa: F403
from tests.laws.vendor_libraries import Library, attention_of, break_name, cases, spoken

pytestmark = pytest.mark.needs("simulator")

AITER = Library("aiter", ("sglcore_hip.attention_aiter",))
LISTED = Library("aiter.ops.triton.attention.pa_decode_sparse", ("sglcore_hip.sparse_aiter",))
CALL = (
    torch.empty(1, 8, 512, dtype=torch.bfloat16, device="meta"),
    torch.empty(9, 512, dtype=torch.bfloat16, device="meta"),
    torch.empty(1, 640, dtype=torch.int32, device="meta"),
    None,
    None,
    torch.empty(8, device="meta"),
    0.1,
    512,
    None,
)


def test_aiter_is_used_where_it_works(model: Path) -> None:
    tokens, told = spoken(model, package.name)
    assert len(tokens) == 4 and attention_of(told) == "aiter"


@pytest.mark.parametrize(("library", "name", "how"), cases([AITER]))
def test_a_start_goes_on_without_any_name_of_the_library(
    monkeypatch: pytest.MonkeyPatch, library: Library, name: str, how: str, model: Path
) -> None:
    break_name(monkeypatch, library, name, how)
    tokens, told = spoken(model, package.name)
    assert len(tokens) == 4
    assert attention_of(told) != "aiter" and "aiter refused: " in told


def chosen() -> tuple[Any, str]:
    """Return the function that is chosen for a call of `sparse_mqa`, and what was said."""
    table, refusals = with_libraries(KernelTable(), read_capability()), Refusals()
    found = choose(table, KernelTable.sparse_mqa, CALL, refusals)
    return found, "\n".join((*table.refused, *(row.reason for row in refusals.rows() if row.downgrade)))


def test_attention_over_lists_is_used_where_it_works() -> None:
    found, said = chosen()
    assert found is not KernelTable.sparse_mqa.reference and not said


@pytest.mark.parametrize(("library", "name", "how"), cases([LISTED]))
def test_attention_over_lists_goes_to_the_next_candidate_without_any_name_of_the_library(
    monkeypatch: pytest.MonkeyPatch, library: Library, name: str, how: str
) -> None:
    break_name(monkeypatch, library, name, how)
    found, said = chosen()
    assert found is KernelTable.sparse_mqa.reference and said
