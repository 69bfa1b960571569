"""Decodes the blocks of GGUF's quantised types: integer codes with scales, and for some types a
minimum.

The layouts are those of ggml's reference (`ggml-common.h`); values are computed in the same order
as there, and equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from sglcore.models.weights.quantized_weight import QuantizedWeight

LARGEST_ZERO = 60000.0
"""The limit of |minimum / scale|. A group beyond it is treated as constant: zeros are kept in
float16."""


@dataclass(frozen=True, slots=True)
class Codes:
    """What the blocks of a type decode to: w = scales * (codes - zero) without `minima`, else
    scales * codes + minima. Codes are uint8 [N, K], scales and minima float32 [N, groups] for each
    `group` columns."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    zero: int
    bits: int
    group: int


Blocks: TypeAlias = Tensor
"""uint8 [N, blocks, bytes of a block]."""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight [N, K]: `data` uint8 [N, bytes of a row], `form` the type's name. Implements
    `quantized_weight.Stored`."""

    data: Tensor
    form: str
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs N, inputs K) of the unpacked weight."""
        return self.data.shape[0], self.columns

    def values(self, rows: slice) -> Tensor:
        """Return float32 [n, K]: the values of the weight in these rows."""
        found = self._codes(rows)
        scales = found.scales.repeat_interleave(found.group, 1)
        if found.minima is None:
            return (found.codes.float() - found.zero) * scales
        return found.codes.float() * scales + found.minima.repeat_interleave(found.group, 1)

    def as_codes(self) -> QuantizedWeight:
        """Return integer codes; minima become zeros that need not be integers. Groups beyond
        LARGEST_ZERO become constant.
        """
        found = self._codes(slice(None))
        if found.minima is None:
            is_middle = found.zero == 1 << (found.bits - 1)
            zeros = None if is_middle else torch.full_like(found.scales, found.zero)
            return QuantizedWeight(found.codes, found.scales, zeros, found.bits, found.group)
        return _with_zeros(found, found.minima)

    def _codes(self, rows: slice) -> Codes:
        kind = KINDS[self.form]
        data = self.data[rows]
        return kind.read(data.view(data.shape[0], self.columns // kind.elements, kind.size))


def _with_zeros(found: Codes, minima: Tensor) -> QuantizedWeight:
    zeros = -minima / found.scales
    is_constant = ~(zeros.abs() <= LARGEST_ZERO)
    scales = torch.where(is_constant, minima.abs(), found.scales)
    zeros = torch.where(is_constant, -minima.sign(), zeros)
    codes = found.codes.unflatten(1, (scales.shape[1], found.group)).masked_fill(is_constant.unsqueeze(-1), 0)
    return QuantizedWeight(codes.flatten(1), scales, zeros, found.bits, found.group)


def _half(blocks: Blocks, at: int) -> Tensor:
    """Return float32 [N, blocks], the float16 at byte `at` of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return uint8 [..., 2 * n]: the low four bits of n bytes, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(words: Tensor) -> Tensor:
    """Return uint8 [..., 32]: bit i of four bytes as element i."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((words.unsqueeze(-1) >> shifts) & 1).flatten(-2)


def _flat(codes: Tensor) -> Tensor:
    return codes.reshape(codes.shape[0], -1)


def _q4_0(blocks: Blocks) -> Codes:
    return Codes(_flat(_nibbles(blocks[..., 2:])), _half(blocks, 0), None, 8, 4, 32)


def _q4_1(blocks: Blocks) -> Codes:
    return Codes(_flat(_nibbles(blocks[..., 4:])), _half(blocks, 0), _half(blocks, 2), 0, 4, 32)


def _q5_0(blocks: Blocks) -> Codes:
    codes = _nibbles(blocks[..., 6:]) | (_bits(blocks[..., 2:6]) << 4)
    return Codes(_flat(codes), _half(blocks, 0), None, 16, 5, 32)


def _q5_1(blocks: Blocks) -> Codes:
    codes = _nibbles(blocks[..., 8:]) | (_bits(blocks[..., 4:8]) << 4)
    return Codes(_flat(codes), _half(blocks, 0), _half(blocks, 2), 0, 5, 32)


def _q8_0(blocks: Blocks) -> Codes:
    return Codes(_flat(blocks[..., 2:] ^ 0x80), _half(blocks, 0), None, 128, 8, 32)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight 6-bit scales and eight 6-bit minima in 12 bytes: uint8 [..., 8] each."""
    first, second, third = packed.split(4, dim=-1)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=-1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    return scales, minima


def _scaled(blocks: Blocks, codes: Tensor, bits: int) -> Codes:
    """Return `codes` with the scale and the minimum of each 32 of a block's 256 elements, from the
    first 16 bytes of the block.
    """
    scales, minima = _six_bits(blocks[..., 4:16])
    scale = _half(blocks, 0).unsqueeze(-1) * scales.float()
    minimum = _half(blocks, 2).unsqueeze(-1) * minima.float()
    return Codes(_flat(codes), _flat(scale), -_flat(minimum), 0, bits, 32)


def _q4_k(blocks: Blocks) -> Codes:
    return _scaled(blocks, _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))), 4)


def _q5_k(blocks: Blocks) -> Codes:
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    high = ((blocks[..., 16:48].unsqueeze(-2) >> shifts) & 1) << 4
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2).unflatten(-1, (8, 32))
    return _scaled(blocks, low | high, 5)


def _q6_k(blocks: Blocks) -> Codes:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    high = ((blocks[..., 128:192].unflatten(-1, (2, 32)).unsqueeze(-2) >> shifts) & 3) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return Codes(_flat(low | high.flatten(-2)), _flat(_half(blocks, 208).unsqueeze(-1) * scales), None, 32, 6, 16)


@dataclass(frozen=True, slots=True)
class Kind:
    """A quantised type: `elements` and bytes (`size`) of a block, and `read`, the function that
    decodes blocks uint8 [N, blocks, size].
    """

    elements: int
    size: int
    read: Callable[[Blocks], Codes]


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "Q4_0": Kind(32, 18, _q4_0),
        "Q4_1": Kind(32, 20, _q4_1),
        "Q5_0": Kind(32, 22, _q5_0),
        "Q5_1": Kind(32, 24, _q5_1),
        "Q8_0": Kind(32, 34, _q8_0),
        "Q4_K": Kind(256, 144, _q4_k),
        "Q5_K": Kind(256, 176, _q5_k),
        "Q6_K": Kind(256, 210, _q6_k),
    }
)
"""The quantised types by name."""
