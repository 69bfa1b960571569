"""Gathered attention equals torch's own attention, in fixed shapes that a capture replays for other
lengths, slots and pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglcore.runtime.attention import gathered
from sglcore.runtime.attention.contract import Bucket
from sglcore.runtime.attention.gathered import GatheredAttention
from sglcore.runtime.forward_batch import ForwardBatch
from tests.attention.rows import CONTEXT, Case, Heads, make_case
from tests.attention.test_reference import EDGES, HEADS, PAGES, ROWS, SINGLES, assert_equals_dense, padded
from tests.runtime.recording import Queue, RecordingCapture


def fixed(case: Case, *given: Tensor) -> Tensor:
    """Run the forward under a captured plan on the batch's device tensors, with the host lengths
    removed."""
    batch = case.batch
    plan = case.backend.capture_plan(Bucket(batch.batch_size, batch.num_tokens))
    assert case.backend.refresh(plan, batch) is None
    batch.mark_forward_metadata_ready(plan)
    batch.seq_lens_cpu = batch.extend_seq_lens_cpu = None
    q, k, v = given or case.inputs
    return case.backend.forward(q, k, v, case.layer, batch)


@settings(deadline=None, max_examples=60)
@given(SINGLES, HEADS, PAGES, st.integers(0, 2**31))
def test_decode_rows_of_any_lengths_and_pages(rows: Any, heads: Heads, page_size: int, seed: int) -> None:
    case = make_case(rows, heads, page_size, seed, decode=True, kind=GatheredAttention)
    torch.testing.assert_close(fixed(case), case.dense(), rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(1, 5), HEADS, PAGES, st.integers(0, 2**31))
def test_several_tokens_of_each_request(
    prefixes: list[int], count: int, heads: Heads, page_size: int, seed: int
) -> None:
    case = make_case([(prefix, count) for prefix in prefixes], heads, page_size, seed, kind=GatheredAttention)
    torch.testing.assert_close(fixed(case), case.dense(), rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(SINGLES, ROWS, HEADS, st.integers(0, 2**31))
def test_mixed_rows_outside_graphs(singles: Any, rows: Any, heads: Heads, seed: int) -> None:
    assert_equals_dense(make_case([*singles[:3], *rows[:3]], heads, 4, seed, kind=GatheredAttention))


@pytest.mark.parametrize("rows", EDGES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 4, 16, CONTEXT])
def test_lengths_at_the_edges_outside_graphs(rows: Any, window: int | None) -> None:
    assert_equals_dense(make_case(rows, Heads(window=window), kind=GatheredAttention))


@pytest.mark.parametrize("length", [0, 1, 3, 4, 15, 16, 17, CONTEXT - 1])
@pytest.mark.parametrize("window", [None, 1, 4, 16, 17, CONTEXT])
def test_lengths_at_the_edges_of_pages_and_windows(length: int, window: int | None) -> None:
    case = make_case([(length, 1), (5, 1)], Heads(window=window), decode=True, kind=GatheredAttention)
    torch.testing.assert_close(fixed(case), case.dense(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("elements", [1, 64, 500])
@pytest.mark.parametrize("heads", [Heads(), Heads(window=5), Heads(softcap=0.7), Heads(has_sinks=True)])
def test_any_size_of_block_gives_the_same(elements: int, heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "BLOCK_ELEMENTS", elements)
    rows = [(40, 1), (0, 1), (17, 1)]
    case = make_case(rows, heads, decode=True, kind=GatheredAttention)
    torch.testing.assert_close(fixed(case), case.dense(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("garbage", [0.0, 1e30, float("nan"), float("inf")])
def test_padding_rows_change_nothing_whatever_they_hold(garbage: float) -> None:
    rows = [(20, 1), (0, 1), (7, 1)]
    case = make_case(rows, decode=True, kind=GatheredAttention)
    before = [part.clone() for part in case.backend.token_to_kv_pool.kv(0)]
    own = torch.cat(case.cells)
    found = fixed(case, *padded(case, 3, garbage))
    torch.testing.assert_close(found[:3], case.dense())
    page = case.backend.token_to_kv_pool.page_size
    before[0][own], before[1][own] = torch.cat(case.keys), torch.cat(case.values)
    for now, then in zip(case.backend.token_to_kv_pool.kv(0), before, strict=True):
        assert torch.equal(now[page:].nan_to_num(7), then[page:].nan_to_num(7))


def test_half_precision_is_attended_in_float32() -> None:
    case = make_case([(20, 1), (7, 1)], decode=True, kind=GatheredAttention)
    wanted = fixed(case)
    half = make_case([(20, 1), (7, 1)], decode=True, kind=GatheredAttention)
    half.backend.token_to_kv_pool._kv = [tuple(part.bfloat16() for part in half.backend.token_to_kv_pool.kv(0))]  # pyright: ignore
    found = fixed(half, *(part.bfloat16() for part in half.inputs))
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)


def recorded(kind: type[GatheredAttention]) -> tuple[Tensor, Tensor]:
    """Return the output of a replay after lengths, slots and inputs changed in place, and the
    expected output."""
    first = make_case([(3, 1), (9, 1)], Heads(window=6), seed=1, decode=True, kind=kind)
    second = make_case([(30, 1), (1, 1)], Heads(window=6), seed=2, decode=True, kind=kind)
    batch, pool = first.batch, first.backend.req_to_token_pool
    plan = first.backend.capture_plan(Bucket(2, 2))
    first.backend.refresh(plan, batch)
    batch.mark_forward_metadata_ready(plan)
    inputs, out = first.inputs, []
    capture = RecordingCapture()
    with Queue() as stream:
        pool_of_graphs = capture.make_pool()
        step = lambda: out.append(first.backend.forward(*inputs, first.layer, batch))  # noqa: E731
        with capture.capture(stream, pool_of_graphs) as segment:  # pyright: ignore[reportArgumentType]
            step()
        _become(first, second, inputs)
        first.backend.refresh(plan, batch)
        segment.replay()
    assert pool.page_table.shape == second.backend.req_to_token_pool.page_table.shape
    return out[0], second.dense()


def _become(first: Case, second: Case, inputs: tuple[Tensor, ...]) -> None:
    """Copy the contents of the second case into the tensors of the first."""
    pairs = [*zip(inputs, second.inputs, strict=True)]
    pairs += zip(first.backend.token_to_kv_pool.kv(0), second.backend.token_to_kv_pool.kv(0), strict=True)
    pairs.append((first.backend.req_to_token_pool.page_table, second.backend.req_to_token_pool.page_table))
    for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
        pairs.append((getattr(first.batch, name), getattr(second.batch, name)))
    for mine, theirs in pairs:
        mine.copy_(theirs)
    first.batch.seq_lens_cpu = np.asarray(second.batch.seq_lens_cpu)


def test_a_replay_reads_lengths_slots_and_pages_as_they_are_then() -> None:
    found, wanted = recorded(GatheredAttention)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


class BakingLengths(GatheredAttention):
    """Mutant: gathers no further than the longest row at capture."""

    def _attend(self, q: Any, rows: Any, layer: Any, batch: ForwardBatch) -> Tensor:
        assert batch.seq_lens_cpu is not None
        places = rows.places[: int(batch.seq_lens_cpu.max())]
        pages = -(-len(places) // self.req_to_token_pool.page_size)
        places = torch.nn.functional.pad(
            places, (0, pages * self.req_to_token_pool.page_size - len(places)), value=10**6
        )
        places = torch.cat([places, places.new_full((len(rows.places) - len(places),), 10**6)])
        return super()._attend(q, replace(rows, places=places), layer, batch)


class CopyingLengths(GatheredAttention):
    """Mutant: reads the lengths from the time of capture."""

    def _attend(self, q: Any, rows: Any, layer: Any, batch: ForwardBatch) -> Tensor:
        old = ForwardBatch(req_pool_indices=batch.req_pool_indices, seq_lens=torch.tensor(batch.seq_lens_cpu))
        return super()._attend(q, rows, layer, old)


class OneTooFar(GatheredAttention):
    """Mutant: every query also sees the token after it."""

    def _attend(self, q: Any, rows: Any, layer: Any, batch: ForwardBatch) -> Tensor:
        return super()._attend(q, replace(rows, offsets=rows.offsets + 1), layer, batch)


class LosingScale(GatheredAttention):
    """Mutant: queries are scaled twice."""

    def _attend(self, q: Any, rows: Any, layer: Any, batch: ForwardBatch) -> Tensor:
        return super()._attend(q * layer.scaling, rows, layer, batch)


@pytest.mark.parametrize("kind", [BakingLengths, CopyingLengths, OneTooFar, LosingScale])
def test_a_broken_backend_is_caught_at_replay(kind: type[GatheredAttention]) -> None:
    found, wanted = recorded(kind)
    assert not torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_bucket_with_unequal_rows_is_refused() -> None:
    case = make_case([(3, 1)], decode=True, kind=GatheredAttention)
    with pytest.raises(ValueError, match="do not have the same number each"):
        case.backend.capture_plan(Bucket(2, 3))
