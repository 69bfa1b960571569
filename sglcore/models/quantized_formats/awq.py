"""AWQ, version gemm: each word packs eight integers along the output features, out of order.

Stored are `qweight` int32 [K, N / 8], `qzeros` int32 [K / G, N / 8] and `scales` [K / G, N].
"""

from __future__ import annotations

from torch import Tensor

from sglcore.device.errors import CheckpointError
from sglcore.models.quantized import QuantizedWeight, Stored
from sglcore.models.quantized_formats.tensors import FLOATS, WORDS, Format, LayerTensors, small_integers

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word the integer of each of eight neighbouring output features is."""


def read(layer: LayerTensors) -> Stored:
    """The weight, with its zeros."""
    if layer.rows % 8:
        raise CheckpointError(f"'{layer.module}' has {layer.rows} output features", wanted="a multiple of 8 for awq")
    group = layer.group
    groups = layer.columns // group
    codes = _in_order(layer.read("qweight", WORDS, (layer.columns, layer.rows // 8))).T.contiguous()
    zeros = _in_order(layer.read("qzeros", WORDS, (groups, layer.rows // 8))).T.float().contiguous()
    scales = layer.read("scales", FLOATS, (groups, layer.rows)).T.float().contiguous()
    return QuantizedWeight(codes, scales, zeros, 4, group)


def _in_order(words: Tensor) -> Tensor:
    """uint8 [a, 8 * b] of words int32 [a, b]."""
    return small_integers(words, 4).unflatten(1, (words.shape[1], 8))[:, :, list(PLACES)].flatten(1)


FORMAT = Format(("qweight", "qzeros", "scales"), (), read)
