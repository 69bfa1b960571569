"""AWQ, version gemm: each word packs eight integers along the output features, out of order.

Tensors: `qweight` int32 [K, N / 8], `qzeros` int32 [K / G, N / 8] and `scales` [K / G, N].
"""

from __future__ import annotations

from torch import Tensor

from sglcore.core.errors import CheckpointError
from sglcore.models.weights.formats.format_tensors import FLOATS, WORDS, Format, LayerTensors, small_integers
from sglcore.models.weights.quantized_weight import QuantizedWeight, Stored

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The index in a word of each of eight neighbouring output features."""


def read(layer: LayerTensors) -> Stored:
    """Return a layer's weight as 4-bit codes with zeros. Raises `CheckpointError` if N is not a
    multiple of 8, and for tensors of another type or shape."""
    if layer.rows % 8:
        raise CheckpointError(f"'{layer.module}' has {layer.rows} output features", wanted="a multiple of 8 for awq")
    group = layer.group
    groups = layer.columns // group
    codes = _in_order(layer.read("qweight", WORDS, (layer.columns, layer.rows // 8))).T.contiguous()
    zeros = _in_order(layer.read("qzeros", WORDS, (groups, layer.rows // 8))).T.float().contiguous()
    scales = layer.read("scales", FLOATS, (groups, layer.rows)).T.float().contiguous()
    return QuantizedWeight(codes, scales, zeros, 4, group)


def _in_order(words: Tensor) -> Tensor:
    """Unpack words int32 [a, b] to uint8 [a, 8 * b], output features in order."""
    return small_integers(words, 4).unflatten(1, (words.shape[1], 8))[:, :, list(PLACES)].flatten(1)


FORMAT = Format(("qweight", "qzeros", "scales"), (), read)
