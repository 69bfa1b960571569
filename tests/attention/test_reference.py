"""The reference attention equals torch's own attention over each request alone, for any placement
of its KV slots."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionShape, Bucket
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.pools import MHATokenToKVPool, ReqToTokenPool
from tests.attention.rows import CONTEXT, Case, Heads, make_batch, make_case

ROWS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5)
SINGLES = st.lists(st.tuples(st.integers(0, 30), st.just(1)), min_size=1, max_size=6)
HEADS = st.builds(
    lambda kv_heads, group, dim, window, scaling, extra: Heads(
        kv_heads * group, kv_heads, dim, window, scaling, **extra
    ),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from((2, 8)),
    st.one_of(st.none(), st.integers(1, 12)),
    st.one_of(st.none(), st.just(0.3)),
    st.sampled_from(({}, {"softcap": 0.7}, {"has_sinks": True})),
)
PAGES = st.sampled_from((1, 3, 4, 16))


def assert_equals_dense(case: Case) -> None:
    """Attention equals the oracle, and the KV slots hold the stored keys and values."""
    torch.testing.assert_close(case.run(), case.dense(), rtol=1e-5, atol=1e-5)
    k_cache, v_cache = case.backend.token_to_kv_pool.kv(0)
    for cells, keys, values in zip(case.cells, case.keys, case.values, strict=True):
        assert torch.equal(k_cache[cells], keys)
        assert torch.equal(v_cache[cells], values)


@settings(deadline=None, max_examples=60)
@given(ROWS, HEADS, PAGES, st.integers(0, 2**31))
def test_rows_of_any_lengths_over_any_pages(rows: Any, heads: Heads, page_size: int, seed: int) -> None:
    assert_equals_dense(make_case(rows, heads, page_size, seed))


@settings(deadline=None, max_examples=60)
@given(SINGLES, HEADS, PAGES, st.integers(0, 2**31))
def test_decode_rows_of_ragged_lengths(rows: Any, heads: Heads, page_size: int, seed: int) -> None:
    assert_equals_dense(make_case(rows, heads, page_size, seed, decode=True))


@settings(deadline=None, max_examples=30)
@given(SINGLES, ROWS, HEADS, st.integers(0, 2**31))
def test_decode_rows_before_long_ones_in_a_mixed_batch(singles: Any, rows: Any, heads: Heads, seed: int) -> None:
    assert_equals_dense(make_case([*singles[:3], *rows[:3]], heads, 4, seed))


EDGES = (
    [(0, 1)],
    [(0, 1), (0, 1)],
    [(3, 1), (3, 1), (3, 1)],
    [(4, 4), (8, 8)],
    [(0, 5), (7, 1), (2, 1)],
    [(16, 1), (0, 16)],
    [(CONTEXT - 1, 1), (0, CONTEXT)],
)


@pytest.mark.parametrize("rows", EDGES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 4, 16, 17, CONTEXT])
def test_lengths_at_the_edges_of_pages_and_windows(rows: Any, window: int | None) -> None:
    assert_equals_dense(make_case(rows, Heads(window=window)))


def test_layers_with_and_without_a_window_share_one_plan() -> None:
    case = make_case([(9, 1), (12, 1), (2, 6)], Heads(window=5), windows=(None, 5))
    torch.testing.assert_close(case.run(), case.dense())
    case.layer = Attention(0, 4, 2, 8, None, None)
    assert case.batch.plan_record is not None
    found = case.backend.forward(*case.inputs, case.layer, case.batch)
    torch.testing.assert_close(found, case.dense())


def test_the_rows_of_a_batch_are_the_rows_of_singles() -> None:
    rows = [(9, 1), (3, 1), (2, 6), (0, 3)]
    together = make_case(rows)
    whole = together.run()
    for row, (start, end) in enumerate([(0, 1), (1, 2), (2, 8), (8, 11)]):
        other = make_case(rows)
        slots = [int(other.batch.req_pool_indices[row])]  # pyright: ignore[reportOptionalSubscript]
        other.batch = make_batch(rows[row : row + 1], slots, other.cells[row : row + 1], decode=False)
        other.queries = other.queries[row : row + 1]
        other.keys, other.values = other.keys[row : row + 1], other.values[row : row + 1]
        torch.testing.assert_close(other.run(), whole[start:end])


class IgnoringPages(ReferenceAttention):
    """Mutant: assumes that a request's KV slots are contiguous."""

    def _cells(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return KV slots int64[R, L]."""
        pool = self.req_to_token_pool
        return (slots[:, None] * pool.max_pages * pool.page_size + positions).long() % self.token_to_kv_pool.num_cells


class ReadingOnward(ReferenceAttention):
    """Mutant: does not mask the columns beyond a row's length."""

    def _make_gather(self, part: Any, window: int | None) -> tuple[Tensor, Tensor]:
        """Return the correct KV slots without a mask."""
        cells, mask = super()._make_gather(part, window)
        return cells, torch.ones_like(mask)


class OneTooWide(ReferenceAttention):
    """Mutant: the window is one token too wide."""

    def _make_gather(self, part: Any, window: int | None) -> tuple[Tensor, Tensor]:
        """Gather with a window that is one token wider."""
        return super()._make_gather(part, None if window is None else window + 1)


class OwnExtras(ReferenceAttention):
    """Base of mutants that attend with a changed copy of the layer."""

    def attend(self, q: Tensor, layer: Attention, batch: Any, plan: Any) -> Tensor:
        """Attend with the changed layer."""
        changed = copy(layer)
        self.change(changed)
        return super().attend(q, changed, batch, plan)

    def change(self, layer: Attention) -> None:
        """Apply the defect to the copied layer."""


class ForgettingSoftcaps(OwnExtras):
    """Mutant: applies no softcap to the scores."""

    def change(self, layer: Attention) -> None:
        layer.softcap = None


class ForgettingSinks(OwnExtras):
    """Mutant: the softmax has no sinks."""

    def change(self, layer: Attention) -> None:
        layer.sinks = None


class SinksOfOtherHeads(OwnExtras):
    """Mutant: each head uses the sink of the head before."""

    def change(self, layer: Attention) -> None:
        layer.sinks = None if layer.sinks is None else layer.sinks.roll(1)


class ForgettingToStore(ReferenceAttention):
    """Mutant: this step's keys and values are not stored."""

    def attend(self, q: Tensor, layer: Attention, batch: Any, plan: Any) -> Tensor:
        """Overwrite the stored keys and values with zeros, then attend."""
        for cells in self.token_to_kv_pool.kv(layer.layer_id):
            cells[batch.out_cache_loc] = 0
        return super().attend(q, layer, batch, plan)


@pytest.mark.parametrize("kind", [IgnoringPages, ReadingOnward, OneTooWide, ForgettingToStore])
def test_a_broken_backend_is_caught(kind: type[ReferenceAttention]) -> None:
    rows = [(20, 1), (3, 1), (7, 1)]
    with pytest.raises(AssertionError):
        assert_equals_dense(make_case(rows, Heads(window=5), kind=kind, decode=True))


@pytest.mark.parametrize(
    ("kind", "heads"),
    [
        (ForgettingSoftcaps, Heads(softcap=0.7)),
        (ForgettingSinks, Heads(has_sinks=True)),
        (SinksOfOtherHeads, Heads(has_sinks=True)),
    ],
)
@pytest.mark.parametrize("rows", [[(20, 1), (3, 1)], [(2, 6)]], ids=["singles", "long"])
def test_a_backend_that_loses_what_a_layer_asks_for_is_caught(
    kind: type[ReferenceAttention], heads: Heads, rows: Any
) -> None:
    assert_equals_dense(make_case(rows, heads))
    with pytest.raises(AssertionError):
        assert_equals_dense(make_case(rows, heads, kind=kind))


# -- padding
# --------------------------------------------------------------------------------------------------


def padded(case: Case, extra: int, garbage: float) -> tuple[Tensor, Tensor, Tensor]:
    """Add padding rows to a decode batch, as a graph registry does; q, k and v of the padding rows
    hold garbage."""
    batch = case.batch
    assert batch.out_cache_loc is not None
    zeros = torch.zeros(extra, dtype=torch.int32)
    batch.req_pool_indices = torch.cat([batch.req_pool_indices, zeros])
    batch.seq_lens = torch.cat([batch.seq_lens, zeros + 1])
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, zeros.long()])
    batch.batch_size += extra
    batch.num_tokens += extra
    q, k, v = (torch.cat([part, torch.full((extra, part.shape[1]), garbage)]) for part in case.inputs)
    return q, k, v


@pytest.mark.parametrize("garbage", [0.0, 1e30, float("nan"), float("inf")])
def test_padding_rows_change_nothing_whatever_they_hold(garbage: float) -> None:
    rows = [(20, 1), (0, 1), (7, 1)]
    wanted = make_case(rows, decode=True).run()
    case = make_case(rows, decode=True)
    before = case.backend.token_to_kv_pool.kv(0)[0].clone()
    before[torch.cat(case.cells)] = torch.cat(case.keys)
    found = case.run(*padded(case, 3, garbage))
    torch.testing.assert_close(found[:3], wanted)
    assert not found[3:].any()
    page = case.backend.token_to_kv_pool.page_size
    assert torch.equal(case.backend.token_to_kv_pool.kv(0)[0][page:].nan_to_num(7), before[page:].nan_to_num(7))


def test_padding_tokens_after_long_rows_come_out_as_zero() -> None:
    rows = [(5, 1), (2, 4)]
    wanted = make_case(rows).run()
    case = make_case(rows)
    q, k, v = padded(case, 2, float("nan"))
    found = case.run(q, k, v)
    torch.testing.assert_close(found[:5], wanted)
    assert not found[5:].any()


@pytest.mark.parametrize("decode", [True, False])
def test_a_batch_without_rows_gives_nothing(decode: bool) -> None:
    case = make_case([], decode=decode)
    none = torch.zeros(0, 32)
    assert case.run(none, none[:, :16], none[:, :16]).shape == (0, 32)


def test_a_batch_of_padding_only_gives_zeros() -> None:
    case = make_case([], decode=True)
    case.batch.out_cache_loc = torch.zeros(2, dtype=torch.int64)
    wild = torch.full((2, 32), float("nan"))
    assert not case.run(wild, wild[:, :16], wild[:, :16]).any()


# -- captured plans
# --------------------------------------------------------------------------------------------------


def test_a_captured_plan_is_refreshed_in_place_for_every_batch() -> None:
    first = make_case([(20, 1), (3, 1)], decode=True)
    backend, plan = first.backend, first.backend.capture_plan(Bucket(2, 2))
    for rows in ([(20, 1), (3, 1)], [(1, 1), (2, 1)], [(30, 1)], [(20, 1), (3, 1)]):
        case = make_case(rows, decode=True)
        assert backend.refresh(plan, case.batch) is None
        case.backend.refresh(plan, case.batch)
        case.batch.mark_forward_metadata_ready(replace(plan, planner=case.backend))
        torch.testing.assert_close(case.backend.forward(*case.inputs, case.layer, case.batch), case.dense())
    assert plan.singles is not None and plan.singles.count == 2
    backend.refresh(plan, make_case([], decode=True).batch)
    assert plan.singles is None
    backend.refresh(plan, make_case([(2, 3), (1, 4)]).batch)
    backend.refresh(plan, make_case([(2, 3)]).batch)
    assert len(plan.rows) == 1


# -- encoders
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[1], [5, 1, 3], [1, 1], [4, 4]])
def test_an_encoder_sees_the_whole_of_its_own_request_and_stores_nothing(lengths: list[int]) -> None:
    torch.manual_seed(0)
    heads, dim = 3, 4
    shape = AttentionShape(heads, ((heads, dim),), is_encoder=True)
    pool = MHATokenToKVPool(1, 4, shape.layers, torch.float32, "cpu")
    backend = ReferenceAttention(shape, ReqToTokenPool(4, CONTEXT, 4, "cpu"), pool, KernelTable())
    layer = Attention(0, heads, heads, dim, causal=False, cached=False)
    batch = make_batch(
        [(0, length) for length in lengths], [0] * len(lengths), [torch.zeros(n).long() for n in lengths], decode=False
    )
    q, k, v = torch.randn(3, sum(lengths), heads * dim)
    batch.mark_forward_metadata_ready(backend.plan(batch))
    found = backend.forward(q, k, v, layer, batch)
    bounds = np.cumsum([0, *lengths])
    for start, end in pairwise(bounds):
        one = [part[start:end].view(-1, heads, dim).transpose(0, 1) for part in (q, k, v)]
        wanted = torch.softmax(one[0] @ one[1].transpose(1, 2) * dim**-0.5, -1) @ one[2]
        torch.testing.assert_close(found[start:end], wanted.transpose(0, 1).flatten(1))
    assert not pool.kv(0)[0].any()


def test_projections_that_are_slices_of_one_tensor_are_taken_as_they_are() -> None:
    case = make_case([(5, 1), (2, 4)])
    q, k, v = case.inputs
    sliced = torch.cat([q, k, v], dim=1).split([q.shape[1], k.shape[1], v.shape[1]], dim=1)
    assert not sliced[0].is_contiguous()
    torch.testing.assert_close(case.run(*sliced), case.dense())
