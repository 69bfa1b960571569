"""The decode and prefill registries: their buffers, the values that they compute, and the fields of
a batch that they carry."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sglcore.device.facts import Facts
from sglcore.runtime.buffer_registry import FillContext, InputBuffer
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory.pools import ReqToTokenPool
from sglcore.runtime.registry_builders import build_decode_registry, build_prefill_registry
from sglcore.step.batch_field import spec_of
from tests.runtime.tiny import SHARED, STAGED, TinyModel, ints, make_attention

I32 = torch.int32
both = pytest.mark.parametrize("facts", [SHARED, STAGED], ids=["shared", "staged"])


def test_a_device_package_adds_a_buffer_of_its_own() -> None:
    def double(view: Tensor, batch: ForwardBatch, ctx: FillContext) -> None:
        view[: ctx.raw_bs] = 2 * batch.seq_lens[: ctx.raw_bs]

    spec = replace(spec_of(ForwardBatch, "seq_lens"), name="twice", dtype="int64", read=None, owner="test")
    table, *_ = make_attention(TinyModel())
    registry = build_decode_registry(SHARED, table, max_bs=4, extra_buffers=[InputBuffer(spec, post_fill=double)])
    registry.stage("seq_lens", ints([3, 4]))
    registry.stage("req_pool_indices", ints([1, 2]))
    registry.stage("positions", ints([2, 3]))
    batch = registry.view(2, 2, False)
    registry.fill_from(batch, FillContext(2, 3, 2, 3))
    assert registry.input_buffer("twice").head(3, 3).tolist() == [6, 8, 1]
    assert registry.extract_buffer(batch, 3, 3).seq_lens is not None


@both
def test_what_an_owned_batch_holds_elsewhere_is_copied_into_its_buffer(facts: Facts) -> None:
    registry = build_prefill_registry(
        facts, None, max_bs=2, max_num_tokens=4, register_input_embeds=True, hidden_size=2
    )
    batch = registry.view(1, 3, True)
    assert registry.owns(batch)
    batch.mrope_positions = torch.arange(9, dtype=I32).view(3, 3)
    batch.input_embeds = torch.ones(3, 2)
    registry.fill_from(batch, FillContext(1, 1, 3, 4))
    view = registry.extract_buffer(batch, 1, 4)
    assert view.mrope_positions is not None and view.input_embeds is not None
    assert view.mrope_positions.tolist() == [[0, 1, 2, 0], [3, 4, 5, 0], [6, 7, 8, 0]]
    assert view.input_embeds.tolist() == [[1, 1]] * 3 + [[0, 0]]


def test_embeddings_without_a_buffer_are_the_batchs_own() -> None:
    registry = build_prefill_registry(SHARED, None, max_bs=2, max_num_tokens=4)
    batch = ForwardBatch(batch_size=1, num_tokens=3, input_ids=torch.ones(3, dtype=I32))
    batch.input_embeds = torch.ones(3, 2)
    ctx = FillContext(1, 1, 3, 4)
    registry.fill_from(batch, ctx)
    view = registry.extract_buffer(batch, 1, 4)
    assert view.input_embeds is batch.input_embeds


def test_growth_forgets_the_views_of_the_old_buffers() -> None:
    table, *_ = make_attention(TinyModel())
    registry = build_decode_registry(SHARED, table, max_bs=2)
    old = registry.view(2, 2, False)
    registry.fill_from(old, FillContext(1, 1, 1, 1))
    registry.fill_from(old, FillContext(2, 2, 2, 2))
    registry.ensure(3, 3)
    new = registry.view(2, 2, False)
    assert registry.owns(new)
    assert not registry.owns(old)
    registry.fill_from(new, FillContext(2, 2, 2, 2))
    assert new.num_token_non_padded.tolist() == [2]


@both
def test_a_commit_leaves_what_was_not_staged_as_it_was_made(facts: Facts) -> None:
    table, *_ = make_attention(TinyModel())
    registry = build_decode_registry(facts, table, max_bs=3)
    registry.stage("positions", ints([4]))
    registry.commit()
    assert registry.input_buffer("positions").head(3, 3).tolist() == [4, 0, 0]
    assert registry.input_buffer("seq_lens").head(3, 3).tolist() == [1, 1, 1]


def test_a_view_of_a_batch_of_single_tokens_has_no_extend_fields() -> None:
    registry = build_prefill_registry(SHARED, None, max_bs=2, max_num_tokens=4)
    assert registry.view(2, 2, False).extend_seq_lens is None
    assert registry.view(2, 2, True).extend_seq_lens is not None


def test_views_of_very_many_sizes_are_not_all_remembered() -> None:
    registry = build_prefill_registry(SHARED, None, max_bs=64, max_num_tokens=64)
    for bs in range(1, 65):
        for tokens in range(1, 65):
            registry.view(bs, tokens, True)
            if bs == 1 or tokens == 1:
                view = registry.view(bs, tokens, True)
                registry.fill_from(view, FillContext(bs, bs, tokens, tokens))
    assert len(registry._views) <= 1024


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_locations_are_the_cells_of_the_pages_in_the_integers_that_the_device_wants(page_size: int, dtype: str) -> None:
    table = ReqToTokenPool(3, 32, page_size, "cpu")
    table.page_table[1:3] = torch.randperm(2 * table.max_pages, generator=torch.manual_seed(0)).view(2, -1) + 1
    registry = build_prefill_registry(replace(SHARED, index_dtype=dtype), table, max_bs=2, max_num_tokens=64)
    batch = registry.view(2, 42, True)
    rows = [(2, 0, 32), (1, 13, 23)]
    for name, values in (
        ("req_pool_indices", [slot for slot, _, _ in rows]),
        ("extend_seq_lens", [end - start for _, start, end in rows]),
        ("positions", [position for _, start, end in rows for position in range(start, end)]),
    ):
        registry.stage(name, ints(values))
    registry.commit()
    registry.fill_from(batch, FillContext(2, 2, 42, 48))
    found = registry.input_buffer("out_cache_loc").head(2, 48)
    walk = [(slot, position) for slot, start, end in rows for position in range(start, end)]
    wanted = [int(table.page_table[slot, p // page_size]) * page_size + p % page_size for slot, p in walk]
    assert found.tolist() == wanted + [0] * 6
    assert str(found.dtype) == f"torch.{dtype}"
