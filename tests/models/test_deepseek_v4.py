"""DeepSeek-V4's checkpoints as they are read, and its layer that predicts one token more, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglcore.checkpoint.config import read_config
from sglcore.models.deepseek_v4 import NEXT_TOKEN, next_token_config
from sglcore.models.loader import load_model
from sglcore.runtime.kernels.table import KernelTable
from tests.deepseek_v4 import deepseek_v4, with_float8, with_published_names
from tests.models.steps import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_published_names(deepseek_v4(), tmp_path_factory.mktemp("published"))


def load_next_token(folder: Path, **options: Any) -> Any:
    """The layer that predicts one token more."""
    config = next_token_config(read_config(folder))
    given = {"architectures": NEXT_TOKEN, "kernels": KernelTable(), "device": "cpu", "dtype": torch.float32, **options}
    return load_model(folder, config, **given)


@pytest.mark.parametrize("read", [load, load_next_token], ids=["model", "next-token"])
def test_floats_of_8_bits_are_the_values_that_they_stand_for(folder: Path, read: Any) -> None:
    coded, values = (read(each) for each in with_float8(folder))
    found = zip(coded.weights.parameters, values.weights.parameters, strict=True)
    assert all(torch.equal(left, right) for left, right in found)


def test_what_is_kept_in_float32_is_so_in_a_model_of_bfloat16(folder: Path) -> None:
    model = load(folder, dtype=torch.bfloat16)
    layer = model.layers[2]
    kept = [*layer.attn_hc.weights, *model.hc_head.weights, layer.input_layernorm.weight, model.norm.weight]
    assert {each.dtype for each in kept} == {torch.float32}
    assert layer.mlp.experts.w13.dtype is torch.bfloat16
