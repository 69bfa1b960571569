"""The end of a top-p prefix as `cutoffs.py` finds it, for devices without 64-bit integers. The
results are the same integers.

A sum of weights has up to 52 bits and is kept as two int32: `high * 2**24 + low`. Histograms keep
it as one sum for each of the 4 bytes of the weights; these sums stay below 2**31 for every
vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BITS = 24
HALF = 12
NEAR = 3
"""Upper bound of the error of a float32 quotient here: operands are rounded to 2**-24 and the
quotient is below 2**22.
"""
MOST_TIES = 1 << 22
MOST = (1 << 31) - 1


class Wide(NamedTuple):
    """The number `high * 2**24 + low`, not negative; both int32 of one shape, low below 2**24."""

    high: Tensor
    low: Tensor

    def at(self, column: Tensor) -> "Wide":
        """Return the entries at column int32[B, 1] of each row."""
        return Wide(self.high.gather(1, column), self.low.gather(1, column))

    def below(self, other: "Wide") -> Tensor:
        """Return bool, elementwise: whether this is less than the other number."""
        return (self.high < other.high) | ((self.high == other.high) & (self.low < other.low))

    def plus(self, other: "Wide") -> "Wide":
        """Return the elementwise sum."""
        low = self.low + other.low
        return Wide(self.high + other.high + (low >> BITS), low & ((1 << BITS) - 1))

    def minus(self, other: "Wide") -> "Wide":
        """Return the elementwise difference, which must not be negative anywhere."""
        low = self.low - other.low
        return Wide(self.high - other.high + (low >> BITS), low & ((1 << BITS) - 1))


def product(one: Tensor, other: Tensor) -> Wide:
    """Return the elementwise product of `one` int32 in 0..2**30 and `other` int32 in 0..2**24,
    computed by halves of 12 bits.
    """
    mask = (1 << HALF) - 1
    a, b, c = one & mask, (one >> HALF) & mask, one >> BITS
    x, y = other & mask, other >> HALF
    first = a * x
    second = a * y + b * x + (first >> HALF)
    third = b * y + c * x + (second >> HALF)
    return Wide(third + ((c * y) << HALF), (first & mask) | ((second & mask) << HALF))


def prefix_end(gaps: Tensor, weights: Tensor, top_p: Tensor, bin_bits: int, limit: int) -> tuple[Tensor, Wide]:
    """Return the gap int32[B] at which the running weight of gaps int32[B, V] reaches top_p
    int32[B] / 2**24 of its total (`limit` if it never does), and what the weights of the smaller
    gaps lack of that share, [B, 1]. Weights are int32[B, V], gaps 0..limit. Two histograms find the
    gap: of the upper bits, then of the lowest `bin_bits`.
    """
    bins, steps = gaps >> bin_bits, 1 << bin_bits
    running = _running(bins, weights, (limit >> bin_bits) + 1)
    wanted = _share(running.at(torch.full_like(bins[:, :1], running.low.shape[1] - 1)), top_p[:, None])
    reached, rest = _first_reaching(running, wanted)
    inside = bins.bitwise_xor_(reached).clamp_(max=1).bitwise_xor_(1)
    step, rest = _first_reaching(_running(gaps & (steps - 1), weights * inside, steps), rest)
    return ((reached << bin_bits) + step).clamp_(max=limit)[:, 0], rest


def weight_of_share(weights: Tensor, share: Tensor) -> Tensor:
    """Return int32[B]: ceil of share int32[B] / 2**24 of the sum of weights int32[B, V], at most
    2**31 - 1.
    """
    total = _running(torch.zeros_like(weights), weights, 1)
    least = _share(total, share[:, None])
    is_beyond = least.high >= 1 << (31 - BITS)
    return ((least.high << BITS) | least.low).masked_fill_(is_beyond, MOST)[:, 0]


def ties(rest: Wide, each: Tensor) -> Tensor:
    """Return int32[B]: the least count for which count * `each` int32[B] (at least 1) reaches
    `rest` [B, 1]. Inexact for counts beyond the vocabulary size, which do not matter.
    """
    guess = (rest.high.float() * (1 << BITS) + rest.low) / each[:, None]
    first = (guess.clamp(max=MOST_TIES).to(torch.int32) - NEAR).clamp_(min=0)
    counts = first + torch.arange(2 * NEAR + 1, dtype=torch.int32, device=each.device)
    return first[:, 0] + product(each[:, None].expand_as(counts), counts).below(rest).sum(-1, dtype=torch.int32)


def _running(index: Tensor, weights: Tensor, size: int) -> Wide:
    """Return running sums [B, size] of weights int32[B, V], each below 2**31, by their bins
    int32[B, V].
    """
    parts = []
    for shift in (0, 8, 16, 24):
        sums = torch.zeros(index.shape[0], size, dtype=torch.int32, device=index.device)
        part = sums.scatter_add_(1, index, (weights >> shift).bitwise_and_(255))
        parts.append(part.cumsum(-1, dtype=torch.int32))
    low, second, third, high = parts
    second += low >> 8
    third += second >> 8
    return Wide(high.add_(third >> 8), (low & 255) | ((second & 255) << 8) | ((third & 255) << 16))


def _share(total: Wide, top_p: Tensor) -> Wide:
    """Return ceil(total * top_p / 2**24), elementwise; top_p int32 of the shape of the total, at
    most 2**24 + 1.
    """
    rest = product(total.low, top_p)
    up = rest.high + (rest.low > 0)
    return product(total.high, top_p).plus(Wide(up >> BITS, up & ((1 << BITS) - 1)))


def _first_reaching(running: Wide, wanted: Wide) -> tuple[Tensor, Wide]:
    """Return the first column int32[B, 1] that reaches `wanted` [B, 1], or else the last one, and
    `wanted` minus the sum of the columns before it.
    """
    size = running.low.shape[1]
    column = running.below(wanted).sum(-1, keepdim=True, dtype=torch.int32).clamp_(max=size - 1)
    before = running.at((column - 1).clamp_(min=0))
    is_first = column == 0
    return column, wanted.minus(Wide(*(part.masked_fill(is_first, 0) for part in before)))
