"""Rows of a pool in eight bits: most elements as float8, with a scale for each group of them, the last ones as bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST = 1e-4
"""Of what a group's largest element counts as."""
BIAS = 127
"""Of an exponent in a scale's byte (ue8m0, OCP Microscaling Formats 1.0)."""
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class RowCodec:
    """A row of `size` elements as uint8 [num_bytes]: the first size - exact as float8 e4m3 over their group's scale, a power of
    two; the last `exact` as bfloat16; then a byte for each scale, which is its exponent. Groups are `group` neighbours; so many
    are a power of two."""

    size: int
    exact: int = 0
    group: int = 64

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
        rows, rounded = values.shape[0], self.size - self.exact
        groups = F.pad(values[:, :rounded].float(), (0, self.num_scales * self.group - rounded))
        groups = groups.view(rows, self.num_scales, self.group)
        exponents = torch.ceil(torch.log2(groups.abs().amax(dim=-1).clamp(min=SMALLEST) / FP8_MAX))
        scaled = (groups / torch.exp2(exponents).unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
        small = scaled.view(rows, self.num_scales * self.group)[:, :rounded].to(FP8).contiguous().view(torch.uint8)
        last = values[:, rounded:].to(torch.bfloat16).contiguous().view(torch.uint8).view(rows, 2 * self.exact)
        parts = torch.cat((small, last, (exponents + BIAS).to(torch.uint8)), dim=1)
        return F.pad(parts, (0, self.num_bytes - parts.shape[1]))

    def decode(self, rows: Tensor) -> Tensor:
        """The inverse, to float32 [N, size]."""
        rounded, last = self.size - self.exact, self.size + self.exact
        exponents = rows[:, last : last + self.num_scales].float() - BIAS
        scales = torch.exp2(exponents).repeat_interleave(self.group, dim=1)[:, :rounded]
        small = rows[:, :rounded].contiguous().view(FP8).float() * scales
        exact = rows[:, rounded:last].contiguous().view(torch.bfloat16).float()
        return torch.cat((small, exact.view(rows.shape[0], self.exact)), dim=1)
