"""Rows of a pool in eight bits: most elements as float8, with a scale for each group of them, the last ones as bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3FN, E4M3FNUZ = "e4m3fn", "e4m3fnuz"
"""Forms of 8-bit floats: with a bias of 7 for exponents (OCP), and with one of 8 and a single zero."""
SMALLEST = 1e-4
"""Of what a group's largest element counts as."""
BIAS = 127
"""Of an exponent in a scale's byte (ue8m0, OCP Microscaling Formats 1.0)."""
ALIGNMENT = 8
NOTHING = 0xFF
"""Twice this byte is no bfloat16, and a scale of it no number."""


@dataclass(frozen=True, slots=True)
class Float8:
    """Floats of four bits of exponent, with a `bias`, and three of mantissa. A group's largest is scaled to `most` or less, and
    `nan` is a byte that is no number."""

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
"""By their names, as a kernel table has one. The same byte means half as much in the second, and half as much is the most that it is
scaled to: rows of both have the same elements, but for zeros with a sign, and scales one exponent apart."""


@dataclass(frozen=True, slots=True)
class RowCodec:
    """A row of `size` elements as uint8 [num_bytes]: the first size - exact as float8 e4m3 over their group's scale, a power of
    two; the last `exact` as bfloat16; then a byte for each scale, which is its exponent. Groups are `group` neighbours; so many
    are a power of two. `float8` names the form of the first, one of FLOATS."""

    size: int
    exact: int = 0
    group: int = 64
    float8: str = E4M3FN

    @property
    def floats(self) -> Float8:
        """The form of its elements of eight bits."""
        return FLOATS[self.float8]

    @property
    def unwritten(self) -> Tensor:
        """uint8 [num_bytes] that no kernel reads as numbers."""
        elements, rest = self.size - self.exact, self.num_bytes - (self.size - self.exact)
        return torch.tensor([self.floats.nan] * elements + [NOTHING] * rest, dtype=torch.uint8)

    @property
    def num_scales(self) -> int:
        """Groups of a row, the last of which may be cut."""
        return -(-(self.size - self.exact) // self.group)

    @property
    def num_bytes(self) -> int:
        """Bytes of a row, with those that align the next."""
        used = self.size + self.exact + self.num_scales
        return -(-used // ALIGNMENT) * ALIGNMENT

    def encode(self, values: Tensor) -> Tensor:
        """Float [N, size] to uint8 [N, num_bytes]. An element of float8 is off by at most a sixteenth of itself, or a 2^-9th
        of its scale."""
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
        """The inverse, to float32 [N, size]."""
        rounded, last = self.size - self.exact, self.size + self.exact
        exponents = rows[:, last : last + self.num_scales].float() - BIAS
        scales = torch.exp2(exponents).repeat_interleave(self.group, dim=1)[:, :rounded]
        small = rows[:, :rounded].contiguous().view(self.floats.dtype).float() * scales
        exact = rows[:, rounded:last].contiguous().view(torch.bfloat16).float()
        return torch.cat((small, exact.view(rows.shape[0], self.exact)), dim=1)
