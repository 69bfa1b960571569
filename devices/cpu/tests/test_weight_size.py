"""The estimated size of weights is their size after loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sglcore.config.engine_config import EngineConfig
from sglcore.runtime.kernels.reference_kernels import QuantizedCodes
from sglcore.runtime.kernels.table import KernelTable
from sglcore_cpu.choice import TORCH
from sglcore_cpu.kernels.quantized_form import QuantizedLayout
from sglcore_cpu.memory import weight_bytes
from tests.checkpoints import llama, qwen3_moe, save
from tests.models.gguf_checkpoints import write
from tests.models.quantized_checkpoints import CASES, FILE, make
from tests.models.steps import load

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}


def keeping() -> KernelTable:
    """Make a kernel table that packs codes into the number of bytes that the native kernels use;
    it can not run a model."""

    def pack(weight: QuantizedCodes) -> Tensor:
        rows, columns = weight.codes.shape
        layout = QuantizedLayout(rows, columns, weight.bits, weight.group, weight.zeros is not None)
        return torch.empty(layout.num_bytes, dtype=torch.uint8)

    return KernelTable().replace(pack_quantized=pack, pack_head=lambda weight: weight)


def taken(path: Path, dtype: str, kernels: KernelTable | None = None) -> int:
    """Load the model and return the bytes of its weights."""
    return sum(weight.nbytes for weight in load(path, DTYPES[dtype], kernels).weights.parameters)


@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("stored", DTYPES)
def test_a_plain_checkpoint_takes_its_elements_in_the_dtype_that_is_computed_in(
    stored: str, asked: str, tmp_path: Path
) -> None:
    save(llama(**WIDE).to(DTYPES[stored]), tmp_path)
    effective = stored if asked == "auto" else asked
    assert weight_bytes(tmp_path, EngineConfig(dtype=asked)) == taken(tmp_path, effective)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_layers_that_no_kernel_serves_are_counted_as_values(name: str, dtype: str, tmp_path: Path) -> None:
    make(CASES[name], tmp_path)
    found = weight_bytes(tmp_path, EngineConfig(dtype=dtype, kernels=TORCH))
    assert found == pytest.approx(taken(tmp_path, dtype), rel=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_layers_whose_codes_are_kept_are_counted_as_they_are_kept(name: str, dtype: str, tmp_path: Path) -> None:
    make(CASES[name], tmp_path)
    found = weight_bytes(tmp_path, EngineConfig(dtype=dtype))
    assert found == pytest.approx(taken(tmp_path, dtype, keeping()), rel=0.1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", None])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_gguf_file_is_counted_by_the_types_of_its_tensors(kind: str | None, is_tied: bool, tmp_path: Path) -> None:
    file = write(llama(**WIDE, tie_word_embeddings=is_tied), tmp_path / "m.gguf", "llama", lambda name: kind)
    dtype = "bfloat16" if kind else "float32"
    assert weight_bytes(file) == pytest.approx(taken(file, dtype, keeping()), rel=0.02)
    plain = weight_bytes(file, EngineConfig(dtype="float32", kernels="reference"))
    assert plain == pytest.approx(taken(file, "float32"), rel=0.02)


def test_experts_are_counted_as_values(tmp_path: Path) -> None:
    model = qwen3_moe(hidden_size=64, intermediate_size=96, head_dim=16, moe_intermediate_size=32)
    file = write(model, tmp_path / "m.gguf", "qwen3moe", lambda name: "Q8_0" if ".experts." in name else None)
    assert weight_bytes(file) == pytest.approx(taken(file, "bfloat16", keeping()), rel=0.02)


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_codes_that_are_made_plain_are_counted_as_values(name: str, tmp_path: Path) -> None:
    make(CASES[name], tmp_path)
    plain, asked = EngineConfig(dtype="bfloat16", kernels="reference"), EngineConfig(dtype="bfloat16", quantize="none")
    assert weight_bytes(tmp_path, asked) == weight_bytes(tmp_path, plain) > weight_bytes(tmp_path)


@pytest.mark.parametrize("name", ["float8-blocks", "gptq"])
def test_quantising_on_load_rounds_what_is_not_kept_as_codes(name: str, tmp_path: Path) -> None:
    make(CASES[name], tmp_path)
    plain, rounded = (weight_bytes(tmp_path, EngineConfig(dtype="bfloat16", quantize=how)) for how in ("auto", "int8"))
    codes = sum(entry.nbytes for entry in load_file(tmp_path / FILE).values() if not entry.is_floating_point())
    assert (codes if name == "gptq" else 0) < rounded < plain
