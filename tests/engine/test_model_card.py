"""The description of a model from the files of its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import save_file

from sglcore.device.errors import ConfigError
from sglcore.engine.checkpoint_digest import identity_of
from sglcore.engine.model_card import read_card
from sglcore.engine.start import embedded_model
from tests.models.gguf_checkpoints import write


def folder_of(path: Path, config: dict[str, object], **tensors: np.ndarray) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def test_the_embedded_model_tells_its_size_and_sizes() -> None:
    card = read_card(embedded_model())
    assert (card.format, card.family, card.precision) == ("safetensors", "llama", "BF16")
    assert card.num_bytes == (embedded_model() / "model.safetensors").stat().st_size
    assert card.parameters and card.num_bytes - 20_000 < 2 * card.parameters < card.num_bytes
    assert card.sizes["block_count"] == 6 and card.sizes["attention.head_count_kv"] == 4
    assert card.digest[:12] == identity_of(embedded_model()) and len(card.digest) == 64
    assert card.modified == (embedded_model() / "model.safetensors").stat().st_mtime


def test_most_bytes_name_the_type_and_packed_weights_are_not_counted(tmp_path: Path) -> None:
    tensors = {"a": np.zeros((8, 8), np.float32), "b": np.zeros((100, 2), np.float16)}
    plain = read_card(folder_of(tmp_path, {"text_config": {"hidden_size": 7}, "model_type": "two"}, **tensors))
    assert (plain.precision, plain.parameters, plain.family) == ("F16", 264, "two")
    assert plain.sizes == {"embedding_length": 7}
    packed = {**tensors, "c": np.zeros((4, 4), np.int32)}
    card = read_card(folder_of(tmp_path, {"quantization_config": {"quant_method": "gptq"}}, **packed))
    assert (card.precision, card.parameters, card.family, card.sizes) == ("gptq", None, "", {})
    assert card.digest != plain.digest


def test_a_gguf_file_tells_the_same_of_the_same_model(tmp_path: Path) -> None:
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, num_key_value_heads=1, **sizes))
    card = read_card(write(model, tmp_path / "m.gguf", "llama", lambda name: "F16"))
    assert (card.format, card.family, card.precision) == ("gguf", "llama", "F16")
    assert card.parameters == sum(each.numel() for each in model.parameters())
    assert (card.sizes["embedding_length"], card.sizes["block_count"]) == (32, 2)
    assert card.num_bytes == (tmp_path / "m.gguf").stat().st_size


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_card(tmp_path)
