"""The description of a model from the files of its checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import save_file

from sglcore.core.errors import ConfigError
from sglcore.engine.checkpoint_digest import BLOCK_BYTES, SAMPLED_BLOCKS, digest_of, identity_of
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


@pytest.mark.parametrize("quantization", [None, {}, {"quant_method": None}, {"bits": 4}])
def test_a_quantization_without_a_method_is_told_by_the_type_of_the_weights(
    quantization: dict[str, object] | None, tmp_path: Path
) -> None:
    config: dict[str, object] = {"quantization_config": quantization, "text_config": None, "hidden_size": 7}
    card = read_card(folder_of(tmp_path, config, a=np.zeros((2, 4), np.int8), b=np.zeros(1, np.float32)))
    assert (card.precision, card.family, card.sizes) == ("I8", "", {"embedding_length": 7})


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


def test_the_newest_of_the_files_of_weights_dates_a_model(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    for place, name in enumerate("ab"):
        save_file({name: np.zeros(4, np.float32)}, tmp_path / f"{name}.safetensors")
        os.utime(tmp_path / f"{name}.safetensors", (0, 1000 + 500 * place))
    card = read_card(tmp_path)
    assert (card.modified, card.parameters) == (1500, 8)
    assert card.num_bytes == sum((tmp_path / f"{name}.safetensors").stat().st_size for name in "ab")


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "gguf"])
def test_a_digest_is_that_of_the_configuration_and_the_weights_and_of_nothing_else(suffix: str, tmp_path: Path) -> None:
    folder, weights = tmp_path / "one", bytearray(3 * SAMPLED_BLOCKS * BLOCK_BYTES + 7)

    def digest() -> str:
        (folder / f"model.{suffix}").write_bytes(weights)
        return digest_of(folder)

    folder.mkdir()
    (folder / "config.json").write_text("{}")
    found = [digest()]
    for place in (0, BLOCK_BYTES - 1, -BLOCK_BYTES, -1):
        weights[place] ^= 1
        found.append(digest())
    weights.append(0)
    found.append(digest())
    (folder / "config.json").write_text("[]")
    found.append(digest())
    assert len(set(found)) == len(found), "each change gives another digest"
    (folder / "README.md").write_text("more")
    assert digest_of(folder.rename(tmp_path / "two")) == found[-1]


@pytest.mark.parametrize("suffix", ["safetensors", "gguf"])
def test_a_digest_samples_blocks_from_one_end_to_the_other_and_the_size(suffix: str, tmp_path: Path) -> None:
    """A GGUF file by itself has a digest of its own too."""
    file = tmp_path / f"model.{suffix}"
    size = 5 * SAMPLED_BLOCKS * BLOCK_BYTES

    def digest(weights: bytes | bytearray) -> str:
        file.write_bytes(weights)
        return digest_of(file if suffix == "gguf" else tmp_path)

    plain = digest(bytes(size))
    for place in range(SAMPLED_BLOCKS):
        weights = bytearray(size)
        weights[(size - BLOCK_BYTES) * place // (SAMPLED_BLOCKS - 1)] = 1
        assert digest(weights) != plain, place
    assert len({digest(bytes(count)) for count in (0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, size - 1, size)}) == 6
    assert digest(bytes(size)) == plain


def test_a_digest_does_not_depend_on_the_order_in_which_a_folder_lists_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "one.safetensors", "two.safetensors"):
        (tmp_path / name).write_text(name)
    (tmp_path / "three.safetensors").mkdir()
    files = list(tmp_path.iterdir())
    found = set[str]()
    for order in (files, files[::-1]):
        monkeypatch.setattr(Path, "iterdir", lambda folder, order=order: iter(order))
        found.add(digest_of(tmp_path))
    assert len(found) == 1


SIZES = {
    "block_count": ("num_hidden_layers", 2),
    "embedding_length": ("hidden_size", 32),
    "feed_forward_length": ("intermediate_size", 64),
    "attention.head_count": ("num_attention_heads", 4),
    "attention.head_count_kv": ("num_key_value_heads", 1),
    "vocab_size": ("vocab_size", 96),
}
"""Sizes of a card, with their names in a configuration of transformers."""


def test_each_size_is_that_of_the_configuration_and_of_the_gguf_file(tmp_path: Path) -> None:
    given: Any = dict(SIZES.values())
    config = transformers.LlamaConfig(**given)
    model = transformers.LlamaForCausalLM(config)
    wanted = {name: getattr(config, theirs) for name, (theirs, _) in SIZES.items()}
    file = tmp_path / "m.gguf"
    card = read_card(write(model, file, "llama", lambda name: "Q8_0" if "mlp" in name else "F16"))
    assert card.sizes == wanted
    assert (card.modified, card.digest) == (file.stat().st_mtime, digest_of(file))
    assert read_card(folder_of(tmp_path, given, a=np.zeros(4, np.float32))).sizes == wanted
    inner: dict[str, object] = {"text_config": given, "hidden_size": 7, "model_type": None, "num_hidden_layers": "many"}
    card = read_card(folder_of(tmp_path, inner, a=np.zeros(4, np.float32)))
    assert card.sizes == wanted and card.family == "", "the text model's sizes, not those around it"


def test_the_type_of_a_gguf_file_is_that_of_most_bytes_and_not_of_most_tensors(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    file = write(transformers.LlamaForCausalLM(config), tmp_path / "m.gguf", "llama", lambda name: embedding(name))
    assert read_card(file).precision == "F16"


def embedding(name: str) -> str:
    """The type of a matrix: the two of the vocabulary are larger than all others together."""
    return "F16" if "embed" in name or "lm_head" in name else "Q8_0"
