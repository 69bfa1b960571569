"""Small checkpoints in the published layouts of quantised weights, and the dense model that equals
each of them.

Each layer function follows the format's description and shares no code with the loader.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglcore.models.weights.quantized_weight import QuantizedWeight
from sglcore.runtime.kernels.reference_kernels import QuantizedCodes
from sglcore.runtime.kernels.table import KernelTable
from tests.checkpoints import llama, save

FILE = "model.safetensors"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output feature of each of the eight integers in a word, lowest bits first."""

Layer = tuple[dict[str, Tensor], Tensor]
"""Stored tensors by suffix, and the dequantised weight in float32."""


def words(values: np.ndarray, bits: int) -> Tensor:
    """Pack integers [..., n] into int32 [..., n * bits / 32], the first in the lowest bits; the
    last word is padded with zeros."""
    each = 32 // bits
    padded = np.pad(values.astype(np.uint64), [(0, 0), (0, -values.shape[-1] % each)])
    parts = padded.reshape(padded.shape[0], padded.shape[1] // each, each) << np.arange(0, 32, bits, dtype=np.uint64)
    return torch.from_numpy(np.bitwise_or.reduce(parts, axis=-1).astype(np.uint32).view(np.int32).copy())


@dataclass
class Random:
    """Seeded integers and scales of a layer that give weights of the usual size in these models."""

    rng: np.random.Generator

    def codes(self, rows: int, columns: int, bits: int) -> np.ndarray:
        """Random integers of `bits` bits."""
        return self.rng.integers(0, 1 << bits, (rows, columns))

    def zeros(self, rows: int, groups: int, bits: int) -> np.ndarray:
        """Integer zero points near the middle, above 0."""
        middle = 1 << (bits - 1)
        return self.rng.integers(max(middle - 2, 1), middle + 2, (rows, groups))

    def scales(self, rows: int, groups: int, bits: int, dtype: torch.dtype = torch.float16) -> Tensor:
        """Scales that are exact in `dtype`."""
        return torch.from_numpy(self.rng.uniform(0.1, 0.5, (rows, groups)) / (1 << (bits - 1))).to(dtype)


def dense(codes: np.ndarray, zeros: np.ndarray | float, scales: Tensor) -> Tensor:
    """Return scales * (codes - zeros) in float32, with each group's column repeated."""
    columns, group = codes.shape[1], codes.shape[1] // scales.shape[1]
    spread = np.repeat(np.broadcast_to(zeros, scales.shape), group, axis=1)[:, :columns]
    wide = scales.double().repeat_interleave(group, 1)[:, :columns]
    return (torch.from_numpy(codes - spread).double() * wide).float()


def gptq(rows: int, columns: int, draw: Random, *, bits: int, group: int, v2: bool, order: str, even: bool) -> Layer:
    """GPTQ. `order`: order of the groups: "none", "trivial" or "scattered"; `even`: all zero points
    are in the middle; `v2`: zero points are stored without the offset of 1."""
    groups = columns // group
    codes, scales = draw.codes(rows, columns, bits), draw.scales(rows, groups, bits)
    zeros = np.full((rows, groups), 1 << (bits - 1)) if even else draw.zeros(rows, groups, bits)
    stored = zeros if v2 else zeros - 1
    tensors = {"qweight": words(codes, bits).T.contiguous(), "qzeros": words(stored.T, bits)}
    tensors["scales"] = scales.T.contiguous()
    of = np.arange(columns) // group
    if order == "scattered":
        of = draw.rng.permutation(of)
    if order != "none":
        tensors["g_idx"] = torch.from_numpy(of.astype(np.int32))
    weight = (torch.from_numpy(codes - zeros[:, of]).double() * scales.double()[:, of]).float()
    return tensors, weight


def awq(rows: int, columns: int, draw: Random, *, group: int) -> Layer:
    """AWQ, version gemm."""
    groups = columns // group
    codes, zeros = draw.codes(rows, columns, 4), draw.zeros(rows, groups, 4)
    scales = draw.scales(rows, groups, 4)

    def packed(values: np.ndarray) -> Tensor:
        eights = values.T.reshape(values.shape[1], rows // 8, 8)[:, :, AWQ_ORDER]
        return words(eights.reshape(values.shape[1], rows), 4)

    tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales.T.contiguous()}
    return tensors, dense(codes, zeros, scales)


def packed(rows: int, columns: int, draw: Random, *, bits: int, group: int | None, even: bool) -> Layer:
    """compressed-tensors' pack-quantized; `group` None: one scale per row."""
    groups = columns // group if group else 1
    codes, scales = draw.codes(rows, columns, bits), draw.scales(rows, groups, bits, torch.bfloat16)
    zeros = np.full((rows, groups), 1 << (bits - 1)) if even else draw.zeros(rows, groups, bits)
    tensors = {"weight_packed": words(codes, bits), "weight_scale": scales}
    tensors["weight_shape"] = torch.tensor([rows, columns])
    if not even:
        tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    return tensors, dense(codes, zeros, scales)


def integers(rows: int, columns: int, draw: Random, *, group: int | None, even: bool, whole: bool = False) -> Layer:
    """compressed-tensors' int-quantized; `whole`: one scale for the tensor."""
    groups = columns // group if group else 1
    codes = draw.codes(rows, columns, 8) - 128
    scales = draw.scales(1 if whole else rows, groups, 8, torch.float32)
    zeros = np.zeros((rows, groups), np.int64) if even else draw.zeros(rows, groups, 8) - 128
    tensors = {"weight": torch.from_numpy(codes.astype(np.int8)), "weight_scale": scales[0] if whole else scales}
    if not even:
        tensors["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
    return tensors, dense(codes, zeros, scales.expand(rows, groups))


def float8(rows: int, columns: int, draw: Random, *, block: tuple[int, int] | None, rowwise: bool = False) -> Layer:
    """e4m3 with a scale for the tensor, for each row, or for each block (the last blocks may be
    cut)."""
    values = torch.from_numpy(draw.rng.uniform(-1, 1, (rows, columns)) * 240).to(torch.float8_e4m3fn)
    size = block or ((1, columns) if rowwise else (rows, columns))
    counts = -(-rows // size[0]), -(-columns // size[1])
    scales = torch.from_numpy(draw.rng.uniform(0.5, 1, counts) / 240).float()
    wide = scales.double().repeat_interleave(size[0], 0)[:rows].repeat_interleave(size[1], 1)[:, :columns]
    name = "weight_scale_inv" if block else "weight_scale"
    shaped = scales if block or rowwise else scales.reshape(1)
    return {"weight": values, name: shaped, "input_scale": torch.ones(1)}, (values.double() * wide).float()


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


@dataclass(frozen=True)
class Case:
    """A format: its `quantization_config`, and the function that makes a layer. `form`: how the
    loader packs it; None: it does not."""

    config: Mapping[str, Any]
    make: Callable[[int, int, Random], Layer]
    form: tuple[int, int] | None


def _gptq(bits: int = 4, group: int = 32, v2: bool = False, order: str = "none", even: bool = False) -> Case:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order == "scattered", "sym": even}
    if v2:
        config["checkpoint_format"] = "gptq_v2"

    def make(rows: int, columns: int, draw: Random) -> Layer:
        size = columns if group < 0 else group
        return gptq(rows, columns, draw, bits=bits, group=size, v2=v2, order=order, even=even)

    form = None if order == "scattered" else (max(bits, 4), 32 if group > 0 else 64)
    return Case(config, make, form)


def _packed(bits: int, group: int | None, even: bool) -> Case:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    config = compressed("pack-quantized", num_bits=bits, type="int", symmetric=even, **strategy)
    return Case(config, lambda n, k, draw: packed(n, k, draw, bits=bits, group=group, even=even), (bits, group or 64))


def _integers(group: int | None, even: bool, whole: bool = False) -> Case:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "tensor" if whole else "channel"}
    config = compressed("int-quantized", num_bits=8, type="int", symmetric=even, **strategy)
    return Case(config, lambda n, k, draw: integers(n, k, draw, group=group, even=even, whole=whole), (8, group or 64))


def _float8(config: Mapping[str, Any], block: tuple[int, int] | None = None, rowwise: bool = False) -> Case:
    return Case(config, lambda n, k, draw: float8(n, k, draw, block=block, rowwise=rowwise), None)


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "gptq": _gptq(),
        "gptq-even-zeros": _gptq(even=True),
        "gptq-8-bit": _gptq(bits=8),
        "gptq-2-bit": _gptq(bits=2),
        "gptq-one-group": _gptq(group=-1),
        "gptq-v2-order-of-columns": _gptq(v2=True, order="trivial"),
        "gptq-scattered": _gptq(order="scattered"),
        "awq": Case(
            {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
            lambda n, k, draw: awq(n, k, draw, group=32),
            (4, 32),
        ),
        "packed-groups": _packed(4, 32, even=True),
        "packed-groups-zeros": _packed(4, 32, even=False),
        "packed-rows": _packed(4, None, even=True),
        "packed-8-bit-rows-zeros": _packed(8, None, even=False),
        "integers-rows": _integers(None, even=True),
        "integers-groups-zeros": _integers(32, even=False),
        "integers-tensor": _integers(None, even=True, whole=True),
        "float8-tensor": _float8({"quant_method": "fp8", "activation_scheme": "static"}),
        "float8-rows": _float8(
            compressed("float-quantized", num_bits=8, type="float", strategy="channel"), rowwise=True
        ),
        "float8-blocks": _float8(
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [40, 24]}, block=(40, 24)
        ),
    }
)
"""Every layout by name."""


def make(case: Case, folder: Path, seed: int = 0, keep: tuple[str, ...] = ("lm_head",), **sizes: Any) -> Any:
    """Write a Llama with quantised linear layers, except those in `keep`; return the equivalent
    dense model."""
    oracle = llama(**{"hidden_size": 64, "intermediate_size": 128, **sizes})
    save(oracle, folder)
    tensors, draw = load_file(folder / FILE), Random(np.random.default_rng(seed))
    for name, layer in oracle.named_modules():
        if isinstance(layer, torch.nn.Linear) and not any(name.endswith(each) for each in keep):
            del tensors[f"{name}.weight"]
            stored, weight = case.make(layer.out_features, layer.in_features, draw)
            tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in stored.items()}
            layer.weight = torch.nn.Parameter(weight)
    save_file(tensors, folder / FILE)
    configure(folder, quantization_config=dict(case.config))
    return oracle


def configure(folder: Path, **values: Any) -> None:
    """Set keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


class Packs:
    """A device that keeps codes; it dequantises them at once, so that the reference's `linear` can
    use them."""

    def __init__(self, **entries: Any) -> None:
        self.packed: list[QuantizedCodes] = []
        self.table: KernelTable = KernelTable().replace(pack_quantized=self.pack, **entries)

    def pack(self, weight: QuantizedCodes) -> Tensor:
        """Return the dequantised values."""
        self.packed.append(weight)
        same = QuantizedWeight(weight.codes, weight.scales, weight.zeros, weight.bits, weight.group)
        return same.values(slice(None)).to(weight.dtype)
