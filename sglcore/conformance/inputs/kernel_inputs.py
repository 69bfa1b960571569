"""Test inputs for entries of the kernel table that do not accept arbitrary values.

One function for each entry, with the entry's name. It yields tuples of arguments on the host for
`tokens` rows, drawn from `drawn`; with `strided`, rows are slices of wider rows where the entry has
such rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sglcore.conformance.inputs.sampling_state import make_state
from sglcore.models.weights.quantized_weight import QuantizedWeight
from sglcore.runtime.kernels.row_codec import E4M3FN
from sglcore.sampling.gumbel_race import make_race_tables
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch

WIDTH = 48
COLUMNS = 160
"""Columns of quantised weights: whole groups of 32, but not of 64 or 128."""
WIDE = 1 + 2**-9
"""Factor that makes float32 values that narrower dtypes can not represent."""
HEAD_DIMS = (16, 64)
VOCAB = 301

Inputs = Iterator[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Built:
    """A kernel argument that is no host tensor: `make(device)` makes and returns it on the device
    that uses it, given by torch's name."""

    make: Callable[[str], Any]


class Draw:
    """Seeded generator of random tensors on the host; floating-point ones are exact in bfloat16.
    `dtype`: that of `values` and `rows`. `float8`: the 8-bit float of rows that are stored in eight
    bits."""

    def __init__(self, seed: int, dtype: torch.dtype, float8: str = E4M3FN) -> None:
        self._generator = torch.Generator(device="cpu").manual_seed(seed)
        self.dtype, self.float8 = dtype, float8

    def values(self, *shape: int) -> Tensor:
        """Return normal values of this shape, in this drawer's dtype."""
        drawn = torch.randn(shape, generator=self._generator, device="cpu")
        return drawn.to(torch.bfloat16).to(self.dtype)

    def rows(self, tokens: int, width: int, strided: bool) -> Tensor:
        """Return normal values [tokens, width] in this drawer's dtype; with `strided`, as a slice
        of rows that are 32 elements wider."""
        return self.values(tokens, width + 32)[:, 16 : 16 + width] if strided else self.values(tokens, width)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return integers of this shape and dtype, from `low` to `high` - 1."""
        return torch.randint(low, high, shape, generator=self._generator, dtype=dtype, device="cpu")

    def permutation(self, count: int) -> Tensor:
        """Return the numbers 0 to count - 1, shuffled, int64 [count]."""
        return torch.randperm(count, generator=self._generator, device="cpu")


def pack_linear(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield what tests `KernelTable.pack_linear` and `pack_parts`: `tokens` rows drawn from
    `drawn`, a weight, and a bias or None, as `linear` takes them. `strided`: rows are slices of
    wider rows."""
    yield drawn.rows(tokens, WIDTH, strided), drawn.values(80, WIDTH) * 0.15, None
    yield drawn.rows(tokens, WIDTH, strided), drawn.values(17, WIDTH) * 0.15, drawn.values(17)


pack_parts = pack_linear


def pack_head(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield what tests `KernelTable.pack_head`: `tokens` rows to multiply, a weight, and ids of the
    weight's rows, drawn from `drawn`. `strided`: rows are slices of wider rows."""
    yield drawn.rows(tokens, WIDTH, strided), drawn.values(29, WIDTH) * 0.15, drawn.ints(0, 29, tokens)


def _whole_rows(drawn: Draw, tokens: int, strided: bool) -> Tensor:
    """Return [tokens, COLUMNS] integers with a 127 in each 32 columns, in the drawer's dtype:
    quantising them to 8 bits, by any group, changes nothing."""
    rows = drawn.ints(-127, 128, tokens, COLUMNS + 32).to(drawn.dtype)[:, 16 : 16 + COLUMNS]
    rows[:, ::32] = 127
    return rows if strided else rows.contiguous()


def quantize_linear(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield rows to multiply, a weight and the kind ("int8", then "int4"), for
    `KernelTable.quantize_linear`. Each weight is on the quantisation steps; each 32 columns have
    the lowest and the highest step."""
    for kind, low, high in (("int8", -127, 127), ("int4", -8, 7)):
        steps = drawn.ints(low, high + 1, 21, COLUMNS)
        steps[:, ::32], steps[:, 1::32] = low, high
        yield _whole_rows(drawn, tokens, strided), (steps / 64).to(drawn.dtype), kind


def pack_quantized(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield rows to multiply and a quantised weight (a `Built`), for `KernelTable.pack_quantized`,
    with scales and zeros that float16 can represent; the last group may be cut."""
    for bits, group, has_zeros in ((4, 32, True), (4, 128, False), (8, 64, False), (8, 32, True)):
        groups = -(-COLUMNS // group)
        codes = drawn.ints(0, 1 << bits, 21, COLUMNS, dtype=torch.uint8)
        scales = 0.5 ** drawn.ints(5, 9, 21, groups).float()
        zeros = drawn.ints(0, 2 << bits, 21, groups).float() / 2 if has_zeros else None
        weight = QuantizedWeight(codes, scales, zeros, bits, group, drawn.dtype)
        yield _whole_rows(drawn, tokens, strided), Built(partial(_moved, weight))


def _moved(weight: QuantizedWeight, device: str) -> QuantizedWeight:
    zeros = None if weight.zeros is None else weight.zeros.to(device)
    return replace(weight, codes=weight.codes.to(device), scales=weight.scales.to(device), zeros=zeros)


def embedding(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.embedding`, for `tokens` rows drawn from `drawn`:
    ids, each below the vocabulary. `strided` has no effect."""
    yield drawn.ints(0, 29, tokens), drawn.values(29, WIDTH)


def rotary(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.rotary`, for `tokens` rows drawn from `drawn`:
    heads rotated whole and in half; with `strided`, q and k are slices of one tensor."""
    for dim in HEAD_DIMS:
        for rotated in (dim, dim // 2):
            angles = torch.arange(40, device="cpu")[:, None] * torch.linspace(0.01, 1, rotated // 2, device="cpu")
            cache = torch.cat([angles.cos(), angles.sin()], dim=1)
            together = drawn.values(tokens, 6 * dim)
            q, k = together[:, : 4 * dim], together[:, 4 * dim :]
            parts = (q, k) if strided else (q.contiguous(), k.contiguous())
            yield *parts, drawn.ints(0, 40, tokens), cache, dim


def top_k_routing(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.top_k_routing`, for `tokens` rows drawn from
    `drawn`. No two logits of a row are equal, so that there is one right order. `strided` has no
    effect."""
    for experts, k, normalize in ((5, 2, True), (16, 4, False), (8, 8, True)):
        ranks = [drawn.permutation(experts) for _ in range(tokens)]
        logits = torch.stack(ranks).to(drawn.dtype) / 2 if ranks else drawn.values(0, experts)
        yield logits, k, normalize


def sigmoid_routing(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.sigmoid_routing`, for `tokens` rows drawn from
    `drawn`: one group, and the best three of four; no two sums of a row are equal. `strided` has no
    effect."""
    for groups, top_groups, normalize in ((1, 1, True), (4, 3, False)):
        ranks = [drawn.permutation(16) for _ in range(tokens)]
        logits = (torch.stack(ranks).to(drawn.dtype) - 8) / 4 if ranks else drawn.values(0, 16)
        yield logits, torch.linspace(-0.07, 0.09, 16, device="cpu"), 5, groups, top_groups, normalize, 2.5


def group_limited_routing(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.group_limited_routing`, for `tokens` rows drawn
    from `drawn`: all groups, and the best two of four; no two logits of a row are equal. `strided`
    has no effect."""
    for groups, top_groups in ((1, 1), (4, 2)):
        ranks = [drawn.permutation(16) for _ in range(tokens)]
        logits = (torch.stack(ranks).to(drawn.dtype) - 8) / 4 if ranks else drawn.values(0, 16)
        yield logits, 5, groups, top_groups, 16.0


def sqrtsoftplus_routing(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.sqrtsoftplus_routing`, for `tokens` rows drawn from
    `drawn`. No two sums of a row are equal, and some of the largest are below zero. `strided` has
    no effect."""
    ranks = [drawn.permutation(16) for _ in range(tokens)]
    logits = (torch.stack(ranks).to(drawn.dtype) - 8) / 4 if ranks else drawn.values(0, 16)
    yield logits, torch.linspace(-1.57, -0.81, 16, device="cpu"), 5, 1.5


def hash_routing(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.hash_routing`, for `tokens` rows drawn from
    `drawn`. Each token's experts are distinct. `strided`: rows are slices of wider rows."""
    table = torch.stack([drawn.permutation(16)[:5] for _ in range(29)]).int()
    yield drawn.rows(tokens, 16, strided), drawn.ints(0, 29, tokens), table, 1.5


def moe(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.moe`, for `tokens` rows drawn from `drawn`. Rows
    without an expert hold NaN. `strided`: rows are slices of wider rows."""
    for experts, k in ((5, 2), (4, 1)):
        hidden, weights = drawn.rows(tokens, WIDTH, strided), drawn.values(tokens, k).abs()
        chosen = [drawn.permutation(experts)[:k] for _ in range(tokens)]
        ids = torch.stack(chosen) if chosen else drawn.ints(0, experts, 0, k, dtype=torch.int64)
        if tokens > 2:
            ids[1], hidden[1], weights[1] = -1, float("nan"), float("nan")
        yield hidden, weights, ids, drawn.values(experts, 64, WIDTH) * 0.15, drawn.values(experts, WIDTH, 32) * 0.15


def relu2_moe(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.relu2_moe`, for `tokens` rows drawn from `drawn`:
    as `moe`, without gates."""
    for hidden, weights, ids, w13, w2 in moe(drawn, tokens, strided):
        yield hidden, weights, ids, w13[:, :32].contiguous(), w2


def clamped_moe(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.clamped_moe`, for `tokens` rows drawn from `drawn`:
    as `moe`, with biases, and with a limit that many values exceed."""
    for hidden, weights, ids, w13, w2 in moe(drawn, tokens, strided):
        b13, b2 = drawn.values(*w13.shape[:2]), drawn.values(*w2.shape[:2])
        yield hidden, weights, ids, w13, b13, w2, b2, 1.702, 1.5


def limited_moe(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.limited_moe`, for `tokens` rows drawn from `drawn`:
    as `moe`, with a limit that many values exceed."""
    yield *next(moe(drawn, tokens, strided)), 0.7


def mxfp4_moe(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.mxfp4_moe`, for `tokens` rows drawn from `drawn`:
    as `clamped_moe`, of random codes with small exponents, in rows of whole groups of 32.
    `strided`: rows are slices of wider rows."""
    for narrow, weights, ids, *_ in moe(drawn, tokens, strided=False):
        hidden = drawn.rows(tokens, 64, strided)
        hidden[narrow.isnan().any(-1)] = float("nan")
        packed: list[torch.Tensor] = []
        for columns in (64, 32):
            packed.append(drawn.ints(0, 256, 5, 64, columns // 32, 16, dtype=torch.uint8))
            packed.append(drawn.ints(121, 125, 5, 64, columns // 32, dtype=torch.uint8))
            packed.append(drawn.values(5, 64))
        yield hidden, weights, ids, *packed, 1.702, 1.5


def store_kv(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.store_kv`, for `tokens` rows drawn from `drawn`,
    with distinct KV slots above 0; with `strided`, keys and values are slices of one tensor."""
    dim = 16
    together = drawn.values(tokens, 2, 2, dim)
    key, value = (
        (together[:, 0], together[:, 1]) if strided else (drawn.values(tokens, 2, dim), drawn.values(tokens, 2, dim))
    )
    cells = drawn.permutation(71)[:tokens] + 1
    yield key, value, drawn.values(80, 2, dim), drawn.values(80, 2, dim), cells


def rotary_and_store(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.rotary_and_store`, for `tokens` rows drawn from
    `drawn`. One padding row names KV slot 0; the other KV slots are distinct. `strided`: rows are
    slices of wider rows."""
    for q, k, positions, cache, dim in rotary(drawn, tokens, strided):
        cells = drawn.permutation(71)[:tokens] + 1
        cells[tokens // 2 : tokens // 2 + 1] = 0
        caches = drawn.values(80, 2, dim), drawn.values(80, 2, dim)
        yield q, k, drawn.rows(tokens, 2 * dim, strided), positions, cache, dim, *caches, cells


def norm_rotary_and_store(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.norm_rotary_and_store`, for `tokens` rows drawn
    from `drawn`: as `rotary_and_store`, with the weights of both norms, in float32 for heads that
    are rotated in part. `strided`: rows are slices of wider rows."""
    for args in rotary_and_store(drawn, tokens, strided):
        weights = [drawn.values(args[5]) for _ in range(2)]
        if args[4].shape[1] < args[5]:
            weights = [weight.float() * WIDE for weight in weights]
        yield *args, *weights, 1e-6


def cache_locations(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.cache_locations`, for `tokens` rows drawn from
    `drawn`: pages of one token and of several. `strided` has no effect."""
    for page_size in (1, 3, 16):
        table = drawn.ints(0, 90, 7, 12)
        out = torch.full((tokens,), -7, dtype=torch.int64, device="cpu")
        yield table, drawn.ints(0, 7, tokens), drawn.ints(0, 12 * page_size, tokens), page_size, out


_REQUESTS: tuple[Mapping[str, Any], ...] = (
    MappingProxyType({"temperature": 1.0}),
    MappingProxyType({"temperature": 0.0}),
    MappingProxyType({"temperature": 0.7, "top_k": 5}),
    MappingProxyType({"temperature": 1.3, "top_p": 0.8, "min_p": 0.02}),
)


def draw(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.draw`, for `tokens` rows drawn from `drawn`: every
    kind of request in one batch. `strided`: logits are slices of wider rows."""
    asked = [(SamplingParams(**_REQUESTS[row % len(_REQUESTS)]), 7 * row + 1) for row in range(tokens)]
    rows, places = SamplingBatch.from_params(asked), drawn.ints(1, 99, tokens)
    state, tables = Built(lambda device: make_state(rows, places.to(device))), Built(partial(make_race_tables, VOCAB))
    for inputs in greedy(drawn, tokens, strided):
        yield *inputs, state, tables


def greedy(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.greedy`, for `tokens` rows drawn from `drawn`:
    ties, and rows from which no token can be drawn. `strided`: logits are slices of wider rows."""
    logits = drawn.rows(tokens, VOCAB, strided).mul_(4)
    if tokens > 3:
        logits[2], logits[5], logits[6, 17] = 0.5, float("-inf"), float("nan")
    yield (logits,)


MOST_SINGLES = 5
"""Largest number of rows of one token; more would test nothing new."""
PoolRows = tuple[Tensor, Tensor | None, Tensor | None]


def rows_of_pool(drawn: Draw, tokens: int) -> Iterator[tuple[int, int, PoolRows]]:
    """Yield (number of tokens, pool size, (slots, starts, lengths)): first one token for each row,
    with padding as the second row; then rows of several tokens, followed by two padding rows, as in
    a padded batch, and by one token that belongs to no row."""
    singles = min(tokens, MOST_SINGLES)
    slots = drawn.permutation(singles).int() + 1
    slots[1:2] = 0
    yield singles, singles + 1, (slots, None, None)
    lengths = [1, 2, tokens - 4] if tokens > 4 else [tokens - 1] * (tokens > 1)
    starts = torch.tensor([*lengths, 0, 0], device="cpu").cumsum(0).roll(1)
    starts[[0, -2, -1]] = 0
    slots = torch.cat((drawn.permutation(len(lengths)) + 1, torch.zeros(2, dtype=torch.int64, device="cpu")))
    yield tokens, len(lengths) + 2, (slots.int(), starts.int(), torch.tensor([*lengths, 1, 1], device="cpu").int())


def rows_of_states(drawn: Draw, tokens: int) -> Iterator[tuple[int, int, tuple[Tensor | None, ...]]]:
    """Yield the rows of `rows_of_pool` without `targets`, and with them: new states go to pool rows
    after all slots, but every second row stores none, and the third of more than four rows writes
    its state in place."""
    for count, size, rows in rows_of_pool(drawn, tokens):
        yield count, size, (*rows, None)
        targets = torch.arange(size, size + len(rows[0]), device="cpu", dtype=torch.int32)
        targets[1::2] = 0
        if len(rows[0]) > 4:
            targets[2] = rows[0][2]
        yield count, 2 * size, (*rows, targets)


def causal_conv(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.causal_conv`, for at most `tokens` rows drawn from
    `drawn`: convolutions that reach three tokens back, and two, each for all rows of
    `rows_of_states`. `strided`: rows are slices of wider rows."""
    for taps, has_bias, silu in ((4, True, True), (3, False, False)):
        for count, size, rows in rows_of_states(drawn, tokens):
            weight, bias = drawn.values(taps, WIDTH), drawn.values(WIDTH) if has_bias else None
            yield drawn.rows(count, WIDTH, strided), weight, bias, silu, drawn.values(size, taps - 1, WIDTH), *rows


def gated_delta_rule(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.gated_delta_rule`, for at most `tokens` rows drawn
    from `drawn`: fewer query heads than value heads, then the same number of both, each for all
    rows of `rows_of_states`. `strided`: rows are slices of wider rows."""
    for key_heads, heads, key_size, width in ((2, 4, 16, 16), (1, 1, 24, 40)):
        for count, size, rows in rows_of_states(drawn, tokens):
            qkv = drawn.rows(count, 2 * key_heads * key_size + heads * width, strided)
            a, b, wide = drawn.rows(count, heads, strided), drawn.rows(count, heads, strided), _wide(drawn)
            yield qkv, a, b, wide(heads), wide(heads), wide(size, heads, key_size, width), *rows


def selective_scan(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.selective_scan`, for at most `tokens` rows drawn
    from `drawn`: two groups of heads with a limit that cuts the time step, and one group without a
    limit, each for all rows of `rows_of_states`. `strided`: rows are slices of wider rows."""
    for groups, heads, head_dim, width, most in ((2, 4, 16, 16, 1.0), (1, 1, 24, 40, math.inf)):
        for count, size, rows in rows_of_states(drawn, tokens):
            xbc, dt = (
                drawn.rows(count, heads * head_dim + 2 * groups * width, strided),
                drawn.rows(count, heads, strided),
            )
            wide = _wide(drawn)
            states = wide(size, heads, head_dim, width)
            yield xbc, dt, wide(heads), wide(heads), wide(heads), 0.05, most, states, *rows


def _wide(drawn: Draw) -> Callable[..., Tensor]:
    """Return a function that draws float32 values of a given shape, whatever the drawer's dtype."""
    return lambda *shape: drawn.values(*shape).float()
