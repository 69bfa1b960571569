"""Quantised checkpoints with transformers' classes: the dequantised weights get the class's
parameter names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglcore.core.errors import CheckpointError, ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore.models.implementation import TRANSFORMERS
from sglcore.models.transformers_backend.transformers_config import transformers_config
from sglcore.models.weights.model_loader import load_model
from sglcore.runtime.kernels.table import KernelTable
from tests.checkpoints import oracle_logprobs
from tests.models.quantized_checkpoints import CASES, FILE, Packs, Random, configure, make
from tests.models.steps import Steps
from tests.models.transformers_cases import sizes_of, tiny_model

IDS = [5, 90, 3, 41, 41, 8, 77, 12, 60, 2]


def by_class(folder: Path, kernels: KernelTable | None = None, ledger: DecisionLedger | None = None) -> Any:
    config = transformers_config(folder)
    found = {config.architecture: TRANSFORMERS}
    return load_model(
        folder,
        config,
        kernels=kernels or KernelTable(),
        device="cpu",
        dtype=torch.float32,
        architectures=found,
        ledger=ledger,
    )


@pytest.mark.parametrize(
    "name", ["gptq", "awq", "packed-groups-zeros", "integers-rows", "float8-tensor", "float8-blocks"]
)
def test_linear_layers_are_those_that_the_files_mean(name: str, tmp_path: Path) -> None:
    oracle, ledger = make(CASES[name], tmp_path), DecisionLedger()
    found = Steps(by_class(tmp_path, ledger=ledger)).logprobs({1: IDS})
    assert float((found - oracle_logprobs(oracle, IDS)).abs().max()) < 1e-4
    (row,) = (row for row in ledger.rows if row.topic == "weights")
    assert row.effective == "dequantised to float32"


def test_names_without_the_prefix_are_known_as_those_of_weights_are(tmp_path: Path) -> None:
    oracle = make(CASES["gptq"], tmp_path)
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(tmp_path / FILE).items()}
    save_file(tensors, tmp_path / FILE)
    found = Steps(by_class(tmp_path)).logprobs({1: IDS})
    assert float((found - oracle_logprobs(oracle, IDS)).abs().max()) < 1e-4


def test_a_device_with_quantised_kernels_gets_the_codes(tmp_path: Path) -> None:
    oracle, device = make(CASES["awq"], tmp_path), Packs()
    found = Steps(by_class(tmp_path, device.table)).logprobs({1: IDS})
    assert float((found - oracle_logprobs(oracle, IDS)).abs().max()) < 1e-4
    assert len(device.packed) == 8 and {weight.bits for weight in device.packed} == {4}


@pytest.mark.parametrize(("kind", "case"), [("olmoe", "awq"), ("mixtral", "gptq"), ("glm4_moe", "float8-blocks")])
def test_experts_one_by_one_are_parts_of_the_stacked_weight(kind: str, case: str, tmp_path: Path) -> None:
    """For mixtral, the class renames the tensors of the files."""
    sizes = {**sizes_of(kind), "intermediate_size": 64, "moe_intermediate_size": 64}
    model, draw = tiny_model(kind, sizes), Random(np.random.default_rng(3))
    plain, small = tmp_path / "plain", tmp_path / "small"
    for folder in (plain, small):
        model.save_pretrained(folder)
    tensors = load_file(plain / FILE)
    chosen = [name for name in tensors if name.endswith(".weight") and (".experts." in name or "q_proj" in name)]
    assert sum(".experts." in name for name in chosen) > 4 and any("q_proj" in name for name in chosen)
    dense, stored = dict(tensors), dict(tensors)
    for name in chosen:
        rows, columns = tensors[name].shape
        parts, dense[name] = CASES[case].make(rows, columns, draw)
        del stored[name]
        stored |= {f"{name.removesuffix('weight')}{suffix}": tensor for suffix, tensor in parts.items()}
    save_file(dense, plain / FILE)
    save_file(stored, small / FILE)
    configure(small, quantization_config=dict(CASES[case].config))
    found, wanted = (Steps(by_class(folder)).logprobs({1: IDS}) for folder in (small, plain))
    assert not torch.equal(wanted, Steps(by_class(_saved(model, tmp_path))).logprobs({1: IDS}))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_another_quantisation_is_named(tmp_path: Path) -> None:
    make(CASES["awq"], tmp_path)
    configure(tmp_path, quantization_config={"quant_method": "aqlm"})
    with pytest.raises(CheckpointError, match="quantised by 'aqlm'"):
        transformers_config(tmp_path)


def test_experts_in_mxfp4_are_read_by_a_file_alone(tmp_path: Path) -> None:
    model = tiny_model("gpt_oss", sizes_of("gpt_oss"))
    model.save_pretrained(tmp_path)
    configure(tmp_path, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ConfigError, match="experts in mxfp4, which are read only for models that sglcore implements"):
        transformers_config(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]


def _saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder / "own")
    return folder / "own"
