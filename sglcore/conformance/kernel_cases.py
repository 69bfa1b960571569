"""Inputs for every entry of the kernel table: ragged sizes, zero rows, strided views, and what padding may bring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sglcore.models.quantized import QuantizedWeight
from sglcore.sampling.batch import SamplingBatch
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.race import make_race_tables
from sglcore.sampling.sampler import make_state

TOKENS = (0, 1, 3, 33)
WIDTH = 48
COLUMNS = 160
"""Of quantised weights: whole groups of 32, and not of 64 or 128."""

HEAD_DIMS = (16, 64)
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One call: its arguments on the host, and which of them the entry may write (by place; the others it may not)."""

    text: str
    args: tuple[Any, ...]
    writes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Built:
    """An argument that is made on the device it is for."""

    make: Callable[[str], Any]


class Draw:
    """Seeded random tensors on the host; floating-point ones are exact in bfloat16."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator(device="cpu").manual_seed(seed)
        self.dtype = dtype

    def values(self, *shape: int) -> Tensor:
        """Normal, of this drawer's dtype."""
        drawn = torch.randn(shape, generator=self._generator, device="cpu")
        return drawn.to(torch.bfloat16).to(self.dtype)

    def rows(self, tokens: int, width: int, strided: bool) -> Tensor:
        """[tokens, width], a slice of wider rows where asked."""
        return self.values(tokens, width + 32)[:, 16 : 16 + width] if strided else self.values(tokens, width)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """low..high - 1."""
        return torch.randint(low, high, shape, generator=self._generator, dtype=dtype, device="cpu")

    def permutation(self, count: int) -> Tensor:
        """0..count - 1, shuffled."""
        return torch.randperm(count, generator=self._generator, device="cpu")


Make = Callable[[Draw, int, bool], Iterator[tuple[Any, ...]]]


def _linear(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    yield draw.rows(tokens, WIDTH, strided), draw.values(80, WIDTH) * 0.15, None
    yield draw.rows(tokens, WIDTH, strided), draw.values(17, WIDTH) * 0.15, draw.values(17)


def _gated_linear(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    yield draw.rows(tokens, WIDTH, strided), draw.values(80, WIDTH) * 0.15


def _head(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    yield draw.rows(tokens, WIDTH, strided), draw.values(29, WIDTH) * 0.15


def _pack_head(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    yield draw.rows(tokens, WIDTH, strided), draw.values(29, WIDTH) * 0.15, draw.ints(0, 29, tokens)


def _whole_rows(draw: Draw, tokens: int, strided: bool) -> Tensor:
    """[tokens, COLUMNS] of integers, 127 among each 32: rounding them to 8 bits, by any group, changes nothing."""
    rows = draw.ints(-127, 128, tokens, COLUMNS + 32)[:, 16 : 16 + COLUMNS]
    rows[:, ::32] = 127
    return rows.to(draw.dtype) if strided else rows.to(draw.dtype).contiguous()


def _quantize_linear(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    """Weights that lie on the steps, both ends of which each 32 columns have."""
    for kind, low, high in (("int8", -127, 127), ("int4", -8, 7)):
        steps = draw.ints(low, high + 1, 21, COLUMNS)
        steps[:, ::32], steps[:, 1::32] = low, high
        yield _whole_rows(draw, tokens, strided), (steps / 64).to(draw.dtype), kind


def _pack_quantized(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    """Scales and zeros that float16 holds; the last group may be cut."""
    for bits, group, has_zeros in ((4, 32, True), (4, 128, False), (8, 64, False), (8, 32, True)):
        groups = -(-COLUMNS // group)
        codes = draw.ints(0, 1 << bits, 21, COLUMNS, dtype=torch.uint8)
        scales = 0.5 ** draw.ints(5, 9, 21, groups).float()
        zeros = draw.ints(0, 2 << bits, 21, groups).float() / 2 if has_zeros else None
        weight = QuantizedWeight(codes, scales, zeros, bits, group, draw.dtype)
        yield _whole_rows(draw, tokens, strided), Built(partial(_moved, weight))


def _moved(weight: QuantizedWeight, device: str) -> QuantizedWeight:
    zeros = None if weight.zeros is None else weight.zeros.to(device)
    return replace(weight, codes=weight.codes.to(device), scales=weight.scales.to(device), zeros=zeros)


def _embedding(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    yield draw.ints(0, 29, tokens), draw.values(29, WIDTH)


def _rms_norm(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    yield draw.rows(tokens, WIDTH, strided), draw.values(WIDTH), 1e-5
    if not strided:
        yield draw.values(tokens, 4, 16), draw.values(16), 1e-6


def _add_rms_norm(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    yield draw.rows(tokens, WIDTH, strided), draw.rows(tokens, WIDTH, strided), draw.values(WIDTH), 1e-5


def _layer_norm(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    yield draw.rows(tokens, WIDTH, strided), draw.values(WIDTH), draw.values(WIDTH), 1e-5


def _rotary(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    for dim in HEAD_DIMS:
        for rotated in (dim, dim // 2):
            angles = torch.arange(40, device="cpu")[:, None] * torch.linspace(0.01, 1, rotated // 2, device="cpu")
            cache = torch.cat([angles.cos(), angles.sin()], dim=1)
            together = draw.values(tokens, 6 * dim)
            q, k = together[:, : 4 * dim], together[:, 4 * dim :]
            parts = (q, k) if strided else (q.contiguous(), k.contiguous())
            yield *parts, draw.ints(0, 40, tokens), cache, dim


def _wide(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    yield (draw.rows(tokens, 2 * WIDTH, strided),)


def _top_k(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    """No two logits of a row are equal, so that there is one right order."""
    for experts, k, normalize in ((5, 2, True), (16, 4, False), (8, 8, True)):
        ranks = [draw.permutation(experts) for _ in range(tokens)]
        logits = torch.stack(ranks).to(draw.dtype) / 2 if ranks else draw.values(0, experts)
        yield logits, k, normalize


def _moe(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    """Rows without an expert hold what is not a number."""
    for experts, k in ((5, 2), (4, 1)):
        hidden, weights = draw.rows(tokens, WIDTH, strided).clone(), draw.values(tokens, k).abs()
        chosen = [draw.permutation(experts)[:k] for _ in range(tokens)]
        ids = torch.stack(chosen) if chosen else draw.ints(0, experts, 0, k, dtype=torch.int64)
        if tokens > 2:
            ids[1], hidden[1], weights[1] = -1, float("nan"), float("nan")
        yield hidden, weights, ids, draw.values(experts, 64, WIDTH) * 0.15, draw.values(experts, WIDTH, 32) * 0.15


def _store_kv(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    """Some padding rows name cell 0; every other cell is distinct."""
    dim = 16
    together = draw.values(tokens, 2, 2, dim)
    key, value = (
        (together[:, 0], together[:, 1]) if strided else (draw.values(tokens, 2, dim), draw.values(tokens, 2, dim))
    )
    cells = draw.permutation(71)[:tokens] + 1
    yield key, value, draw.values(80, 2, dim), draw.values(80, 2, dim), cells


def _rotary_and_store(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    """One padding row names cell 0; the caches' other cells are distinct."""
    for q, k, positions, cache, dim in _rotary(draw, tokens, strided):
        cells = draw.permutation(71)[:tokens] + 1
        cells[tokens // 2 : tokens // 2 + 1] = 0
        caches = draw.values(80, 2, dim), draw.values(80, 2, dim)
        yield q, k, draw.rows(tokens, 2 * dim, strided), positions, cache, dim, *caches, cells


def _norm_rotary_and_store(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    for args in _rotary_and_store(draw, tokens, strided):
        yield *args, draw.values(args[5]), draw.values(args[5]), 1e-6


def _cache_locations(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    for page_size in (1, 3, 16):
        table = draw.ints(0, 90, 7, 12)
        out = torch.full((tokens,), -7, dtype=torch.int64, device="cpu")
        yield table, draw.ints(0, 7, tokens), draw.ints(0, 12 * page_size, tokens), page_size, out


_REQUESTS: tuple[Mapping[str, Any], ...] = (
    MappingProxyType({"temperature": 1.0}),
    MappingProxyType({"temperature": 0.0}),
    MappingProxyType({"temperature": 0.7, "top_k": 5}),
    MappingProxyType({"temperature": 1.3, "top_p": 0.8, "min_p": 0.02}),
)


def _draw(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    """Every kind of request in one batch, ties, and rows that no token can be drawn from."""
    vocab = 301
    logits = draw.rows(tokens, vocab, strided) * 4
    if tokens > 3:
        logits[2], logits[5], logits[6, 17] = 0.5, float("-inf"), float("nan")
    asked = [(SamplingParams(**_REQUESTS[row % len(_REQUESTS)]), 7 * row + 1) for row in range(tokens)]
    rows, places = SamplingBatch.from_params(asked), draw.ints(1, 99, tokens)
    state = Built(lambda device: make_state(rows, places.to(device)))
    yield logits, state, Built(lambda device: make_race_tables(vocab, device))


def _greedy(draw: Draw, tokens: int, strided: bool) -> Iterator[tuple[Any, ...]]:
    """Ties, and rows that no token can be drawn from."""
    logits = draw.rows(tokens, 301, strided) * 4
    if tokens > 3:
        logits[2], logits[5], logits[6, 17] = 0.5, float("-inf"), float("nan")
    yield (logits,)


_MAKERS: Mapping[str, Make] = MappingProxyType(
    {
        "linear": _linear,
        "pack_linear": _linear,
        "pack_parts": _linear,
        "embedding": _embedding,
        "rms_norm": _rms_norm,
        "add_rms_norm": _add_rms_norm,
        "layer_norm": _layer_norm,
        "rotary": _rotary,
        "silu_and_mul": _wide,
        "gelu": _wide,
        "top_k_routing": _top_k,
        "moe": _moe,
        "store_kv": _store_kv,
        "cache_locations": _cache_locations,
        "draw": _draw,
        "greedy": _greedy,
        "rotary_and_store": _rotary_and_store,
        "norm_rotary_and_store": _norm_rotary_and_store,
        "gated_linear": _gated_linear,
        "pack_quantized": _pack_quantized,
        "quantize_linear": _quantize_linear,
        "pack_head": _pack_head,
        "head": _head,
    }
)
_WRITES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "add_rms_norm": (0, 1),
        "store_kv": (2, 3),
        "cache_locations": (4,),
        "rotary_and_store": (6, 7),
        "norm_rotary_and_store": (6, 7),
    }
)
CELLS: Mapping[str, int] = MappingProxyType(
    {"store_kv": 4, "cache_locations": 4, "rotary_and_store": 8, "norm_rotary_and_store": 8}
)
"""Entries whose results are, beside what they return, what they write: where their cell indices are."""
_ONE_DTYPE = frozenset({"cache_locations", "draw", "greedy"})


def kernel_cases(entry: str) -> Iterator[KernelCase]:
    """Every case of an entry. Raises KeyError for an entry that the kit does not know, which must not pass unseen."""
    make = _MAKERS[entry]
    for dtype in DTYPES[:1] if entry in _ONE_DTYPE else DTYPES:
        for seed, tokens in enumerate(TOKENS):
            for strided in (False, True):
                name = str(dtype).removeprefix("torch.")
                text = f"{tokens} rows of {name}{', strided' if strided else ''}"
                for args in make(Draw(seed, dtype), tokens, strided):
                    yield KernelCase(text, args, _WRITES.get(entry, ()))
