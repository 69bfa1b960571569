"""Attention over windows and compressed blocks: pages, chunks, batches, graphs and plans made ahead
do not change the results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.runtime.attention.contract import Bucket
from sglcore.runtime.attention.sparse import token_queries as sparse_tokens
from sglcore.runtime.attention.sparse.compressed import CompressedPlan, DeepseekV4AttnBackend
from sglcore.runtime.buffer_registry import FillContext
from sglcore.runtime.forward_batch import ForwardBatch, StalePlanError
from sglcore.runtime.graphs.shadow_mode import Shadow
from sglcore.runtime.kernels.table import KernelTable
from tests.runtime.sparse_tiny import HEAVY, LAYERS, SLIDING, SPARSE, WINDOW, SparseDesk, desk_of, make_sparse
from tests.runtime.test_windows import script
from tests.runtime.tiny import CONTEXT, SHARED, STAGED, Site, assert_close, random_tokens


@pytest.mark.parametrize("layers", [(SLIDING,), (HEAVY,), (SPARSE,), LAYERS])
def test_one_text_at_once_is_what_the_formulas_give(layers: Any) -> None:
    site = make_sparse(layers)
    tokens = random_tokens(1, 9)
    batch = site.runner.init_batch(SparseDesk(site, WINDOW).extend({3: tokens}))
    assert_close(site.runner.forward(batch)[0], site.model.dense(tokens))


@pytest.mark.parametrize("buckets", [(), (1, 4)])
@pytest.mark.parametrize("facts", [SHARED, STAGED])
def test_every_token_is_what_the_whole_text_gives(facts: Any, buckets: Any) -> None:
    script(make_sparse(facts=facts, buckets=buckets), WINDOW, SparseDesk)


def running(site: Site, lengths: dict[int, int]) -> Any:
    """The host of requests with prefilled texts of these lengths."""
    desk = desk_of(site)
    for slot, length in lengths.items():
        for first in range(0, length, 9):
            batch = site.runner.init_batch(desk.extend({slot: random_tokens(slot, length)[first : first + 9]}))
            site.runner.forward(batch)
    return desk


@pytest.mark.parametrize("own_pages", [0, 24])
def test_windows_are_in_pages_of_their_own_or_in_those_of_all_tokens(own_pages: int) -> None:
    site = make_sparse(own_pages=own_pages)
    desk, texts = running(site, {2: 17, 4: 6}), {2: random_tokens(2, 17), 4: random_tokens(4, 6)}
    for slot, more in ((4, 5), (2, 7)):
        texts[slot] += random_tokens(9 + slot, more)
        hidden, _ = site.runner.forward(site.runner.init_batch(desk.extend({slot: texts[slot][-more:]})))
        assert_close(hidden, site.model.dense(texts[slot])[-more:])


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    found = []
    for slots in [(2, 4, 5), (5, 2, 4), (4,)]:
        site = make_sparse()
        desk = running(site, {2: 17, 4: 6, 5: 11})
        batch = site.runner.init_batch(desk.extend({slot: random_tokens(slot, 5) for slot in slots}))
        hidden = site.runner.forward(batch)[0].split(5)
        found.append(hidden[slots.index(4)])
    for other in found[1:]:
        assert_close(other, found[0])


def test_an_indexer_scores_as_many_tokens_at_a_time_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    text, whole = random_tokens(1, 9), None
    for most in (1 << 20, 3):
        monkeypatch.setattr(sparse_tokens, "LOGITS", most)
        site = make_sparse()
        hidden, _ = site.runner.forward(site.runner.init_batch(SparseDesk(site, WINDOW).extend({3: text})))
        whole = hidden if whole is None else whole
        assert_close(hidden, whole)


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("most", [8, 16, 24, 48])
def test_tokens_of_several_requests_choose_by_parts_what_they_choose_at_once(
    most: int, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of one, two, three tokens, and all but the last; neighbouring tokens belong to
    different requests."""
    torch.manual_seed(most)
    table = torch.randperm(12, dtype=torch.int32).view(3, 4)
    slots, lens = torch.tensor([0, 2, 1, 0, 2, 1, 1], dtype=torch.int32), torch.tensor([3, 8, 5, 7, 2, 8, 1]).int()
    paged = sparse_tokens.Paged(table, slots, lens, 2, 8)
    q, weights, keys = torch.randn(7, 2, 8), torch.randn(7, 2), torch.randn(24, 8)
    named = (torch.randperm(12, dtype=torch.int32).view(3, 4) + 50, slots.flip(0)) if is_named else None
    wanted = sparse_tokens.choose_rows(KernelTable(), q, weights, keys, None, paged, 3, named)
    alone = [
        sparse_tokens.choose_rows(
            KernelTable(),
            q[[t]],
            weights[[t]],
            keys,
            None,
            sparse_tokens.Paged(table, slots[[t]], lens[[t]], 2, 8),
            3,
            None if named is None else (named[0], named[1][[t]]),
        )
        for t in range(7)
    ]
    assert torch.equal(torch.cat(alone), wanted)
    monkeypatch.setattr(sparse_tokens, "LOGITS", most)
    found = sparse_tokens.choose_rows(KernelTable(), q, weights, keys, None, paged, 3, named)
    assert torch.equal(found, wanted) and len({tuple(row) for row in wanted.tolist()}) == 7


def test_an_indexer_of_no_tokens_chooses_nothing() -> None:
    table, none = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    paged = sparse_tokens.Paged(table, none, none, 4, 0)
    q, weights, keys = torch.zeros(0, 2, 8), torch.zeros(0, 2), torch.zeros(4, 8)
    assert sparse_tokens.choose_rows(KernelTable(), q, weights, keys, None, paged, 3).shape == (0, 3)


def parts(plan: CompressedPlan) -> dict[str, Tensor]:
    """All tensors of a plan by name. The names of tensors that do not have one entry per token
    begin with a dot."""
    found = {"slots": plan.tokens.slots, "lens": plan.tokens.lens, "window": plan.window, "out": plan.window_out}
    found |= {f"blocks {ratio}": each for ratio, each in plan.blocks.items()}
    for key, each in plan.completed.items():
        found |= {f".reads {key}": each.reads, f".block_positions {key}": each.block_positions}
        found |= {f".out_rows {key}": each.out_rows, f"writes {key}": each.writes}
    return found


def assert_same(found: CompressedPlan, wanted: CompressedPlan, size: int) -> None:
    """Compare the first `size` tokens of a plan that has room for more; unused entries must hold
    the padding value."""
    one, other = parts(found), parts(wanted)
    assert one.keys() == other.keys()
    for name, value in other.items():
        have = one[name] if name.startswith(".") else one[name][:size]
        common = tuple(slice(0, length) for length in value.shape)
        assert torch.equal(have[common].long(), value.long()), name
        rest = torch.ones_like(have, dtype=torch.bool)
        rest[common] = False
        assert (have[rest] == (0 if name.startswith((".block", ".out")) else -1)).all(), name


@torch.inference_mode()
@pytest.mark.parametrize("own_pages", [0, 24])
def test_a_plan_that_is_refreshed_is_that_which_would_be_made_and_stays_where_it_is(own_pages: int) -> None:
    """Batches shrink and grow, have padding rows, and reach the longest text."""
    site = make_sparse(own_pages=own_pages)
    desk, backend = running(site, {1: 9, 2: CONTEXT - 4, 3: 3, 5: 12, 7: 7}), site.attention
    assert isinstance(backend, DeepseekV4AttnBackend)
    captured = backend.capture_plan(Bucket(6, 6))
    addresses = {name: value.data_ptr() for name, value in parts(captured).items()}
    for slots in [(1, 2, 3, 5, 7), (2,), (7, 1), (5, 3, 2, 1), (1, 2, 3, 5, 7)]:
        batch = site.runner.init_batch(desk.decode(*slots))
        registry, size = site.runner.registry_for(batch), len(slots)
        registry.fill_from(batch, FillContext(size, 6, size, 6))
        backend.refresh(captured, registry.extract_buffer(batch, 6, 6))
        assert_same(captured, backend.plan(batch), size)
        assert all((completed.writes[size:] == 0).all() for completed in captured.completed.values())
    assert {name: value.data_ptr() for name, value in parts(captured).items()} == addresses


@torch.inference_mode()
def test_a_plan_of_before_the_pool_moved_is_refused() -> None:
    site = make_sparse(buckets=(1,))
    desk = running(site, {1: 9})
    site.attention.token_to_kv_pool.replace_storage()
    with pytest.raises(StalePlanError, match="generation"):
        site.worker.submit(desk.decode(1))


@torch.inference_mode()
def test_a_batch_that_is_not_planned_is_refused() -> None:
    site = make_sparse()
    batch = site.runner.init_batch(SparseDesk(site, WINDOW).extend({3: random_tokens(1, 9)}))
    with pytest.raises(StalePlanError, match="without a plan"):
        site.attention.planned(batch)


def test_compared_replays_leave_rows_and_rings_as_they_were() -> None:
    """The eager forward that is compared with a replay may write anything."""
    site = make_sparse(buckets=(2,))
    desk = running(site, {1: 9, 2: 17})
    assert site.runner.graphs is not None
    site.runner.graphs.shadow = Shadow(1)
    pool, beside = site.attention.token_to_kv_pool, site.runner.graphs._forward

    def spoils(batch: ForwardBatch) -> Tensor:
        """Compute the right result, then overwrite everything that the forward may write with
        NaN."""
        hidden = beside(batch)
        for tensor, places in site.attention.rows_of(batch):
            tensor[places] = torch.nan
        return hidden

    site.runner.graphs._forward = spoils
    for _ in range(6):
        site.worker.collect(site.worker.submit(desk.decode(1, 2)))
    assert site.runner.graphs.shadow.compared == 6
    rows = [pool.rows(layer, "window") for layer in range(pool.num_layers)]
    assert not any(part[site.model.seen[-1].window_cache_loc].isnan().any() for part in rows)
