"""Tests two ranks on checkpoints that mlx_lm has quantised: packed weights, stacked experts and
embeddings are cut at whole groups, and give the log-probabilities of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from devices.mlx.tests import test_quantised_by_mlx_lm as by_mlx_lm
from devices.mlx.tests.parity import check_same
from devices.mlx.tests.test_ranks import ATOL, texts
from sglcore.core.errors import ConfigError

pytestmark = pytest.mark.needs("torch")

WIDE: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "llama-tied": {"intermediate_size": 128},
        "qwen3-moe": {"intermediate_size": 128, "moe_intermediate_size": 64},
        "deepseek-v3": {"intermediate_size": 128, "moe_intermediate_size": 64},
    }
)
"""Sizes by the name of a model; their halves have whole groups of 32."""


def converted(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, sizes: Mapping[str, int]) -> Path:
    """Convert a transformers model of these sizes with mlx_lm to 4 bits, and return the folder."""
    from tests import checkpoints, latent

    made = {
        "llama-tied": lambda: checkpoints.llama(hidden_size=64, tie_word_embeddings=True, attention_bias=True, **sizes),
        "qwen3-moe": lambda: checkpoints.qwen3_moe(hidden_size=64, head_dim=32, num_experts=6, **sizes),
        "deepseek-v3": lambda: latent.deepseek_v3(**{**by_mlx_lm.LATENT, **sizes}),
    }
    monkeypatch.setattr(by_mlx_lm, "oracle", lambda name: made[name]())
    by_mlx_lm.converted(name, folder, group_size=32, bits=4)
    return folder / "made"


@pytest.mark.parametrize("name", list(WIDE))
def test_two_ranks_on_packed_weights_give_what_one_does(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = converted(name, tmp_path, monkeypatch, WIDE[name])
    check_same(texts(folder, tp=2), texts(folder), ATOL)


def test_a_part_that_would_split_a_group_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = converted("llama-tied", tmp_path, monkeypatch, {"intermediate_size": 96})
    with pytest.raises(ConfigError, match="inside a group of packed elements"):
        texts(folder, tp=2)
