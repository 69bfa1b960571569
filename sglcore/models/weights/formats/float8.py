"""8-bit floats (e4m3) with a scale for the tensor, for each row, or for blocks.

The scale is `weight_scale`, or for blocks `weight_scale_inv`, perhaps a power of two (ue8m0); both
are multiplied with. The scales of activations are not needed: activations are not quantised.
"""

from __future__ import annotations

import torch

from sglcore.core.errors import CheckpointError
from sglcore.models.weights.formats.format_tensors import FLOATS, Format, LayerTensors
from sglcore.models.weights.quantized_weight import ScaledFloats, Stored

SCALES = ("weight_scale", "weight_scale_inv")


def read(layer: LayerTensors) -> Stored:
    """Return a layer's floats and their scales. Raises `CheckpointError` without scales, and for
    tensors of another type or shape."""
    floats = layer.read("weight", (torch.float8_e4m3fn,), (layer.rows, layer.columns))
    suffix = next((name for name in SCALES if layer.has(name)), None)
    if suffix is None:
        raise CheckpointError(
            f"'{layer.module}' has neither {' nor '.join(SCALES)}", wanted="one", remedy="download the checkpoint again"
        )
    rows, columns = layer.scheme.block
    if rows is None:
        # Checkpoints that only say "fp8" have one scale for the tensor, or one for each row.
        scales = layer.read(suffix, FLOATS, (), (1,), (1, 1), (layer.rows, 1), (layer.rows,)).float()
        count = scales.numel()
        return ScaledFloats(floats, scales.reshape(count, 1), (1 if count == layer.rows else layer.rows, layer.columns))
    block = rows, columns or layer.columns
    blocks = -(-layer.rows // block[0]), -(-layer.columns // block[1])
    shapes = (blocks, (layer.rows,)) if blocks == (layer.rows, 1) else (blocks,)
    return ScaledFloats(
        floats, layer.read(suffix, (*FLOATS, torch.float8_e8m0fnu), *shapes).float().reshape(blocks), block
    )


FORMAT = Format(("weight",), (*SCALES, "input_scale"), read)
