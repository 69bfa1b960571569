"""The buffer registry: the content of an input buffer when it is made, filled, padded and read, for
every kind of buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.device.facts import Facts
from sglcore.runtime import buffer_registry
from sglcore.runtime.buffer_registry import BufferRegistry, FillContext, InputBuffer
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.registry_builders import build_decode_registry, previous_buffer
from sglcore.runtime.token_table import TokenTable
from sglcore.step.batch_field import Axis, Split, batch_field, fill_once, keep, sentinel, spec_of, specs, zero
from sglcore.step.forward_inputs import NgramEmbeddingInfo
from tests.runtime.tiny import ints

I32 = torch.int32
OWNER = "test"


@dataclass(slots=True)
class Pair:
    """A nested record."""

    left: Tensor | None = batch_field(axis=Axis.REQUESTS, dtype="int32", padding=sentinel(-2), owner=OWNER)


@dataclass(slots=True)
class Toy:
    """A batch with one field for every rule."""

    batch_size: int = batch_field(axis=Axis.NONE, split=Split.COPY, default=0, owner=OWNER)
    num_tokens: int = batch_field(axis=Axis.NONE, split=Split.COPY, default=0, owner=OWNER)
    input_ids: Tensor | None = batch_field(axis=Axis.TOKENS, dtype="int32", padding=zero(), read="input_ids")
    lens: Tensor | None = batch_field(axis=Axis.REQUESTS, dtype="int32", padding=sentinel(5), owner=OWNER)
    kept: Tensor | None = batch_field(axis=Axis.TOKENS, dtype="int32", padding=keep(), owner=OWNER)
    once: Tensor | None = batch_field(axis=Axis.TOKENS, dtype="int32", padding=fill_once(7), owner=OWNER)
    wide: Tensor | None = batch_field(axis=Axis.TOKENS, dtype="int32", padding=sentinel(-1), lead=(3,), owner=OWNER)
    count: Tensor | None = batch_field(
        axis=Axis.NONE, split=Split.DROP, dtype="int32", padding=fill_once(0), owner=OWNER
    )
    pair: Pair | None = batch_field(axis=Axis.NONE, split=Split.NESTED, record=Pair)
    carried: Any = batch_field(axis=Axis.NONE, split=Split.COPY, owner=OWNER)


TOY: Any = Toy


def count_both(view: Tensor, batch: Any, ctx: FillContext) -> None:
    """Sees the copies of this fill and its sizes."""
    view.copy_(torch.tensor([ctx.raw_bs, ctx.padded_bs, ctx.raw_num_tokens, ctx.padded_num_tokens]))


def toy_registry(shares: bool = True, extra: Sequence[InputBuffer] = (), without: Sequence[str] = ()) -> BufferRegistry:
    """A registry for four requests and eight tokens, with every buffer of `Toy`."""
    registry = BufferRegistry(TOY, "cpu", 4, 8, shares_host_memory=shares, pinned=False)
    for spec in specs(Toy):
        if spec.is_buffered and spec.name not in without:
            computed = spec.name == "count"
            registry.register(InputBuffer(spec, width=4 if computed else 1, post_fill=count_both if computed else None))
    registry.register(InputBuffer(replace(specs(Pair)[0], name="pair.left")))
    for buffer in extra:
        registry.register(buffer)
    registry.make_buffers()
    return registry


def toy(bs: int, tokens: int, **values: Any) -> Any:
    """A batch of this size; the values of its tensors count upwards from 10."""
    return Toy(
        batch_size=bs,
        num_tokens=tokens,
        input_ids=torch.arange(10, 10 + tokens, dtype=I32),
        lens=torch.arange(10, 10 + bs, dtype=I32),
        kept=torch.arange(10, 10 + tokens, dtype=I32),
        once=torch.arange(10, 10 + tokens, dtype=I32),
        wide=torch.arange(10, 10 + 3 * tokens, dtype=I32).view(3, tokens),
        **values,
    )


def contents(registry: BufferRegistry, name: str) -> list[Any]:
    """The whole content of a buffer."""
    buffer = registry.input_buffer(name).tensor
    return buffer.tolist()


SIZES = FillContext(raw_bs=2, padded_bs=3, raw_num_tokens=3, padded_num_tokens=5)
both = pytest.mark.parametrize("shares", [True, False], ids=["shared", "staged"])


def test_a_second_buffer_of_the_same_name_is_an_error() -> None:
    registry = BufferRegistry(TOY, "cpu", 4, 8, shares_host_memory=True, pinned=False)
    registry.register(InputBuffer(spec_of(Toy, "lens")))
    with pytest.raises(ValueError, match="input buffer 'lens' is registered twice"):
        registry.register(InputBuffer(spec_of(Toy, "lens")))


def test_a_buffer_after_the_buffers_were_made_is_an_error() -> None:
    with pytest.raises(ValueError, match="is registered after the memory was allocated; register all before"):
        toy_registry().register(InputBuffer(replace(spec_of(Toy, "lens"), name="late")))


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    registry = toy_registry()
    for ask in (lambda: registry.input_buffer("seq_len"), lambda: registry.stage("seq_len", ints([1]))):
        with pytest.raises(KeyError, match="no input buffer 'seq_len'; registered: input_ids, lens, kept"):
            ask()


def test_a_buffer_that_the_host_does_not_fill_can_not_be_staged() -> None:
    with pytest.raises(AssertionError, match="input buffer 'lens' is not filled by the host"):
        toy_registry().stage("lens", ints([1]))


@both
def test_a_new_buffer_holds_what_its_padding_says(shares: bool) -> None:
    registry = toy_registry(shares)
    assert contents(registry, "input_ids") == [0] * 8
    assert contents(registry, "lens") == [5] * 4
    assert contents(registry, "kept") == [0] * 8
    assert contents(registry, "once") == [7] * 8
    assert contents(registry, "wide") == [[-1] * 8] * 3
    assert contents(registry, "pair.left") == [-2] * 4


def test_a_registry_on_another_device_than_its_memory_is_refused_when_its_buffers_are_made() -> None:
    registry = BufferRegistry(TOY, "meta", 4, 8, shares_host_memory=True, pinned=False)
    registry.register(InputBuffer(spec_of(Toy, "input_ids")))
    with pytest.raises(ValueError, match="input buffer 'input_ids' lies on cpu, the registry on meta"):
        registry.make_buffers()


@both
def test_a_fill_copies_the_head_pads_within_the_bucket_and_leaves_the_rest(shares: bool) -> None:
    registry = toy_registry(shares)
    for name in ("input_ids", "lens", "kept", "once", "wide"):
        buffer = registry.input_buffer(name).tensor
        buffer.fill_(99)
    registry.fill_from(toy(2, 3), SIZES)
    assert contents(registry, "input_ids") == [10, 11, 12, 0, 0, 99, 99, 99]
    assert contents(registry, "lens") == [10, 11, 5, 99]
    assert contents(registry, "kept") == [10, 11, 12, 99, 99, 99, 99, 99]
    assert contents(registry, "once") == [10, 11, 12, 99, 99, 99, 99, 99]
    assert contents(registry, "wide")[2] == [16, 17, 18, -1, -1, 99, 99, 99]


def test_a_skipped_buffer_is_padded_but_neither_copied_nor_computed() -> None:
    registry = toy_registry()
    registry.fill_from(toy(2, 3), SIZES, skip=("lens", "count"))
    assert contents(registry, "lens") == [5] * 4
    assert contents(registry, "count") == [0] * 4


def test_the_extracted_view_shares_memory_has_padded_lengths_and_carries_the_rest() -> None:
    registry, batch = toy_registry(), toy(2, 3, carried=object())
    lens = batch.lens
    registry.fill_from(batch, SIZES)
    view: Any = registry.extract_buffer(batch, 3, 5)
    assert (view.batch_size, view.num_tokens) == (3, 5)
    assert view.lens.tolist() == [10, 11, 5]
    assert view.wide.shape == (3, 5)
    for name in ("input_ids", "lens", "kept", "once", "wide", "count"):
        buffer = registry.input_buffer(name).tensor
        assert getattr(view, name).data_ptr() == buffer.data_ptr()
    assert view.carried is batch.carried
    assert (batch.batch_size, batch.num_tokens) == (2, 3)
    assert batch.lens is lens


def test_a_plain_field_that_is_absent_this_step_stays_absent() -> None:
    registry = toy_registry()
    registry.fill_from(toy(2, 3), SIZES)
    batch = toy(1, 1)
    batch.wide = batch.kept = None
    registry.fill_from(batch, FillContext(1, 2, 1, 2))
    view: Any = registry.extract_buffer(batch, 2, 2)
    assert view.wide is None
    assert view.kept is None
    assert contents(registry, "wide")[0][:3] == [10, -1, 12]


def stale_extract(registry: BufferRegistry, batch: Any) -> Any:
    """Mutant: exposes every buffer."""
    return replace(batch, **{s: registry.input_buffer(s).head(2, 2) for s in registry.names if "." not in s})


def test_an_extraction_that_exposes_an_absent_buffer_is_caught() -> None:
    registry = toy_registry()
    batch = toy(1, 1)
    batch.wide = None
    assert stale_extract(registry, batch).wide is not None


def test_a_buffer_that_was_not_registered_carries_the_batchs_own_value() -> None:
    registry, batch = toy_registry(without=("lens",)), toy(2, 3)
    registry.fill_from(batch, SIZES)
    view: Any = registry.extract_buffer(batch, 3, 5)
    assert view.lens is batch.lens


def test_a_computed_buffer_is_exposed_even_where_the_batch_has_none() -> None:
    registry, batch = toy_registry(), toy(2, 3)
    registry.fill_from(batch, SIZES)
    view: Any = registry.extract_buffer(batch, 3, 5)
    assert batch.count is None
    assert view.count.tolist() == [2, 3, 3, 5]


def test_a_computation_runs_after_the_copies_on_the_padded_view() -> None:
    seen: list[Any] = []

    def after(view: Tensor, batch: Any, ctx: FillContext) -> None:
        seen.append((len(view), contents(registry, "input_ids")[:5], contents(registry, "lens")[:3], ctx))

    spec = replace(spec_of(Toy, "lens"), name="late", read=None, owner=OWNER)
    registry = toy_registry(extra=[InputBuffer(spec, post_fill=after)])
    registry.fill_from(toy(2, 3), SIZES)
    assert seen == [(3, [10, 11, 12, 0, 0], [10, 11, 5], SIZES)]


def test_a_source_fills_the_head_only_and_none_leaves_the_buffer_alone() -> None:
    given: list[Tensor | None] = [torch.tensor([1, 2], dtype=I32), None]
    buffer = InputBuffer(
        replace(spec_of(Toy, "kept"), name="extra", axis=Axis.REQUESTS), source_fn=lambda batch, ctx: given.pop(0)
    )
    registry = toy_registry(extra=[buffer])
    buffer.tensor.fill_(50)
    registry.fill_from(toy(2, 3), SIZES)
    assert buffer.tensor.tolist() == [1, 2, 50, 50]
    registry.fill_from(toy(1, 3), FillContext(1, 3, 3, 5))
    assert buffer.tensor.tolist() == [1, 2, 50, 50]
    assert given == []


def test_a_buffer_of_a_nested_record_is_filled_padded_and_read_by_its_dotted_name() -> None:
    registry = toy_registry()
    batch = toy(2, 3, pair=Pair(torch.tensor([8, 9], dtype=I32)))
    registry.fill_from(batch, SIZES)
    view: Any = registry.extract_buffer(batch, 3, 5)
    assert view.pair.left.tolist() == [8, 9, -2]
    assert view.pair is not batch.pair
    registry.fill_from(toy(1, 1), FillContext(1, 2, 1, 2))
    assert contents(registry, "pair.left") == [8, -2, -2, -2]


def test_a_batch_without_the_nested_record_stays_without() -> None:
    registry, batch = toy_registry(), toy(2, 3)
    view: Any = registry.extract_buffer(batch, 3, 5)
    assert view.pair is None


def test_a_plain_buffer_that_no_batch_field_feeds_is_an_error_not_a_silent_none() -> None:
    registry = toy_registry(extra=[InputBuffer(replace(spec_of(Toy, "lens"), name="lenz"))])
    with pytest.raises(AttributeError, match="lenz"):
        registry.fill_from(toy(2, 3), SIZES)


@both
def test_capacity_grows_to_the_next_power_of_two_and_keeps_its_rules(shares: bool) -> None:
    registry = toy_registry(shares)
    registry.ensure(4, 8)
    assert (registry.max_bs, registry.max_num_tokens) == (4, 8)
    registry.ensure(5, 3)
    assert (registry.max_bs, registry.max_num_tokens) == (8, 8)
    registry.ensure(1, 65)
    assert (registry.max_bs, registry.max_num_tokens) == (8, 128)
    assert contents(registry, "lens") == [5] * 8
    registry.fill_from(toy(8, 70), FillContext(8, 8, 70, 80))
    assert contents(registry, "input_ids")[68:82] == [78, 79] + [0] * 12


@both
def test_growth_that_fails_leaves_the_capacity_and_what_it_holds(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = toy_registry(shares)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(buffer_registry, "HostBlock", _no_memory)
        registry.ensure(5, 100)
    assert (registry.max_bs, registry.max_num_tokens) == (4, 8)
    registry.stage("input_ids", ints([1, 2]))
    registry.commit()
    assert contents(registry, "input_ids")[:2] == [1, 2]
    registry.ensure(5, 100)
    assert (registry.max_bs, registry.max_num_tokens) == (8, 128)


def _no_memory(*sizes: object, **others: object) -> None:
    raise MemoryError


@both
def test_poison_reaches_buffers_whose_padding_is_never_written(shares: bool) -> None:
    registry = toy_registry(shares)
    registry.poison()
    assert contents(registry, "kept") == [2**31 - 1] * 8
    assert contents(registry, "once") == [7] * 8


def test_after_freeze_addresses_never_change_and_a_larger_batch_is_an_error() -> None:
    registry = toy_registry()
    registry.freeze()
    buffers = [registry.input_buffer(name).tensor for name in registry.names]
    registry.ensure(4, 8)
    for bs, tokens in ((5, 1), (1, 9)):
        with pytest.raises(ValueError, match="exceeds the 4 and 8 that captured graphs hold addresses of"):
            registry.ensure(bs, tokens)
    assert all(old is registry.input_buffer(name).tensor for old, name in zip(buffers, registry.names, strict=True))


def test_a_nested_record_has_what_has_a_buffer_and_keeps_the_rest() -> None:
    facts = Facts(tensor_device="cpu", shares_host_memory=True)
    table = TokenTable(2, 8, "cpu")
    with_buffer = build_decode_registry(facts, None, max_bs=4, extra_buffers=[previous_buffer(table, 1)])
    without = build_decode_registry(facts, None, max_bs=4)
    table.history[2, :3] = torch.tensor([5, 6, 7])
    given = torch.full((1, 1), 9, dtype=torch.int32)
    found = []
    for registry in (with_buffer, without):
        batch = registry.view(1, 1, False)
        assert (batch.ngram_embedding_info is not None) == (registry is with_buffer)
        batch.req_pool_indices.fill_(2)
        batch.positions.fill_(3)
        batch.ngram_embedding_info = NgramEmbeddingInfo(given)
        registry.fill_from(batch, FillContext(1, 1, 1, 1))
        found.append(registry.extract_buffer(batch, 1, 1).ngram_embedding_info)
    assert [info.previous_ids.tolist() for info in found if info is not None] == [[[7]], [[9]]]
    assert found[1] is not None and found[1].previous_ids is given
    empty = ForwardBatch(batch_size=1, num_tokens=1, ngram_embedding_info=NgramEmbeddingInfo(None))
    info = with_buffer.extract_buffer(empty, 1, 1).ngram_embedding_info
    assert info is not None and info.previous_ids is None
