"""Tests of attention over gathered KV entries, of prompts and of encoders, against numpy."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore_mlx.attention.contract import AttentionFacts, DecodeAttention
from sglcore_mlx.attention.dense import attend
from sglcore_mlx.attention.encoder import EncoderRows
from sglcore_mlx.attention.gathered import GatheredAttention
from sglcore_mlx.attention.processor import ProcessorAttention
from sglcore_mlx.attention.prompt import PromptRow
from sglcore_mlx.attention.select import refusal, select_attention
from sglcore_mlx.forward_batch import ForwardBatch
from sglcore_mlx.models.contract import LayerShape
from sglcore_mlx.pool import store

SIZE, PAGES = 4, 40


SINKS = mx.array([0.5, -1.0, 3.0, 0.0, -0.2, 1.5])
EXTRAS = ({}, {"softcap": 0.7}, {"sinks": SINKS}, {"softcap": 0.7, "sinks": SINKS})


def shape(window: int | None = None, heads: int = 6, kv_heads: int = 2, dim: int = 8, **extra: Any) -> LayerShape:
    return LayerShape(heads, kv_heads, dim, window, dim**-0.5, **extra)


def batch_of(table: Any, lens: Any) -> ForwardBatch:
    """Return the batch of queries with these lengths int32[B * N], of B requests with a table [B,
    n]."""
    pages, ends = mx.array(np.array(table, np.int32)), mx.array(np.array(lens, np.int32).reshape(-1))
    width = None if ends.shape[0] == pages.shape[0] else ends.shape[0] // pages.shape[0]
    return ForwardBatch(batch_size=ends.shape[0], seq_lens=ends, width=width, page_table=pages)


def by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, layer: LayerShape, places: np.ndarray) -> np.ndarray:
    """Return [L, heads, D]: causal attention in float64 of queries at positions `places` over keys
    at 0, 1, ..."""
    rows = []
    for query, place in zip(q.astype(np.float64), places, strict=True):
        first = 0 if layer.sliding_window is None else max(place + 1 - layer.sliding_window, 0)
        heads = []
        for head in range(layer.num_heads):
            own = head // (layer.num_heads // layer.num_kv_heads)
            scores = k[first : place + 1, own] @ query[head] * layer.scale
            if layer.softcap is not None:
                scores = layer.softcap * np.tanh(scores / layer.softcap)
            ground = 0.0 if layer.sinks is None else np.exp(layer.sinks[head].item() - scores.max())
            weights = np.exp(scores - scores.max())
            heads.append(weights @ v[first : place + 1, own] / (weights.sum() + ground))
        rows.append(heads)
    return np.array(rows)


class Paged:
    """Random keys and values of several rows in scattered pages; all other KV slots hold NaN."""

    def __init__(self, rng: np.random.Generator, lens: list[int], layer: LayerShape) -> None:
        pages = rng.permutation(np.arange(1, PAGES))
        count = -(-max(lens) // SIZE)
        self.table = np.zeros((len(lens), count), np.int32)
        cells = np.full((PAGES * SIZE, 2, layer.num_kv_heads, layer.head_dim), np.nan, np.float32)
        self.keys, self.values, self.cells_of = [], [], []
        for row, length in enumerate(lens):
            own, pages = np.split(pages, [-(-length // SIZE)])
            self.table[row, : len(own)] = own
            places = (own[:, None] * SIZE + np.arange(SIZE)).reshape(-1)[:length].astype(np.int32)
            both = rng.standard_normal((length, 2, layer.num_kv_heads, layer.head_dim), np.float32)
            cells[places] = both
            self.keys.append(both[:, 0])
            self.values.append(both[:, 1])
            self.cells_of.append(places)
        self.kv = mx.array(cells)


@pytest.mark.parametrize("kind", [GatheredAttention, ProcessorAttention])
@pytest.mark.parametrize("window", [None, 1, 3, 7])
@pytest.mark.parametrize("lens", [[1], [9, 1, 4, 16], [33, 2]])
@pytest.mark.parametrize("extra", EXTRAS, ids=", ".join)
def test_a_row_of_one_query_sees_its_own_cells_up_to_its_length(
    extra: dict[str, Any], lens: list[int], window: int | None, kind: type[DecodeAttention]
) -> None:
    rng, layer = np.random.default_rng(len(lens)), shape(window, **extra)
    paged = Paged(rng, lens, layer)
    q = rng.standard_normal((len(lens), 6, 8), np.float32)
    streams = (mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)) if len(lens) > 2 else ()
    plan = kind([layer], SIZE, streams).plan(batch_of(paged.table, lens))
    found = np.array(plan.forward(mx.array(q), paged.kv, layer))
    for row, length in enumerate(lens):
        wanted = by_hand(q[row : row + 1], paged.keys[row], paged.values[row], layer, np.array([length - 1]))
        np.testing.assert_allclose(found[row : row + 1], wanted, atol=1e-5)


@pytest.mark.parametrize("kind", [GatheredAttention, ProcessorAttention])
@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize("lens", [[[7, 8, 9]], [[9, 10], [1, 2], [4, 1], [16, 17]], [[33, 34, 1, 1], [2, 3, 4, 5]]])
@pytest.mark.parametrize("extra", EXTRAS, ids=", ".join)
def test_each_of_several_rows_of_a_request_sees_its_cells_up_to_its_own_length(
    extra: dict[str, Any], lens: list[list[int]], window: int | None, kind: type[DecodeAttention]
) -> None:
    rng, layer = np.random.default_rng(len(lens)), shape(window, **extra)
    paged = Paged(rng, [max(own) for own in lens], layer)
    ends = np.array(lens, np.int32)
    q = rng.standard_normal((ends.size, 6, 8), np.float32)
    streams = (mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)) if len(lens) > 2 else ()
    plan = kind([layer], SIZE, streams).plan(batch_of(paged.table, ends))
    found = np.array(plan.forward(mx.array(q), paged.kv, layer)).reshape(*ends.shape, 6, 8)
    for row, own in enumerate(ends):
        queries = q.reshape(*ends.shape, 6, 8)[row]
        wanted = by_hand(queries, paged.keys[row], paged.values[row], layer, own - 1)
        np.testing.assert_allclose(found[row], wanted, atol=1e-5)


def test_rows_of_a_request_have_its_page_table_each() -> None:
    rows = batch_of([[3, 7], [5, 1]], [6, 7, 2, 3])
    assert (rows.width, rows.pages_of_rows.tolist()) == (2, [[3, 7], [3, 7], [5, 1], [5, 1]])


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("prefix, count", [(0, 5), (0, 2), (6, 4), (13, 9), (1, 1)])
@pytest.mark.parametrize("extra", EXTRAS, ids=", ".join)
def test_a_row_of_several_queries_sees_its_prefix_and_itself(
    extra: dict[str, Any], prefix: int, count: int, window: int | None
) -> None:
    rng, layer = np.random.default_rng(prefix + count), shape(window, **extra)
    paged = Paged(rng, [prefix + count], layer)
    q = rng.standard_normal((count + 2, 6, 8), np.float32)
    k, v = (mx.array(np.pad(x[0][prefix:], ((2, 0), (0, 0), (0, 0)))) for x in (paged.keys, paged.values))
    row = PromptRow(0, 2, 2 + count, prefix, paged.cells_of[0]).plan([layer], ForwardBatch())
    found = np.array(row.forward(mx.array(q), k, v, paged.kv, layer))
    wanted = by_hand(q[2:], paged.keys[0], paged.values[0], layer, np.arange(prefix, prefix + count))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("extra", [extra for extra in EXTRAS if "softcap" in extra], ids=", ".join)
def test_half_precision_keeps_the_fractions_of_large_scores(extra: dict[str, Any]) -> None:
    """Scores are around 90, where 16-bit types have a coarse resolution."""
    rng, layer = np.random.default_rng(5), shape(**{**extra, "softcap": 150.0})
    layer = replace(layer, sinks=None if layer.sinks is None else SINKS + 90)
    q, k, v = (mx.array(rng.standard_normal((1, heads, 9, 8), np.float32)).astype(mx.bfloat16) for heads in (6, 2, 2))
    q[..., 0], k[..., 0] = 90.0 / 8 / layer.scale, 8.0
    found = attend(q, k, v, "causal", layer)
    queries, keys, values = (np.array(x[0].astype(mx.float32)).swapaxes(0, 1) for x in (q, k, v))
    wanted = by_hand(queries, keys, values, layer, np.arange(9))
    np.testing.assert_allclose(np.array(found[0].astype(mx.float32)).swapaxes(0, 1), wanted, atol=0.02)


def test_every_token_of_an_encoder_sees_its_own_row_and_no_other() -> None:
    rng, layer = np.random.default_rng(3), shape(heads=4, kv_heads=4, causal=False)
    offsets = np.array([0, 5, 6, 9], np.int32)
    q, k, v = (rng.standard_normal((9, 4, 8), np.float32) for _ in range(3))
    found = np.array(EncoderRows(ForwardBatch(), offsets, (layer,)).attend(0, mx.array(q), mx.array(k), mx.array(v)))
    for start, end in pairwise(offsets.tolist()):
        last = np.full(end - start, end - start - 1)
        np.testing.assert_allclose(
            found[start:end], by_hand(q[start:end], k[start:end], v[start:end], layer, last), atol=1e-5
        )


def test_storing_writes_the_named_cells_and_no_others() -> None:
    cells = mx.zeros((12, 2, 2, 4))
    k, v = mx.ones((3, 2, 4)), mx.full((3, 2, 4), 2.0)
    after = np.array(store(cells, mx.array(np.array([7, 2, 11], np.int32)), k, v))
    assert (after[[7, 2, 11], 0] == 1).all() and (after[[7, 2, 11], 1] == 2).all()
    assert not np.delete(after, [7, 2, 11], axis=0).any()


def test_a_candidate_is_refused_with_its_reason_and_a_named_one_is_strict() -> None:
    own = "sglcore_mlx.attention.gathered:GatheredAttention"
    candidates = {"metal": "sglcore_mlx.attention.paged:MetalAttention", "gathered": own}
    given = {"dtype": "float32", "head_dims": (64,), "page_size": 16, "compute": "gpu"}
    ledger = DecisionLedger()
    assert select_attention(candidates, None, ledger=ledger, **given) is GatheredAttention
    assert ledger.rows[0].effective == "gathered" and "metal: runs on metal, not gpu" in ledger.rows[0].reason
    with pytest.raises(ConfigError, match="runs on metal, not gpu"):
        select_attention(candidates, "metal", ledger=ledger, **given)
    with pytest.raises(ConfigError, match="no attention backend 'flash'; wanted one of metal, gathered"):
        select_attention(candidates, "flash", ledger=ledger, **given)


def test_each_fact_of_a_backend_can_refuse() -> None:
    facts = AttentionFacts(dtypes=("float16",), head_dims=(64,), page_sizes=(16,), compute=("metal",))
    assert refusal(facts, "float16", (64,), 16, "metal") == ""
    assert "runs on metal, not cpu" in refusal(facts, "float16", (64,), 16, "cpu")
    assert "not float32" in refusal(facts, "float32", (64,), 16, "metal")
    assert "heads of 80" in refusal(facts, "float16", (64, 80), 16, "metal")
    assert "pages of 16, not 8" in refusal(facts, "float16", (64,), 8, "metal")
