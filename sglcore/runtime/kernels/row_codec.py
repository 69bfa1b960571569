"""KV rows in 8 bits.

Most elements are float8 with a scale for each group, the last ones bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3FN, E4M3FNUZ = "e4m3fn", "e4m3fnuz"
"""8-bit float formats: with exponent bias 7 (OCP), and with bias 8 and a single zero."""
SMALLEST = 1e-4
"""The scale of a group is computed as if its largest magnitude were at least this."""
BIAS = 127
"""The exponent bias of a scale byte (ue8m0, OCP Microscaling Formats 1.0)."""
ALIGNMENT = 8
NOTHING = 0xFF
"""A byte that is NaN as a scale; two of them are NaN in bfloat16."""


@dataclass(frozen=True, slots=True)
class Float8:
    """An 8-bit float format: four bits of exponent with this `bias`, three of mantissa.

    `most` is the magnitude to which a group's largest element is scaled at most; `nan` is a byte
    that is NaN.
    """

    dtype: torch.dtype
    most: float
    bias: int
    nan: int


FLOATS: Mapping[str, Float8] = MappingProxyType(
    {
        E4M3FN: Float8(torch.float8_e4m3fn, 448.0, 7, 0xFF),
        E4M3FNUZ: Float8(torch.float8_e4m3fnuz, 224.0, 8, 0x80),
    }
)
"""Formats by name, as in a kernel table.

A byte means half as much in the second format, and its `most` is half as large. Rows in both
formats have the same bytes, except negative zeros, and scales one exponent apart.
"""


@dataclass(frozen=True, slots=True)
class RowCodec:
    """The format of a row of `size` elements as uint8 [num_bytes].

    The first size - exact elements are float8 divided by their group's scale, a power of two; the
    last `exact` are bfloat16; then the exponent of each scale as one byte. A group has `group`
    neighbouring elements, a power of two. `float8` is one of FLOATS.
    """

    size: int
    exact: int = 0
    group: int = 64
    float8: str = E4M3FN

    @property
    def floats(self) -> Float8:
        """The `Float8` of the elements that are not exact."""
        return FLOATS[self.float8]

    @property
    def unwritten(self) -> Tensor:
        """A row, uint8 [num_bytes], that decodes to NaN in every element."""
        elements, rest = self.size - self.exact, self.num_bytes - (self.size - self.exact)
        return torch.tensor([self.floats.nan] * elements + [NOTHING] * rest, dtype=torch.uint8)

    @property
    def num_scales(self) -> int:
        """Groups per row; the last may be shorter."""
        return -(-(self.size - self.exact) // self.group)

    @property
    def num_bytes(self) -> int:
        """Bytes per row, padding included."""
        used = self.size + self.exact + self.num_scales
        return -(-used // ALIGNMENT) * ALIGNMENT

    def encode(self, values: Tensor) -> Tensor:
        """Encode float [N, size] to a new tensor uint8 [N, num_bytes].

        The error of a float8 element is at most 1/16 of itself, or 2^-9 of its group's scale.
        """
        rows, rounded, most = values.shape[0], self.size - self.exact, self.floats.most
        groups = F.pad(values[:, :rounded].float(), (0, self.num_scales * self.group - rounded))
        groups = groups.view(rows, self.num_scales, self.group)
        exponents = torch.ceil(torch.log2(groups.abs().amax(dim=-1).clamp(min=SMALLEST) / most))
        scaled = (groups / torch.exp2(exponents).unsqueeze(-1)).clamp(-most, most)
        small = (
            scaled.view(rows, self.num_scales * self.group)[:, :rounded]
            .to(self.floats.dtype)
            .contiguous()
            .view(torch.uint8)
        )
        last = values[:, rounded:].to(torch.bfloat16).contiguous().view(torch.uint8).view(rows, 2 * self.exact)
        parts = torch.cat((small, last, (exponents + BIAS).to(torch.uint8)), dim=1)
        return F.pad(parts, (0, self.num_bytes - parts.shape[1]))

    def decode(self, rows: Tensor) -> Tensor:
        """Decode uint8 [N, num_bytes] to float32 [N, size]."""
        rounded, last = self.size - self.exact, self.size + self.exact
        exponents = rows[:, last : last + self.num_scales].float() - BIAS
        scales = torch.exp2(exponents).repeat_interleave(self.group, dim=1)[:, :rounded]
        small = rows[:, :rounded].contiguous().view(self.floats.dtype).float() * scales
        exact = rows[:, rounded:last].contiguous().view(torch.bfloat16).float()
        return torch.cat((small, exact.view(rows.shape[0], self.exact)), dim=1)
