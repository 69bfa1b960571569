"""Weights that do not fit are refused before they are read; the error gives the available memory
and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore_cpu.bring_up import room
from sglcore_cpu.memory import weight_bytes


def sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def test_the_weights_of_a_folder_are_the_files_that_are_loaded(tmp_path: Path) -> None:
    sparse(tmp_path / "model.safetensors", 300)
    sparse(tmp_path / "other.safetensors", 200)
    sparse(tmp_path / "tokenizer.json", 999)
    assert weight_bytes(tmp_path) == 300
    (tmp_path / "config.json").write_text("[]")
    assert weight_bytes(tmp_path) == 300
    assert weight_bytes(tmp_path / "other.safetensors") == 200
    (tmp_path / "model.safetensors").unlink()
    assert weight_bytes(tmp_path) == 0


def test_weights_are_counted_in_the_dtype_and_the_bits_that_are_asked_for(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(64, 32, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    assert room(EngineConfig(), tmp_path) == 64 * 32 * 2
    assert room(EngineConfig(dtype="float32"), tmp_path) == 64 * 32 * 4
    in_bits = {bits: room(EngineConfig(quantize=bits), tmp_path) for bits in ("int8", "int4")}
    assert in_bits["int4"] < in_bits["int8"] < 64 * 32 * 2


def test_weights_larger_than_the_memory_are_refused_in_one_line(tmp_path: Path) -> None:
    sparse(tmp_path / "model.safetensors", 1 << 43)
    with pytest.raises(ConfigError, match=r"the weights need about 8192.0 GiB, but this process has .*--quantize int4"):
        room(EngineConfig(), tmp_path)


def test_weights_that_fit_are_counted(tmp_path: Path) -> None:
    sparse(tmp_path / "model.safetensors", 1 << 20)
    assert room(EngineConfig(), tmp_path) == 1 << 20
