"""Quantised weights, and the specified arithmetic with them in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglcore_cpu.kernels.quantized_form import QuantizedForm, QuantizedLayout, pack_quantized
from sglcore_cpu.native import Engine

TINY = 1e-30
"""A group of activations with a smaller maximum counts as zero."""


@dataclass(frozen=True)
class Case:
    """A weight of random codes, scales and optional zeros; scales and zeros are float16 numbers, as
    in a checkpoint."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int

    def form(self, engine: Engine) -> QuantizedForm:
        """Pack the weight."""
        packed = pack_quantized(engine, self.codes, self.scales, self.zeros, self.bits, self.group)
        assert isinstance(packed.form, QuantizedForm)
        return packed.form

    def shifts(self) -> Tensor:
        """Return code - 2^(bits - 1) for every code, float64."""
        return self.codes.double() - (1 << (self.bits - 1))

    def per_column(self, values: Tensor) -> Tensor:
        """Expand values of groups [N, groups] to columns, float64 [N, K]."""
        return values.double().repeat_interleave(self.group, dim=1)[:, : self.codes.shape[1]]

    def plain(self) -> Tensor:
        """Return the weight scale * (code - zero) in float64."""
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.per_column(self.zeros)
        return self.per_column(self.scales) * (self.codes.double() - zeros)


def make_case(rows: int, columns: int, bits: int, group: int, has_zeros: bool, seed: int) -> Case:
    """Make random codes over their whole range, scales over four powers of ten, and zeros that are
    not integers."""
    random = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)
    codes = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8, generator=random)
    powers = torch.randint(-4, 1, (rows, groups), generator=random).float()
    scales = ((0.5 + torch.rand(rows, groups, generator=random)) * 10.0**powers).half().float()
    zeros = torch.rand(rows, groups, generator=random) * (1 << bits)
    return Case(codes, scales, zeros.half().float() if has_zeros else None, bits, group)


def random_x(tokens: int, columns: int, seed: int) -> Tensor:
    """Return float32 activations with a row of zeros and a row with a single large value."""
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed + 1))
    if tokens > 2:
        x[1] = 0
        x[2, columns // 2] = 1e6
    return x


def quantized_x(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return (codes [T, K], scales [T, groups]) of activations as the kernels must compute them: in
    float32, ties rounded to even."""
    tokens, columns = x.shape
    groups = -(-columns // group)
    padded = torch.nn.functional.pad(x.float(), (0, groups * group - columns)).view(tokens, groups, group)
    largest = padded.abs().amax(dim=-1)
    live = largest >= TINY
    factor = torch.where(live, 127.0 / torch.where(live, largest, 1.0), 0.0)
    codes = (padded * factor.unsqueeze(-1)).round().view(tokens, groups * group)[:, :columns]
    return codes.double(), torch.where(live, largest / 127.0, 0.0).double()


def promised(case: Case, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x times the weight [T, N] by the specified arithmetic in float64, the allowed error
    of float32)."""
    codes, scales = quantized_x(x, case.group)
    total = torch.zeros(x.shape[0], case.codes.shape[0], dtype=torch.float64)
    magnitude = torch.zeros_like(total)
    shifts = case.shifts()
    middle = 1 << (case.bits - 1)
    for group in range(scales.shape[1]):
        part = slice(group * case.group, (group + 1) * case.group)
        dots = codes[:, part] @ shifts[:, part].T
        size = dots.abs()
        if case.zeros is not None:
            shift = (middle - case.zeros[:, group].double()) * codes[:, part].sum(dim=1, keepdim=True)
            dots, size = dots + shift, size + shift.abs()
        factor = scales[:, group : group + 1] * case.scales[:, group].double()
        total += dots * factor
        magnitude += size * factor
    return total, magnitude * (scales.shape[1] + 4) * 2.0**-24


def layouts() -> list[tuple[int, int, bool]]:
    """Return every (bits, group, has_zeros)."""
    return [(bits, group, zeros) for bits in (8, 4) for group in (32, 64, 128) for zeros in (False, True)]


def layout_of(case: Case) -> QuantizedLayout:
    """Return the memory layout of a case's weight."""
    rows, columns = case.codes.shape
    return QuantizedLayout(rows, columns, case.bits, case.group, case.zeros is not None)
