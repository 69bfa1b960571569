"""The sizes of hashed n-gram tables are those of transformers' class, also with its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from sglcore.checkpoint.model_config import config_of
from sglcore.checkpoint.ngram_config import NgramConfig, ngram_config, stream_config

SMALL: dict[str, Any] = {"ngram_vocab_size_base": 50, "heads_per_ngram": 3, "ngram_size": 4, "ple_embed_dim": 18}
SMALL |= {"make_ngram_vocab_size_divisible_by": 16, "split_ngram_parts": 7}


def configs(**changes: Any) -> tuple[NgramConfig, Any]:
    """Our configuration of a file, and the library's."""
    kinds = ["linear_attention"] * 4
    given: dict[str, Any] = {
        "ple_layer_ids": [4, 2],
        "eos_token_id": [5, 9],
        "num_hidden_layers": 4,
        "layer_types": kinds,
        **changes,
    }
    oracle = transformers.Qwen4ExpTextConfig(**given)
    raw = {**oracle.to_dict(), "architectures": ["Qwen4ExpForCausalLM"]}
    found = ngram_config(config_of(Path("nowhere"), raw))
    assert found is not None
    return found, oracle


@pytest.mark.parametrize("changes", [{}, SMALL], ids=["defaults", "small"])
def test_tables_have_the_librarys_sizes(changes: dict[str, Any]) -> None:
    found, oracle = configs(**changes)
    assert (found.layers, found.stop) == ((1, 3), 5)
    for place, layer in enumerate(found.layers):
        with torch.device("meta"):
            table = Qwen4ExpTextNGramEmbedding(oracle, oracle.ple_embed_dim, layer, place)
        assert list(found.sizes(place)) == table.head_vocab_sizes
        assert (found.rows(place), found.embed_dim // found.columns) == tuple(table.ngram_embedding.weight.shape)
        parts = table.ngram_embedding.weight.chunk(oracle.split_ngram_parts)
        assert found.file_rows(place) == tuple(len(part) for part in parts)


@pytest.mark.parametrize("missing", ["ngram_size", "heads_per_ngram", "ple_conv_kernel_size", "split_ngram_parts"])
def test_a_missing_word_has_the_librarys_default(missing: str) -> None:
    found, oracle = configs()
    raw = {**oracle.to_dict(), "architectures": ["Qwen4ExpForCausalLM"]}
    config = config_of(Path("nowhere"), {name: value for name, value in raw.items() if name != missing})
    assert ngram_config(config) == found
    less = {name: value for name, value in raw.items() if name not in ("hc_count", "hc_lowrank")}
    assert stream_config(config) == stream_config(config_of(Path("nowhere"), less))


def test_a_model_without_tables_has_no_configuration_of_them() -> None:
    oracle = transformers.Qwen4ExpTextConfig()
    raw = {**oracle.to_dict(), "architectures": ["Qwen4ExpForCausalLM"]}
    assert ngram_config(config_of(Path("nowhere"), raw)) is None


def test_a_shorter_dense_context_is_that_of_the_file() -> None:
    index: dict[str, Any] = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256}
    for budget, wanted in ((2048, 2048 + 63), (65536, 32768)):
        oracle = transformers.Qwen4ExpTextConfig(**index, indexer_budget=budget, indexer_compress_ratio=64)
        raw = {**oracle.to_dict(), "architectures": ["Qwen4ExpForCausalLM"]}
        assert config_of(Path("nowhere"), raw).context_length == wanted
