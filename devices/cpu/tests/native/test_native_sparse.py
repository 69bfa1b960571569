"""The native kernels of sparse attention match the reference, for all memory layouts of rows, and
write nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from devices.cpu.tests.native.guarded import GuardedResults, guarded_copy
from sglcore.conformance.inputs import kernel_inputs_sparse
from sglcore.conformance.inputs.kernel_inputs import Draw, Inputs
from sglcore.conformance.laws.laws_kernels import RELATIVE, relative_error
from sglcore.runtime.kernels import reference_sparse
from sglcore.runtime.kernels.row_codec import RowCodec
from sglcore.runtime.kernels.sparse_entries import SparseKernels
from sglcore.runtime.kernels.table import KernelTable
from sglcore_cpu.kernels.latent import Latent
from sglcore_cpu.kernels.sparse import SparseAttention
from sglcore_cpu.native import Engine

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
BOUNDS = {F32: 5e-6, BF16: 1.5e-2}
"""Error bounds relative to the largest value; in bfloat16 a rounding step of the result and of the
weights before it."""
ENTRIES = {name: entry for name, entry in KernelTable.declared().items() if name in vars(SparseKernels)}


def wide_mqa(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield several chunks and blocks, panels of heads and transposed squares, none of them full;
    rows of every dtype."""
    for heads, size, value_size, (width, more), rows_as in (
        (5, 40, 40, (200, 0), drawn.dtype),
        (36, 96, 80, (70, 150), F16),
        (17, 72, 64, (129, 64), F32),
    ):
        q = drawn.values(tokens, heads, size) * 3
        pools = [drawn.values(90, size).to(rows_as) for _ in range(2)]
        lists = [drawn.ints(1, 90, tokens, each) for each in (width, more)]
        for each, pool in zip(lists, pools, strict=True):
            each[torch.arange(each.shape[1]) >= drawn.ints(0, each.shape[1] + 1, tokens, 1)] = -1
            unnamed = torch.ones(90, dtype=torch.bool)
            unnamed[each[each >= 0].long()] = False
            pool[unnamed] = math.nan
        rest = (pools[1], lists[1]) if more else (None, None)
        yield q, pools[0], lists[0], *rest, drawn.values(heads).float() if more else None, 0.2, value_size, None


def long_codes(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield codec groups of several blocks of elements, the last one cut, and rows of float8
    only."""
    for *args, _ in long_paged(drawn, tokens, strided):
        codec = RowCodec(40, exact=8 if strided else 0, group=64 if strided else 16)
        args[1] = codec.encode(args[1] * torch.exp(3 * drawn.values(len(args[1]), 1).float()))
        yield *args, codec


def stored_codes(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield numbers of every magnitude, zeros, and halves of a code's step."""
    table, places = drawn.values(50, 8).float(), drawn.permutation(40)[:tokens]
    for codec in (RowCodec(72, exact=8), RowCodec(72, exact=8, group=16), RowCodec(72)):
        x = drawn.rows(tokens, 72, strided) * torch.exp2(drawn.ints(-30, 12, tokens, 72).float()).to(drawn.dtype)
        x[:, 16:32] = 0
        rows = torch.zeros(40, codec.num_bytes, dtype=torch.uint8)
        yield x, torch.ones(64), 1e-6, drawn.ints(0, 50, tokens), table, rows, places, codec


def long_paged(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield requests of several chunks; one token sees no rows."""
    lens = torch.tensor([700, 64, 0, 513, 1][:tokens], dtype=torch.int32)
    table = drawn.permutation(6 * 24).view(6, 24).int()
    slots = drawn.permutation(6)[: len(lens)].int()
    rows = drawn.values(6 * 24 * 32, 40)
    yield drawn.values(len(lens), 18, 40), rows, table, slots, lens, 32, 0.3, 24, None


def many_keys(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield several chunks of keys and panels of heads, with weights in float32."""
    for *args, codec in long_paged(drawn, tokens, strided):
        q, keys, *pages = args[:6]
        yield q, drawn.values(*q.shape[:2]).float(), keys, *pages, 0.1, 750, codec


def ties(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield logits without equal values, and logits with many equal values and zeros of both signs;
    lengths above, equal to and below k."""
    lens = torch.tensor([900, 100, 99, 0, 350][:tokens], dtype=torch.int32)
    table = drawn.permutation(6 * 32).view(6, 32).int()
    slots = drawn.permutation(6)[: len(lens)].int()
    for logits in (
        drawn.values(len(lens), 1000),
        drawn.ints(-3, 4, len(lens), 1000) * drawn.values(len(lens), 1000).sign(),
    ):
        logits = logits.float()
        logits[torch.arange(1000) >= lens.unsqueeze(1)] = -math.inf
        yield logits, lens, table, slots, 32, 100


def long_blocks(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield two strips of channels, the second not full, over many tokens."""
    state, ape = drawn.values(64, 160).float(), drawn.values(32, 80).float()
    reads = drawn.ints(-40, tokens, tokens, 32) if tokens else drawn.ints(0, 1, 0, 32)
    yield drawn.rows(tokens, 160, strided), state, ape, reads, drawn.permutation(80)[:tokens] % 64


def wide_streams(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield streams of two chunks of columns."""
    fn, base = drawn.values(24, 4 * 300).float() * 0.05, drawn.values(24).float()
    yield drawn.values(tokens, 4, 300), fn, base, torch.tensor([0.7, 1.1, 1.6]), 1e-6, 1e-6, 20


def many_groups(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield more outputs than a block has, with weights stored by rows and by columns."""
    x = drawn.rows(tokens, 2 * 72, strided).unflatten(1, (2, 72))
    for weight in (drawn.values(2, 330, 72), drawn.values(2, 72, 330).transpose(1, 2)):
        yield x, weight * 0.15


CASES: tuple[tuple[str, Callable[..., Inputs]], ...] = (
    *((name, getattr(kernel_inputs_sparse, name)) for name in ENTRIES),
    ("sparse_mqa", wide_mqa),
    ("paged_mqa", long_paged),
    ("paged_mqa", long_codes),
    ("norm_rope_store", stored_codes),
    ("index_logits", many_keys),
    ("index_top_k", ties),
    ("compress", long_blocks),
    ("hc_pre", wide_streams),
    ("grouped_linear", many_groups),
)


def native(engine: Engine, name: str) -> Callable[..., Any]:
    owner = SparseAttention(engine) if name in vars(SparseAttention) else Latent(engine)
    return getattr(owner, name)


def results(entry: Any, found: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors that an entry returned and wrote."""
    returned = [] if found is None else list(found) if isinstance(found, tuple) else [found]
    return returned + [arg for name, arg in zip(entry.parameters, args, strict=True) if name in entry.writes]


def check(run: Callable[..., Any], name: str, make: Any, dtype: torch.dtype) -> None:
    """Raise AssertionError if a result of `run` differs from the reference's, or if it wrote out of
    bounds."""
    entry = ENTRIES[name]
    for tokens, strided in ((0, False), (1, False), (5, True), (33, False)):
        for args in make(Draw(tokens, dtype), tokens, strided):
            codec = next((arg for arg in args if isinstance(arg, RowCodec)), None)
            wanted_args = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)
            placed = [
                placed_as(arg, place) if isinstance(arg, Tensor) else (arg, None) for place, arg in enumerate(args)
            ]
            given = tuple(arg for arg, _ in placed)
            with GuardedResults():
                found = results(entry, run(*given), given)
                wanted = results(entry, entry.reference(*wanted_args), wanted_args)
                for one, other in zip(found, wanted, strict=True):
                    bound = BOUNDS[dtype] if other.is_floating_point() else 0
                    assert one.shape == other.shape and one.dtype == other.dtype, (tokens, strided)
                    if codec is not None and other.dtype is torch.uint8:
                        one, other, bound = codec.decode(one.clone()), codec.decode(other), RELATIVE["float8"]
                    assert relative_error(one, other) <= bound, (tokens, strided)
            for _, holds in placed:
                if holds is not None:
                    holds()


def placed_as(arg: Tensor, place: int) -> tuple[Tensor, Callable[[], None] | None]:
    """Copy an argument to guarded memory at an odd offset, with gaps after the rows of the first
    argument; transposed weights stay as they are."""
    if arg.dim() and arg.stride(-1) != 1 and arg.numel() > 1:
        return arg, None
    return guarded_copy(arg, 3, 5 if place == 0 and arg.dim() == 2 else 0)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("name", "make"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_an_entry_is_the_reference(engine: Engine, name: str, make: Any, dtype: torch.dtype) -> None:
    """Rows that are in no list hold NaN."""
    check(native(engine, name), name, make, dtype)


def later_of_equals(logits: Tensor, lens: Tensor, *pages: Any) -> Tensor:
    places = torch.arange(logits.shape[1]) * 1e-6
    return reference_sparse.index_top_k(logits + places, lens, *pages)


def writes_first(kv_gate: Tensor, state: Tensor, ape: Tensor, reads: Tensor, writes: Tensor) -> Tensor:
    state[writes] = kv_gate.float()
    return reference_sparse.compress(kv_gate, state, ape, reads, writes)


def reads_past_the_list(q: Tensor, rows: Tensor, chosen: Tensor, *others: Any) -> Tensor:
    return reference_sparse.sparse_mqa(q, rows, chosen.clamp(min=0), *others)


def forgets_sinks(q: Tensor, *args: Any) -> Tensor:
    rows, chosen, more_rows, more_chosen, _, *others = args
    return reference_sparse.sparse_mqa(q, rows, chosen, more_rows, more_chosen, None, *others)


def forgets_scales(q: Tensor, rows: Tensor, *others: Any) -> Tensor:
    codec = others[-1]
    scales = slice(codec.size + codec.exact, codec.size + codec.exact + codec.num_scales)
    rows[:, scales] = 127
    return reference_sparse.paged_mqa(q, rows, *others)


def one_row_too_few(q: Tensor, rows: Tensor, table: Tensor, slots: Tensor, lens: Tensor, *others: Any) -> Tensor:
    return reference_sparse.paged_mqa(q, rows, table, slots, (lens - 1).clamp(min=0), *others)


def other_direction(x: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return reference_sparse.hc_post(x, h, post, comb.transpose(1, 2))


def one_turn_too_few(h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *args: Any) -> tuple[Tensor, ...]:
    norm_eps, hc_eps, iters = args
    return reference_sparse.hc_pre(h, fn, base, scale, norm_eps, hc_eps, iters - 1)


DEFECTS: tuple[tuple[str, Callable[..., Inputs], Callable[..., Any]], ...] = (
    ("index_top_k", ties, later_of_equals),
    ("compress", kernel_inputs_sparse.compress, writes_first),
    ("sparse_mqa", wide_mqa, reads_past_the_list),
    ("sparse_mqa", wide_mqa, forgets_sinks),
    ("paged_mqa", long_paged, one_row_too_few),
    ("paged_mqa", long_codes, forgets_scales),
    ("hc_post", kernel_inputs_sparse.hc_post, other_direction),
    ("hc_pre", kernel_inputs_sparse.hc_pre, one_turn_too_few),
)


@pytest.mark.parametrize(("name", "make", "defect"), DEFECTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_planted_defect_is_found(name: str, make: Any, defect: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError):
        check(defect, name, make, F32)
