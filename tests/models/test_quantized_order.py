"""The group order of a quantised layer's columns: ignored if all are -1, an error if some are -1 or
a number is invalid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglcore.core.errors import CheckpointError
from tests.models.quantized_checkpoints import CASES, FILE, make
from tests.models.test_quantized_checkpoints import TOLERANCE, difference, load

ORDERS = {"gptq": ("qweight", "g_idx"), "packed-groups": ("weight_packed", "weight_g_idx")}
"""{layout: (a tensor that every layer has, the tensor of its group order)}"""


def with_order(name: str, folder: Path, order: Callable[[int], Tensor]) -> None:
    """Give each layer the group order that `order(columns)` returns, for groups of 32."""
    known, wanted = ORDERS[name]
    tensors = load_file(folder / FILE)
    for each in [key for key in tensors if key.endswith(f".{known}")]:
        words = tensors[each].shape[0 if name == "gptq" else 1]
        tensors[each.removesuffix(known) + wanted] = order(words * 8)
    save_file(tensors, folder / FILE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", list(ORDERS))
def test_an_order_that_is_not_said_is_that_of_the_columns(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    oracle = make(CASES[name], tmp_path)
    with_order(name, tmp_path, lambda columns: torch.full((columns,), -1, dtype=dtype))
    assert difference(load(tmp_path), oracle) < TOLERANCE


@pytest.mark.parametrize("name", list(ORDERS))
@pytest.mark.parametrize("wrong", [-1, -2, 2])
def test_one_column_without_a_group_that_there_is_is_an_error(name: str, wrong: int, tmp_path: Path) -> None:
    def order(columns: int) -> Tensor:
        found = (torch.arange(columns) // 32).int()
        found[0] = wrong if wrong < 0 else columns // 32
        return found

    make(CASES[name], tmp_path)
    with_order(name, tmp_path, order)
    with pytest.raises(CheckpointError, match=f"{ORDERS[name][1]}' names groups "):
        load(tmp_path)


@pytest.mark.parametrize("name", list(ORDERS))
def test_all_columns_of_another_number_below_zero_are_an_error(name: str, tmp_path: Path) -> None:
    make(CASES[name], tmp_path)
    with_order(name, tmp_path, lambda columns: torch.full((columns,), -2, dtype=torch.int32))
    with pytest.raises(CheckpointError, match="names groups -2 to -2; wanted 0 to"):
        load(tmp_path)
