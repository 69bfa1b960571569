"""GPTQ: codes are packed along the input features, zeros along the output features; groups may be
out of order.

Tensors: `qweight` int32 [K * bits / 32, N], `qzeros` int32 [K / G, N * bits / 32], `scales` [K / G,
N], and `g_idx` int32 [K], the group of each column. The first version of the format stores zeros
minus 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.core.errors import CheckpointError
from sglcore.models.weights.formats.format_tensors import FLOATS, WHOLE, WORDS, Format, LayerTensors, small_integers
from sglcore.models.weights.quantized_weight import QuantizedWeight, ScatteredWeight, Stored


def read(layer: LayerTensors) -> Stored:
    """Return a layer's weight as codes, with scattered groups if `g_idx` is not in order. Raises
    `CheckpointError` for tensors of another type or shape."""
    bits, each = layer.scheme.bits, 32 // layer.scheme.bits
    group = layer.group
    groups = layer.columns // group
    words = layer.read("qweight", WORDS, (-(-layer.columns // each), layer.rows))
    codes = small_integers(words.T.contiguous(), bits)[:, : layer.columns].contiguous()
    stored = small_integers(layer.read("qzeros", WORDS, (groups, -(-layer.rows // each))), bits)[:, : layer.rows]
    zeros = ((stored + layer.scheme.zero_offset) & ((1 << bits) - 1)).T.float().contiguous()
    scales = layer.read("scales", FLOATS, (groups, layer.rows)).T.float().contiguous()
    is_constant = bool((zeros == 1 << (bits - 1)).all())
    weight = QuantizedWeight(codes, scales, None if is_constant else zeros, bits, group)
    return ordered(layer, weight, "g_idx") if layer.has("g_idx") else weight


def ordered(layer: LayerTensors, weight: QuantizedWeight, suffix: str) -> Stored:
    """Return the weight unchanged if its groups, in the tensor `suffix`, are in order or not given
    (all -1), else with scattered groups. Raises `CheckpointError` for a group that does not exist.
    """
    group_of = layer.read(suffix, WHOLE, (layer.columns,)).long()
    if bool((group_of == torch.arange(layer.columns) // weight.group).all()) or bool((group_of == -1).all()):
        return weight
    if not _is_within(group_of, weight.scales.shape[1]):
        raise CheckpointError(
            f"'{layer.module}.{suffix}' names groups {int(group_of.min())} to {int(group_of.max())}",
            wanted=f"0 to {weight.scales.shape[1] - 1}",
            remedy="download the checkpoint again",
        )
    return ScatteredWeight(weight, group_of)


def _is_within(group_of: Tensor, groups: int) -> bool:
    return bool(((group_of >= 0) & (group_of < groups)).all())


FORMAT = Format(("qweight", "qzeros", "scales"), ("g_idx",), read)
