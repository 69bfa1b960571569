"""Integers of compressed-tensors: signed, packed in words along the input features ("packed") or
one in each byte ("integers").

- Packed: `weight_packed` int32 [N, K * bits / 32], `weight_scale`, `weight_shape`, and for
  asymmetric weights `weight_zero_point`, packed along the output features. Words hold the integers
  plus 2 ** (bits - 1).
- Bytes: `weight` int8 [N, K], `weight_scale`, and `weight_zero_point` int8 with the scale's shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.core.errors import CheckpointError
from sglcore.models.weights.formats.format_tensors import (
    BYTES,
    WHOLE,
    WORDS,
    ZEROS,
    Format,
    LayerTensors,
    small_integers,
)
from sglcore.models.weights.formats.gptq import ordered
from sglcore.models.weights.quantized_weight import QuantizedWeight, Stored


def read_packed(layer: LayerTensors) -> Stored:
    """Return a layer's packed weight as codes, with scattered groups if `weight_g_idx` is not in
    order. Raises `CheckpointError` for tensors of another type or shape, and for missing zeros."""
    bits, each = layer.scheme.bits, 32 // layer.scheme.bits
    if layer.has("weight_shape"):
        _check_shape(layer)
    words = layer.read("weight_packed", WORDS, (layer.rows, -(-layer.columns // each)))
    codes = small_integers(words, bits)[:, : layer.columns].contiguous()
    weight = QuantizedWeight(codes, layer.scales("weight_scale"), _packed_zeros(layer), bits, layer.group)
    return ordered(layer, weight, "weight_g_idx") if layer.has("weight_g_idx") else weight


def read_integers(layer: LayerTensors) -> Stored:
    """Return a layer's weight with one integer in each byte as 8-bit codes. -128 becomes code 0:
    the sign bit is inverted. Raises `CheckpointError` as `read_packed`."""
    codes = layer.read("weight", BYTES, (layer.rows, layer.columns)).view(torch.uint8) ^ 0x80
    scales = layer.scales("weight_scale")
    zeros = None
    if not layer.scheme.is_symmetric:
        _need_zeros(layer)
        zeros = layer.scales("weight_zero_point", ZEROS) + 128
    return QuantizedWeight(codes, scales, zeros, 8, layer.group)


def _packed_zeros(layer: LayerTensors) -> Tensor | None:
    if layer.scheme.is_symmetric:
        return None
    _need_zeros(layer)
    if layer.scheme.block[0] is None:
        return layer.scales("weight_zero_point", ZEROS) + (1 << (layer.scheme.bits - 1))
    groups, each = layer.columns // layer.group, 32 // layer.scheme.bits
    words = layer.read("weight_zero_point", WORDS, (-(-layer.rows // each), groups))
    return small_integers(words, layer.scheme.bits, dim=0)[: layer.rows].float().contiguous()


def _need_zeros(layer: LayerTensors) -> None:
    if not layer.has("weight_zero_point"):
        raise CheckpointError(
            f"'{layer.module}' has no weight_zero_point",
            wanted="one, because config.json says that the weights are not symmetric",
            remedy="download the checkpoint again",
        )


def _check_shape(layer: LayerTensors) -> None:
    found, wanted = layer.read("weight_shape", WHOLE, (2,)).tolist(), [layer.rows, layer.columns]
    if found != wanted:
        raise CheckpointError(
            f"'{layer.module}.weight_shape' is {found}",
            wanted=f"{wanted} as config.json implies",
            remedy="check that config.json belongs to these weights",
        )


PACKED = Format(
    ("weight_packed", "weight_scale"), ("weight_shape", "weight_zero_point", "weight_g_idx", "input_scale"), read_packed
)
INTEGERS = Format(("weight", "weight_scale"), ("weight_zero_point", "input_scale", "input_zero_point"), read_integers)
