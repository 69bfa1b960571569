"""Dequantises weights in MXFP4 (OCP Microscaling Formats 1.0).

4-bit floats, with an exponent for each group of 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXPONENT_BIAS = 127
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes without their highest bit, which is the sign."""


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantise blocks uint8 [N, groups, 16] with scales uint8 [N, groups].

    Returns float32 [N, groups * 32]. Each byte has two codes, the lower four bits first.
    """
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2)
    exponents = scales.to(torch.int32) - EXPONENT_BIAS
    return torch.ldexp(table[codes.int()], exponents.unsqueeze(-1)).flatten(1)
