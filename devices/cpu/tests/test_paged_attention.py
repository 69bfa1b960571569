"""The native attention backend gives the reference's results, over every pool, in every batch,
eagerly and recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ci.selection import Selection
from devices.cpu.tests.native.libraries import every_set
from sglcore.runtime.attention.backend_selection import AttentionNeeds, refusal
from sglcore.runtime.attention.contract import Bucket, Unavailable
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.pools import LayerShapes, MHATokenToKVPool
from sglcore_cpu.kernels.attention import PagedAttention
from sglcore_cpu.kernels.kv_pool import INT8_POOL, Int8TokenToKVPool
from sglcore_cpu.kernels.table import native_table
from sglcore_cpu.native import Engine
from sglcore_cpu.recording import Recording, StepArena
from tests.attention.rows import Case, Heads, make_case

ROWS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5)
SINGLES = st.lists(st.tuples(st.integers(0, 30), st.just(1)), min_size=1, max_size=6)
HEADS = st.builds(
    lambda kv_heads, group, dim, window, scaling, extra: Heads(
        kv_heads * group, kv_heads, dim, window, scaling, **extra
    ),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from((2, 8, 24, 64)),
    st.one_of(st.none(), st.integers(1, 12)),
    st.one_of(st.none(), st.just(0.3)),
    st.sampled_from(({}, {"softcap": 0.7}, {"has_sinks": True})),
)
PAGES = st.sampled_from((1, 3, 4, 16))
LAW = settings(deadline=None, max_examples=40, derandomize=True)
INT8_BOUND = 0.03
"""Bound of attention's absolute error over KV slots of 8 bits, for normally distributed keys and
values, when 127 codes span 3 standard deviations."""
KINDS = (PagedAttention, ReferenceAttention)


@pytest.fixture(scope="module")
def engine(selection: Selection) -> Engine:
    """An engine of the highest instruction set of this run, with two threads."""
    library = every_set(selection)
    if not library.usable():
        pytest.skip("this processor lacks AVX2 with FMA and F16C")
    return library.engine(library.usable()[-1], 2)


def backend_of(case: Case, engine: Engine, pool: Any = None, kernels: Any = None) -> PagedAttention:
    """Make the native backend over a case's memory, or over another pool."""
    given = case.backend
    return PagedAttention(
        given.shape,
        given.req_to_token_pool,
        pool or given.token_to_kv_pool,
        kernels or given.kernels,
        engine=engine,
    )


def native_case(engine: Engine, rows: Any, *how: Any, **named: Any) -> Case:
    """Make a case with the native backend."""
    case = make_case(rows, *how, **named)
    case.backend = backend_of(case, engine)  # pyright: ignore[reportAttributeAccessIssue]
    return case


def in_type(case: Case, dtype: torch.dtype) -> Case:
    """Give the case a KV pool of another dtype, with its content cast."""
    old = case.backend.token_to_kv_pool
    pool = MHATokenToKVPool(old.num_cells // old.page_size - 1, old.page_size, case.backend.shape.layers, dtype, "cpu")
    for to, source in zip(pool.kv(0), old.kv(0), strict=True):
        to.copy_(source)
    case.backend.token_to_kv_pool = pool
    return case


@LAW
@given(SINGLES, ROWS, HEADS, PAGES, st.integers(0, 2**31))
def test_mixed_batches(engine: Engine, singles: Any, rows: Any, heads: Heads, page_size: int, seed: int) -> None:
    case = native_case(engine, [*singles[:3], *rows[:3]], heads, page_size, seed)
    torch.testing.assert_close(case.run(), case.dense(), rtol=1e-5, atol=1e-5)


@LAW
@given(SINGLES, HEADS, PAGES, st.integers(0, 2**31))
def test_decode_batches(engine: Engine, rows: Any, heads: Heads, page_size: int, seed: int) -> None:
    case = native_case(engine, rows, heads, page_size, seed, decode=True)
    torch.testing.assert_close(case.run(), case.dense(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("window", [None, 5])
def test_bfloat16_as_close_to_the_truth_as_the_reference(engine: Engine, decode: bool, window: int | None) -> None:
    rows = [(20, 1), (3, 1), (7, 1)] if decode else [(20, 1), (3, 1), (0, 9), (30, 17)]
    heads = Heads(16, 8, 64, window)
    found, wanted = [], []
    for backend in (None, engine):
        case = in_type(make_case(rows, heads, 16, decode=decode), torch.bfloat16)
        if backend is not None:
            case.backend = backend_of(case, backend)  # pyright: ignore[reportAttributeAccessIssue]
        inputs = [part.bfloat16() for part in case.inputs]
        found.append(case.run(*inputs).float())
        wanted.append(case.dense())
    reference, native = ((one - truth).abs().max() for one, truth in zip(found, wanted, strict=True))
    assert native <= 2 * reference


def test_queries_that_are_slices_are_taken_as_they_are(engine: Engine) -> None:
    case = native_case(engine, [(5, 1), (2, 4)])
    q, k, v = case.inputs
    sliced = torch.cat([q, k, v], dim=1).split([q.shape[1], k.shape[1], v.shape[1]], dim=1)
    assert not sliced[0].is_contiguous()
    torch.testing.assert_close(case.run(*sliced), case.dense())
    turned = q.t().contiguous().t()
    torch.testing.assert_close(case.run(turned, k, v), case.dense())


def test_layers_with_and_without_a_window_share_one_plan(engine: Engine) -> None:
    case = native_case(engine, [(9, 1), (12, 1), (2, 6)], Heads(window=5), windows=(None, 5))
    torch.testing.assert_close(case.run(), case.dense())
    case.layer = Attention(0, 4, 2, 8, None, None)
    found = case.backend.forward(*case.inputs, case.layer, case.batch)
    torch.testing.assert_close(found, case.dense())


# -- padding
# --------------------------------------------------------------------------------------------------


def padded(case: Case, extra: int, garbage: float) -> tuple[Tensor, Tensor, Tensor]:
    """Add padding rows to a batch, as a registry does; their q, k and v hold garbage."""
    batch = case.batch
    assert batch.out_cache_loc is not None
    zeros = torch.zeros(extra, dtype=torch.int32)
    batch.req_pool_indices = torch.cat([batch.req_pool_indices, zeros])
    batch.seq_lens = torch.cat([batch.seq_lens, zeros + 1])
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, zeros.long()])
    q, k, v = (torch.cat([part, torch.full((extra, part.shape[1]), garbage)]) for part in case.inputs)
    return q, k, v


@pytest.mark.parametrize("garbage", [0.0, 1e30, float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [[(20, 1), (0, 1), (7, 1)], [(5, 1), (2, 4)]], ids=str)
def test_padding_changes_nothing_whatever_it_holds(engine: Engine, rows: Any, garbage: float) -> None:
    decode = all(new == 1 for _, new in rows)
    case = native_case(engine, rows, decode=decode)
    found = case.run(*padded(case, 3, garbage))
    torch.testing.assert_close(found[:-3], case.dense())
    assert not found[-3:].any()


@pytest.mark.parametrize("decode", [True, False])
def test_a_batch_without_rows_gives_nothing_and_one_of_padding_zeros(engine: Engine, decode: bool) -> None:
    case = native_case(engine, [], decode=decode)
    none = torch.zeros(0, 32)
    assert case.run(none, none[:, :16], none[:, :16]).shape == (0, 32)
    case.batch.out_cache_loc = torch.zeros(2, dtype=torch.int64)
    wild = torch.full((2, 32), float("nan"))
    assert not case.run(wild, wild[:, :16], wild[:, :16]).any()


# -- recorded steps
# --------------------------------------------------------------------------------------------------


def test_a_recorded_step_serves_every_batch_of_its_bucket(engine: Engine) -> None:
    first = native_case(engine, [(20, 1), (3, 1), (9, 1)], Heads(window=6), decode=True)
    backend, batch = first.backend, first.batch
    plan = backend.capture_plan(Bucket(4, 4))
    q, k, v = padded(first, 1, 0.0)
    first.run(q, k, v)
    batch.mark_forward_metadata_ready(plan)
    with Recording(StepArena()) as recording:
        out = backend.forward(q, None, None, first.layer, batch)
    for rows in ([(20, 1), (3, 1), (9, 1)], [(1, 1), (40, 1)], [(30, 1)]):
        other = native_case(engine, rows, Heads(window=6), decode=True, seed=len(rows))
        move(other, first)
        real = len(rows)
        q[:real] = other.inputs[0]
        assert backend.refresh(plan, batch) is None
        for part in recording.parts:
            part.run()
        torch.testing.assert_close(out[:real], other.dense())
        assert not out[real:].any()


def move(source: Case, target: Case) -> None:
    """Copy a decode case into the buffers of another; the rows beyond it become padding."""
    source.run()
    for to, mine in zip(target.backend.token_to_kv_pool.kv(0), source.backend.token_to_kv_pool.kv(0), strict=True):
        to.copy_(mine)
    target.backend.req_to_token_pool.page_table.copy_(source.backend.req_to_token_pool.page_table)
    slots, lengths = target.batch.req_pool_indices, target.batch.seq_lens
    given = source.batch.req_pool_indices, source.batch.seq_lens
    assert slots is not None and lengths is not None and given[0] is not None and given[1] is not None
    slots.zero_()[: len(given[0])] = given[0]
    lengths.fill_(1)[: len(given[1])] = given[1]


def test_a_bucket_of_several_tokens_a_row_is_refused(engine: Engine) -> None:
    case = native_case(engine, [(3, 1)], decode=True)
    with pytest.raises(ValueError, match="wanted one of each"):
        case.backend.capture_plan(Bucket(2, 4))


# -- KV slots of 8 bits
# --------------------------------------------------------------------------------------------------


def int8_pool(
    engine: Engine, num_pages: int, page_size: int, layers: LayerShapes, dtype: torch.dtype = torch.float32
) -> Int8TokenToKVPool:
    """Make a KV pool of 8 bits for a model in `dtype`."""
    return Int8TokenToKVPool(num_pages, page_size, layers, dtype, "cpu", native_table(engine))


def int8_case(
    engine: Engine, rows: Any, heads: Heads, dtype: torch.dtype, kind: Any = PagedAttention, **how: Any
) -> Case:
    """Make a case over a KV pool of 8 bits, with the case's keys and values stored in it."""
    case = make_case(rows, heads, 16, **how)
    old = case.backend.token_to_kv_pool
    pool = int8_pool(engine, old.num_cells // old.page_size - 1, old.page_size, case.backend.shape.layers, dtype)
    cells = torch.arange(old.num_cells)
    pool.write_cells(0, cells, *(part.to(dtype) for part in old.read_cells(0, cells)))
    given = case.backend
    named = {"engine": engine} if kind is PagedAttention else {}
    made: Any = kind(given.shape, given.req_to_token_pool, pool, given.kernels, **named)
    case.backend = made
    return case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[(40, 1), (3, 1)], [(20, 1), (0, 9), (30, 17)]], ids=str)
def test_cells_of_8_bits_are_close_to_the_truth(engine: Engine, rows: Any, dtype: torch.dtype) -> None:
    case = int8_case(engine, rows, Heads(8, 4, 64), dtype, decode=len(rows) == 2)
    found = case.run(*(part.to(dtype) for part in case.inputs)).float()
    error = (found - case.dense()).abs().max()
    assert 0 < error < INT8_BOUND


def test_attention_that_knows_no_layout_reads_cells_of_8_bits_too(engine: Engine) -> None:
    rows = [(20, 1), (0, 9), (30, 17)]
    native, plain = (int8_case(engine, rows, Heads(8, 4, 64), torch.float32, kind) for kind in KINDS)
    torch.testing.assert_close(plain.run(), native.run(), rtol=1e-5, atol=1e-5)
    assert not native.backend.takes_stored, "the entries that store beside a rotation know plain cells only"


@pytest.mark.parametrize("change", [{"key": torch.float16}, {"where": torch.int32}], ids=str)
def test_what_the_store_does_not_take_is_named(engine: Engine, change: dict[str, torch.dtype]) -> None:
    x = torch.zeros(1, 1, 8, dtype=change.get("key", torch.float32))
    pool = int8_pool(engine, 1, 4, ((1, 8),))
    with pytest.raises(TypeError, match="wanted float32 or bfloat16 at int64 cells"):
        pool.store(0, x, x, torch.zeros(1, dtype=change.get("where", torch.int64)))


def test_a_pool_has_the_cells_that_it_says(engine: Engine) -> None:
    pool = int8_pool(engine, 3, 4, ((2, 8), (1, 16)))
    assert (pool.page_size, pool.num_cells, pool.num_layers, pool.generation) == (4, 16, 2, 0)
    assert [cells.shape for cells in pool.kv(0)] == [(16, 2, 12)] * 2
    assert [cells.shape for cells in pool.kv(1)] == [(16, 1, 20)] * 2
    pool.kv(0)[0].fill_(1)
    assert not pool.kv(0)[1].any() and not pool.kv(1)[0].any()
    pool.replace_storage()
    assert pool.generation == 1 and not pool.kv(0)[0].any()


def test_a_cell_of_8_bits_takes_what_is_counted(engine: Engine) -> None:
    layers = ((2, 8), (1, 16))
    pool = int8_pool(engine, 3, 4, layers)
    held = sum(cells.numel() for layer in range(2) for cells in pool.kv(layer))
    assert held == pool.num_cells * INT8_POOL.cell_bytes(layers, torch.float32)


# -- refusals
# --------------------------------------------------------------------------------------------------


def test_what_it_can_not_serve_is_refused_by_its_facts() -> None:
    needs = AttentionNeeds((80,), 3, "bfloat16", frozenset({"sliding_window", "mixed"}))
    assert refusal(PagedAttention.facts, needs) == ""
    assert "float16" in refusal(PagedAttention.facts, replace(needs, dtype="float16"))
    assert "encoder" in refusal(PagedAttention.facts, replace(needs, features=frozenset({"encoder"})))


def test_a_table_without_native_kernels_is_refused() -> None:
    case = make_case([(3, 1)])
    with pytest.raises(Unavailable, match="native kernels"):
        PagedAttention(case.backend.shape, case.backend.req_to_token_pool, case.backend.token_to_kv_pool, KernelTable())


def test_wrong_types_and_factors_are_named(engine: Engine) -> None:
    case = native_case(engine, [(3, 1)], decode=True)
    q, k, v = case.inputs
    with pytest.raises(TypeError, match="float16"):
        case.run(q.half(), k, v)
    case.layer = Attention(0, 4, 2, 8, scaling=-1.0)
    with pytest.raises(ValueError, match="wanted more than 0"):
        case.run()
