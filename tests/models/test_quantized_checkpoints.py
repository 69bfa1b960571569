"""Quantised checkpoints of every layout against transformers with the dequantised weights; and
damaged checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglcore.core.errors import CheckpointError
from sglcore.core.ledger import DecisionLedger
from sglcore.runtime.kernels.reference_kernels import QuantizedCodes
from tests.checkpoints import llama, oracle_logprobs, save
from tests.models.quantized_checkpoints import CASES, FILE, Packs, Random, configure, integers, make
from tests.models.steps import Steps, load

TOLERANCE = 1e-4
IDS = [5, 90, 3, 41, 41, 8, 77, 12, 60, 2]
LAYERS = 8
"""Linear layers of a model in this file; fused ones count once."""


def difference(model: Any, oracle: Any) -> float:
    """The largest difference of log-probabilities."""
    return float((Steps(model).logprobs({1: IDS}) - oracle_logprobs(oracle, IDS)).abs().max())


@pytest.mark.parametrize("name", CASES)
def test_a_device_without_quantised_kernels_runs_the_dequantised_weights_and_says_so(name: str, tmp_path: Path) -> None:
    oracle, ledger = make(CASES[name], tmp_path), DecisionLedger()
    model = load(tmp_path, ledger=ledger)
    assert difference(model, oracle) < TOLERANCE
    (row,) = ledger.rows
    assert (row.topic, row.effective, row.downgrade) == ("weights", "dequantised to float32", False)
    assert f"{LAYERS} of {LAYERS} linear layers dequantised" in row.reason and row.remedy


@pytest.mark.parametrize("name", CASES)
def test_a_device_with_quantised_kernels_gets_the_codes_of_each_layer(name: str, tmp_path: Path) -> None:
    case, device, ledger = CASES[name], Packs(), DecisionLedger()
    oracle = make(case, tmp_path)
    assert difference(load(tmp_path, kernels=device.table, ledger=ledger), oracle) < TOLERANCE
    (row,) = ledger.rows
    if case.form is None:
        assert not device.packed and "dequantised, being" in row.reason
        return
    bits, group = case.form
    assert len(device.packed) == LAYERS and {weight.bits for weight in device.packed} == {bits}
    assert {weight.group for weight in device.packed} <= {group, 128}
    assert all(weight.codes.dtype == torch.uint8 and weight.codes.is_contiguous() for weight in device.packed)
    assert all(weight.scales.shape[1] == weight.codes.shape[1] // weight.group for weight in device.packed)
    assert all((weight.zeros is None) == name.endswith(("even-zeros", "groups", "packed-rows", "integers-rows", "tensor"))
               for weight in device.packed)  # fmt: skip
    assert f"of {LAYERS} linear layers {bits}-bit groups of" in row.reason and "output layer plain" in row.reason


@pytest.mark.parametrize("name", ["gptq", "packed-groups", "float8-blocks"])
def test_a_wrong_weight_would_be_noticed(name: str, tmp_path: Path) -> None:
    oracle = make(CASES[name], tmp_path)
    with torch.no_grad():
        weight = oracle.model.layers[1].mlp.down_proj.weight
        weight[3] = weight[3].roll(1)
    assert difference(load(tmp_path), oracle) > 10 * TOLERANCE


def test_a_fused_layer_with_a_plain_part_is_dequantised(tmp_path: Path) -> None:
    device, ledger = Packs(), DecisionLedger()
    oracle = make(CASES["gptq"], tmp_path, keep=("lm_head", "v_proj"))
    assert difference(load(tmp_path, kernels=device.table, ledger=ledger), oracle) < TOLERANCE
    assert len(device.packed) == LAYERS - 2
    assert "2 weights dequantised, being joined with a layer that is not quantised" in ledger.rows[0].reason


def test_parts_of_different_bits_and_groups_are_joined_without_rounding(tmp_path: Path) -> None:
    oracle = make(CASES["packed-groups"], tmp_path, keep=("lm_head", "v_proj"))
    tensors, draw = load_file(tmp_path / FILE), Random(np.random.default_rng(3))
    for index, layer in enumerate(oracle.model.layers):
        name = f"model.layers.{index}.self_attn.v_proj"
        del tensors[f"{name}.weight"]
        stored, weight = integers(32, 64, draw, group=None, even=True)
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in stored.items()}
        layer.self_attn.v_proj.weight = torch.nn.Parameter(weight)
    save_file(tensors, tmp_path / FILE)
    own = {"targets": ["re:.*v_proj"], "format": "int-quantized"}
    own["weights"] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    config = dict(CASES["packed-groups"].config)
    config["config_groups"] = {**config["config_groups"], "group_1": own}
    configure(tmp_path, quantization_config=config)
    device = Packs()
    assert difference(load(tmp_path, kernels=device.table), oracle) < TOLERANCE
    assert sorted((weight.bits, weight.group) for weight in device.packed) == [(4, 32)] * 6 + [(8, 32)] * 2


def test_a_quantised_output_layer_is_packed_too(tmp_path: Path) -> None:
    device = Packs()
    oracle = make(CASES["packed-groups"], tmp_path, keep=())
    assert difference(load(tmp_path, kernels=device.table), oracle) < TOLERANCE
    assert len(device.packed) == LAYERS + 1 and device.packed[-1].codes.shape == (97, 64)


def test_rows_that_no_group_divides_get_a_last_group_that_is_cut(tmp_path: Path) -> None:
    device = Packs()
    oracle = make(CASES["packed-rows"], tmp_path, hidden_size=48, intermediate_size=72)
    assert difference(load(tmp_path, kernels=device.table), oracle) < TOLERANCE
    assert {tuple(weight.scales.shape[1:]) for weight in device.packed} == {(2,), (3,)}


def test_quantised_weights_are_never_all_dequantised_at_once(tmp_path: Path) -> None:
    """When weights are packed, no parameter declared for a linear layer is ever written."""
    make(CASES["packed-groups"], tmp_path)
    written: list[tuple[int, ...]] = []
    original = torch.Tensor.copy_

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is original:
                written.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    device = Packs(pack_linear=lambda weight: pytest.fail("a layer was dequantised"))
    with Spy():
        load(tmp_path, kernels=device.table.replace(pack_head=lambda weight: weight), dtype=torch.bfloat16)
    assert len(device.packed) == LAYERS
    assert sum(map(math.prod, written)) == 2 * 97 * 64 + 5 * 64, "embedding, output layer and norms alone are written"


def test_zero_biases_that_gptq_tools_write_are_left_and_others_are_errors(tmp_path: Path) -> None:
    oracle = make(CASES["gptq"], tmp_path)
    tensors, bias = load_file(tmp_path / FILE), "model.layers.0.self_attn.q_proj.bias"
    save_file({**tensors, bias: torch.zeros(64)}, tmp_path / FILE)
    assert difference(load(tmp_path), oracle) < TOLERANCE
    save_file({**tensors, bias: torch.ones(64)}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=f"has '{bias}', which this architecture does not use"):
        load(tmp_path)


def test_zero_biases_of_other_tools_are_errors(tmp_path: Path) -> None:
    make(CASES["packed-groups"], tmp_path)
    bias = "model.layers.0.self_attn.q_proj.bias"
    save_file({**load_file(tmp_path / FILE), bias: torch.zeros(64)}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=f"has '{bias}', which this architecture does not use"):
        load(tmp_path)


def test_scales_of_activations_are_left_in_a_quantised_checkpoint_alone(tmp_path: Path) -> None:
    names = [f"model.layers.0.self_attn.{each}_scale" for each in ("k", "v", "q", "kv", "output")]
    make(CASES["packed-groups"], tmp_path / "quantised")
    save(llama(), tmp_path / "plain")
    for folder in (tmp_path / "quantised", tmp_path / "plain"):
        save_file({**load_file(folder / FILE), **{name: torch.ones(1) for name in names}}, folder / FILE)
    load(tmp_path / "quantised")
    with pytest.raises(CheckpointError, match="'model.layers.0.self_attn.kv_scale'.*does not use"):
        load(tmp_path / "plain")


PROJECTION = "model.layers.1.self_attn.o_proj."
"""A linear layer that is not fused."""


def drop(suffix: str) -> Callable[[dict[str, Tensor]], object]:
    """A change that removes a tensor."""
    return lambda tensors: tensors.pop(PROJECTION + suffix)


def put(suffix: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    """A change that sets a tensor."""
    return lambda tensors: tensors.update({PROJECTION + suffix: tensor})


def retype(suffix: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], object]:
    """A change that casts a tensor."""
    return lambda tensors: tensors.update({PROJECTION + suffix: tensors[PROJECTION + suffix].to(dtype)})


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("gptq", drop("qweight"), f"'{PROJECTION}qweight' not in the checkpoint"),
        ("gptq", drop("scales"), f"'{PROJECTION}scales' not in the checkpoint"),
        (
            "gptq",
            put("scales", torch.ones(3, 64)),
            r"scales' has the shape \[3, 64\]; wanted \[2, 64\] for 4 bits in gro",
        ),
        ("gptq", put("g_idx", torch.full((64,), 7)), "g_idx' names groups 7 to 7; wanted 0 to 1"),
        ("gptq", put("weight", torch.ones(64, 64, dtype=torch.int8)), "has 'model.*o_proj.weight', which this arch"),
        ("awq", put("qzeros", torch.ones(2, 9, dtype=torch.int32)), r"qzeros' has the shape \[2, 9\]; wanted \[2, 8\]"),
        (
            "packed-groups",
            put("weight_shape", torch.tensor([64, 63])),
            r"weight_shape' is \[64, 63\]; wanted \[64, 64\]",
        ),
        ("packed-groups-zeros", drop("weight_zero_point"), "has no weight_zero_point; wanted one, because config.json"),
        ("integers-rows", put("weight_scale", torch.ones(2, 2)), r"weight_scale' has the shape \[2, 2\]"),
        ("integers-rows", put("weight", torch.ones(64, 65, dtype=torch.int8)), r"weight' has the shape \[64, 65\]"),
        ("float8-blocks", drop("weight_scale_inv"), "has neither weight_scale nor weight_scale_inv"),
        (
            "float8-blocks",
            put("weight_scale_inv", torch.ones(1, 3)),
            r"wanted \[2, 3\] for 8-bit floats in blocks of 40",
        ),
        ("gptq", retype("qweight", torch.float32), "qweight' has the type float32; wanted int32 for 4 bits in groups"),
        ("gptq", retype("qweight", torch.int64), "qweight' has the type int64; wanted int32"),
        ("gptq", retype("scales", torch.int32), "scales' has the type int32; wanted float16 or bfloat16 or float32"),
        ("gptq", retype("qzeros", torch.int16), "qzeros' has the type int16; wanted int32"),
        ("gptq", put("g_idx", torch.zeros(64)), "g_idx' has the type float32; wanted int32 or int64"),
        ("awq", retype("qweight", torch.int64), "qweight' has the type int64; wanted int32"),
        ("packed-groups", retype("weight_packed", torch.int64), "weight_packed' has the type int64; wanted int32"),
        ("integers-rows", retype("weight", torch.float8_e4m3fn), "weight' has the type float8_e4m3fn; wanted int8"),
        ("float8-rows", retype("weight", torch.int8), "weight' has the type int8; wanted float8_e4m3fn"),
        ("float8-rows", retype("weight_scale", torch.int32), "weight_scale' has the type int32; wanted float16 or"),
    ],
)
def test_tensors_that_do_not_fit_are_errors_of_one_line(name: str, change: Any, text: str, tmp_path: Path) -> None:
    make(CASES[name], tmp_path)
    tensors = load_file(tmp_path / FILE)
    change(tensors)
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=text) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_a_group_that_does_not_divide_the_columns_is_an_error(tmp_path: Path) -> None:
    make(CASES["gptq"], tmp_path)
    configure(tmp_path, quantization_config={**CASES["gptq"].config, "group_size": 48})
    with pytest.raises(CheckpointError, match="has 64 input features; wanted a multiple of its group of 48"):
        load(tmp_path)


def test_scales_that_the_kernels_refuse_are_an_error_that_names_the_layer(tmp_path: Path) -> None:
    class Refuses(Packs):
        def pack(self, weight: QuantizedCodes) -> Tensor:
            if not bool(torch.isfinite(weight.scales).all()):
                raise ValueError("scales that are not\nfinite")
            return super().pack(weight)

    make(CASES["gptq"], tmp_path)
    tensors = load_file(tmp_path / FILE)
    tensors[f"{PROJECTION}scales"][1, 3] = math.inf
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=f"'{PROJECTION}weight' cannot be packed: scales that are not finite; d"):
        load(tmp_path, kernels=Refuses().table)


def test_a_cut_file_is_an_error(tmp_path: Path) -> None:
    make(CASES["gptq"], tmp_path)
    raw = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(raw[:-100])
    with pytest.raises(CheckpointError, match="is damaged"):
        load(tmp_path)
