"""The children of a split batch equal children found by counting tokens one by one, for every
interval and every kind of batch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglcore.runtime.batch_split import SplitRefusedError, filter_batch, refusal
from sglcore.runtime.buffer_registry import FillContext
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext, forward_context
from sglcore.step.batch_field import Axis, Split, When, batch_field, batch_record, specs
from sglcore.step.forward_inputs import NgramEmbeddingInfo
from sglcore.worker.schedule_batch import CaptureHiddenMode, ForwardMode, ScheduleBatch
from tests.runtime.tiny import PAGE, SHARED, STAGED, Site, assert_close, random_tokens
from tests.runtime.windows import WindowDesk, make_windowed

Rows = list[tuple[int, int]]
ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=4)
"""(tokens before this step, tokens in this step) of each request."""
WINDOW = 2

TENSORS = ("input_ids", "positions", "out_cache_loc", "window_cache_loc", "req_pool_indices", "seq_lens")
EXTENDS = ("extend_prefix_lens", "extend_seq_lens", "extend_start_loc")
MIRRORS = ("seq_lens_cpu", "extend_prefix_lens_cpu", "extend_seq_lens_cpu")


def parent(rows: Rows, decode: bool = False, facts: Any = SHARED) -> tuple[Site, ForwardBatch]:
    """A staged batch of these requests, with every optional field; their prefixes are prefilled."""
    site = make_windowed((None, WINDOW), facts=facts)
    desk = WindowDesk(site, WINDOW, seed=1)
    prefixes = {slot + 1: random_tokens(slot, prefix) for slot, (prefix, _) in enumerate(rows) if prefix}
    site.runner.run_eager(site.runner.init_batch(desk.extend(prefixes)))
    tokens = {slot + 1: random_tokens(50 + slot, length) for slot, (_, length) in enumerate(rows)}
    count = sum(length for _, length in rows)
    extra = {
        "token_type_ids": np.arange(count, dtype=np.int32) % 2,
        "mrope_positions": np.arange(3 * count, dtype=np.int32).reshape(3, count),
    }
    mode = ForwardMode.DECODE if decode else ForwardMode.MIXED
    host = desk.batch(tokens, mode, **extra)
    site.tokens.last[1 : len(rows) + 1] = torch.tensor([found[-1] for found in tokens.values()], dtype=torch.int32)
    batch = site.runner.init_batch(host)
    site.runner.prepared(batch)
    batch.input_embeds = torch.arange(2.0 * count).view(count, 2)
    batch.ngram_embedding_info = NgramEmbeddingInfo(torch.arange(2 * count, dtype=torch.int32).view(count, 2))
    batch.capture_hidden_mode = CaptureHiddenMode.FULL
    batch.sampling = object()
    return site, batch


def counted(batch: ForwardBatch, rows: Rows, first: int, last: int) -> dict[str, Any]:
    """The child [first, last), found by walking over the tokens."""
    walk = [(row, prefix + step, step) for row, (prefix, length) in enumerate(rows) for step in range(length)]
    inside = walk[first:last]
    present = list(dict.fromkeys(row for row, _, _ in inside))
    lengths = [sum(row == other for other, _, _ in inside) for row in present]
    starts = [next(position for other, position, _ in inside if other == row) for row in present]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    info = batch.ngram_embedding_info
    assert (
        info is not None
        and info.previous_ids is not None
        and batch.mrope_positions is not None
        and batch.input_embeds is not None
    )
    assert batch.token_type_ids is not None
    decode = batch.extend_seq_lens is None
    hidden = [max(0, prefix - WINDOW + 1) // PAGE * PAGE for prefix, _ in rows]
    own = {name: _list(getattr(batch, name)) for name in (*TENSORS, *EXTENDS)}
    return {
        "forward_mode": batch.forward_mode,
        "batch_size": len(present),
        "num_tokens": last - first,
        "width": None,
        "input_ids": own["input_ids"][first:last],
        "positions": [position for _, position, _ in inside],
        "out_cache_loc": own["out_cache_loc"][first:last],
        "window_positions": [position - hidden[row] for row, position, _ in inside],
        "window_cache_loc": own["window_cache_loc"][first:last],
        "window_seq_lens": [end - hidden[row] for row, end in zip(present, ends, strict=True)],
        "window_seq_lens_cpu": [end - hidden[row] for row, end in zip(present, ends, strict=True)],
        "req_pool_indices": [own["req_pool_indices"][row] for row in present],
        "seq_lens": ends,
        "seq_lens_cpu": ends,
        "extend_prefix_lens": None if decode else starts,
        "extend_prefix_lens_cpu": starts,
        "extend_seq_lens": None if decode else lengths,
        "extend_seq_lens_cpu": None if decode else lengths,
        "extend_start_loc": None if decode else [sum(lengths[:i]) for i in range(len(lengths))],
        "num_token_non_padded": [last - first],
        "step_plan": None,
        "token_type_ids": batch.token_type_ids.tolist()[first:last],
        "mrope_positions": [row[first:last] for row in batch.mrope_positions.tolist()],
        "input_embeds": batch.input_embeds.tolist()[first:last],
        "features": None,
        "visible": None,
        "run_slots": None,
        "run_targets": None,
        "run_lens": None,
        "run_rows": None,
        "ngram_embedding_info": {"previous_ids": info.previous_ids.tolist()[first:last]},
        "capture_hidden_mode": CaptureHiddenMode.FULL,
        "return_hidden_states_before_norm": False,
        "sampling": None,
        "spec_info": None,
        "plan_record": None,
        "turn": None,
    }


def _list(value: Any) -> Any:
    if isinstance(value, NgramEmbeddingInfo):
        return {spec.name: _list(getattr(value, spec.name)) for spec in specs(NgramEmbeddingInfo)}
    return value.tolist() if isinstance(value, (Tensor, np.ndarray)) else value


def found(child: ForwardBatch) -> dict[str, Any]:
    """Every field of a child, as plain values."""
    return {spec.name: _list(getattr(child, spec.name)) for spec in specs(ForwardBatch)}


def check_every_interval(batch: ForwardBatch, rows: Rows, split: Any = filter_batch) -> None:
    """Compare all children with the counted ones."""
    before = found(batch)
    for first in range(batch.num_tokens + 1):
        for last in range(first, batch.num_tokens + 1):
            assert found(split(batch, first, last)) == counted(batch, rows, first, last), (first, last)
    assert found(batch) == before


@settings(deadline=None, max_examples=30)
@given(ROWS, st.sampled_from([SHARED, STAGED]))
def test_every_interval_of_a_mixed_batch(rows: Rows, facts: Any) -> None:
    check_every_interval(parent(rows, facts=facts)[1], rows)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 6), st.just(1)), min_size=1, max_size=5))
def test_every_interval_of_a_decode_batch(rows: Rows) -> None:
    check_every_interval(parent(rows, decode=True)[1], rows)


def split_without_prefix(batch: ForwardBatch, first: int, last: int) -> ForwardBatch:
    """Mutant: the second child restarts a request that was cut."""
    child = filter_batch(batch, first, last)
    if child.extend_prefix_lens is not None and batch.extend_prefix_lens is not None:
        child.extend_prefix_lens = batch.extend_prefix_lens[: child.batch_size]
    return child


def split_sharing_the_plan(batch: ForwardBatch, first: int, last: int) -> ForwardBatch:
    """Mutant: the child keeps the parent's plan marker."""
    child = filter_batch(batch, first, last)
    child.plan_record = batch.plan_record
    return child


@pytest.mark.parametrize("mutant", [split_without_prefix, split_sharing_the_plan])
def test_a_split_that_forgets_something_is_caught(mutant: Any) -> None:
    rows = [(2, 3), (1, 2)]
    site, batch = parent(rows)
    batch.mark_forward_metadata_ready(site.attention.plan(batch))
    with pytest.raises(AssertionError):
        check_every_interval(batch, rows, mutant)


@pytest.mark.parametrize("cuts", [(0, 3, 9), (0, 1, 9), (0, 5, 5, 9), (0, 0, 9), (0, 2, 4, 6, 9)])
def test_children_that_run_one_after_the_other_give_what_the_whole_gives(cuts: tuple[int, ...]) -> None:
    rows = [(2, 1), (0, 4), (3, 4)]
    site, batch = parent(rows)
    whole = run(site, batch)
    other, again = parent(rows)
    parts = [run(other, filter_batch(again, first, last)) for first, last in pairwise(cuts)]
    assert_close(torch.cat(parts), whole)


def run(site: Site, batch: ForwardBatch) -> Tensor:
    """Hidden states of the batch without further preparation, as a driver of pipeline stages runs
    it."""
    batch.mark_forward_metadata_ready(site.attention.plan(batch))
    with forward_context(ForwardContext(site.attention, batch, site.model.attention_layers)):
        return site.model(batch)


def test_an_interval_outside_the_batch_is_an_error() -> None:
    _, batch = parent([(0, 3)])
    for first, last in ((-1, 2), (2, 1), (0, 4)):
        with pytest.raises(ValueError, match=rf"tokens \[{first}, {last}\) do not lie in a batch of 3 tokens"):
            filter_batch(batch, first, last)


@pytest.mark.parametrize(("first", "last", "real"), [(0, 3, 3), (0, 5, 4), (3, 6, 1), (4, 6, 0), (5, 5, 0)])
def test_a_child_counts_its_own_real_tokens(first: int, last: int, real: int) -> None:
    _, batch = parent([(0, 6)])
    batch.num_token_non_padded = torch.tensor([4], dtype=torch.int32)
    child = filter_batch(batch, first, last)
    assert child.num_token_non_padded.tolist() == [real]
    assert batch.num_token_non_padded.tolist() == [4]


def padded(batch: ForwardBatch, site: Site, bs: int, tokens: int) -> ForwardBatch:
    """The registry's padded view of a staged batch."""
    registry = site.runner.registry_for(batch)
    registry.ensure(bs, tokens)
    registry.fill_from(batch, FillContext(batch.batch_size, bs, batch.num_tokens, tokens))
    return registry.extract_buffer(batch, bs, tokens)


def test_a_view_of_the_registry_splits_like_the_raw_batch() -> None:
    rows = [(2, 1), (0, 4), (3, 4)]
    site, batch = parent(rows)
    view = padded(batch, site, 3, 9)
    for first in range(10):
        for last in range(first, 10):
            assert found(filter_batch(view, first, last)) == found(filter_batch(batch, first, last))


def test_children_of_a_padded_decode_have_padding_rows_that_the_host_does_not_know() -> None:
    rows = [(4, 1), (2, 1), (5, 1)]
    site, batch = parent(rows, decode=True)
    view = padded(batch, site, 6, 6)
    for first, last in ((0, 6), (2, 4), (3, 6), (1, 3), (6, 6)):
        child = filter_batch(view, first, last)
        raw = filter_batch(batch, min(first, 3), min(last, 3))
        assert child.seq_lens_cpu is not None and raw.seq_lens_cpu is not None
        padding = last - first - raw.batch_size
        assert child.batch_size == last - first
        assert child.seq_lens.tolist() == raw.seq_lens_cpu.tolist() + [1] * padding
        assert child.seq_lens_cpu.tolist() == raw.seq_lens_cpu.tolist()
        assert _list(child.num_token_non_padded) == [raw.num_tokens]
        assert _list(child.req_pool_indices) == _list(raw.req_pool_indices) + [0] * padding
        hidden = run(site, child)
        assert_close(hidden[: raw.num_tokens], run(site, raw))


def test_padding_tokens_of_a_long_batch_belong_to_no_row() -> None:
    rows = [(2, 1), (0, 4)]
    site, batch = parent(rows)
    view = padded(batch, site, 4, 8)
    child = filter_batch(view, 4, 8)
    assert (child.batch_size, child.num_tokens) == (1, 4)
    assert _list(child.extend_seq_lens) == _list(child.extend_seq_lens_cpu) == [1]
    assert _list(child.num_token_non_padded) == [1]
    assert _list(filter_batch(view, 6, 8).seq_lens) == []


# -- kinds of fields that no batch has yet
# -----------------------------------------------------------------------------


@dataclass(slots=True)
class Draft:
    """Fields that a draft adds to a batch."""

    scores: Tensor | None = batch_field(axis=Axis.REQUESTS, owner="test")
    tree: Tensor | None = batch_field(axis=Axis.NONE, split=Split.REFUSE, owner="test")
    depth: int = batch_field(axis=Axis.NONE, split=Split.COPY, default=0, owner="test")
    cache: object = batch_field(axis=Axis.NONE, split=Split.FRESH, owner="test")
    parent: object = batch_field(axis=Axis.NONE, split=Split.DROP, owner="test")


def test_a_nested_record_splits_its_own_fields() -> None:
    _, batch = parent([(0, 2), (1, 2), (0, 1)])
    batch.spec_info = Draft(torch.tensor([1.0, 2.0, 3.0]), depth=4, cache=object(), parent=object())
    child = filter_batch(batch, 1, 4)
    assert child.spec_info.scores.tolist() == [1.0, 2.0]
    assert (child.spec_info.depth, child.spec_info.cache, child.spec_info.parent) == (4, None, None)
    assert batch.spec_info.scores.tolist() == [1.0, 2.0, 3.0]


def test_a_field_that_refuses_makes_the_batch_unsplittable_only_while_it_is_there() -> None:
    _, batch = parent([(0, 2), (1, 2)])
    batch.spec_info = Draft(torch.tensor([1.0, 2.0]), tree=torch.zeros(2))
    with pytest.raises(SplitRefusedError, match="a batch with tree cannot be split; run it whole"):
        filter_batch(batch, 0, 2)
    batch.spec_info.tree = None
    assert filter_batch(batch, 0, 2).spec_info.scores.tolist() == [1.0]


def test_views_of_a_child_share_the_parents_memory_where_the_axis_is_only_cut() -> None:
    _, batch = parent([(0, 3), (0, 3)])
    child = filter_batch(batch, 2, 5)
    for name in ("input_ids", "positions", "out_cache_loc", "token_type_ids", "mrope_positions"):
        mine, theirs = getattr(batch, name), getattr(child, name)
        assert mine.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()


# -- every declared field
# ----------------------------------------------------------------------------------------------


def values_of_every_field(rows: Rows) -> tuple[ForwardBatch, dict[str, Any]]:
    """A batch, and a value for each of its optional fields; the entries of each value differ."""
    _, batch = parent(rows)
    count = sum(length for _, length in rows)
    batch.features = torch.arange(3.0 * count).view(count, 3)
    batch.spec_info = Draft(torch.arange(1.0 * len(rows)), depth=2)
    optional = {
        spec.name: getattr(batch, spec.name)
        for spec in specs(ForwardBatch)
        if spec.when is When.IF_GIVEN or spec.when is When.WINDOWS
    }
    return batch, optional


def sizes_fit(child: ForwardBatch) -> bool:
    """Every field with an axis has an entry for each of the child's requests or tokens."""
    for record in (child, child.ngram_embedding_info, child.spec_info):
        for spec in () if record is None else specs(type(record)):
            value = getattr(record, spec.name)
            if value is None or spec.axis is Axis.NONE:
                continue
            wanted = child.num_tokens if spec.axis is Axis.TOKENS else child.batch_size
            if value.shape[spec.dim] != wanted:
                return False
    return True


@settings(deadline=None, max_examples=60)
@given(ROWS, st.data())
def test_children_have_every_declared_field_that_the_parent_has_and_no_other(rows: Rows, data: st.DataObject) -> None:
    batch, optional = values_of_every_field(rows)
    for name in optional:
        if name != "plan_record" and not data.draw(st.booleans(), label=name):
            setattr(batch, name, None)
    first = data.draw(st.integers(0, batch.num_tokens), label="first")
    last = data.draw(st.integers(first, batch.num_tokens), label="last")
    child = filter_batch(batch, first, last)
    left = {Split.DROP, Split.FRESH}
    for spec in specs(ForwardBatch):
        was, now = getattr(batch, spec.name), getattr(child, spec.name)
        if spec.split in left:
            assert now == spec_default(spec.name), spec.name
        else:
            assert (was is None) == (now is None), spec.name
    assert sizes_fit(child)


def spec_default(name: str) -> Any:
    return next(item.default for item in dataclasses.fields(ForwardBatch) if item.name == name)


def test_a_child_that_keeps_a_whole_field_is_caught() -> None:
    batch, _ = values_of_every_field([(0, 3), (2, 2)])
    child = filter_batch(batch, 0, 2)
    assert sizes_fit(child)
    for name in ("features", "req_pool_indices", "mrope_positions", "seq_lens_cpu", "window_positions"):
        assert not sizes_fit(dataclasses.replace(child, **{name: getattr(batch, name)})), name


def test_a_clipped_field_that_nobody_knows_to_clip_fails_when_it_is_declared() -> None:
    with pytest.raises(TypeError, match=r"clipped must declare moved=Moved\(\.\.\.\), or mirror="):
        batch_field(axis=Axis.REQUESTS, split=Split.CLIP, owner="test")


def test_a_clipped_mirror_of_a_field_that_does_not_move_fails_when_it_is_declared() -> None:
    with pytest.raises(TypeError, match=r"New\.ids_cpu is clipped and mirrors input_ids, which does not declare moved"):

        @batch_record(ScheduleBatch)
        class New(ForwardBatch):
            ids_cpu: Tensor | None = batch_field(axis=Axis.REQUESTS, split=Split.CLIP, mirror="input_ids")


def test_a_size_without_a_formula_is_refused() -> None:
    @batch_record(ScheduleBatch)
    class New(ForwardBatch):
        fresh_size: int | None = batch_field(axis=Axis.NONE, split=Split.SIZE, owner="test")

    batch: Any = New
    batch = batch(batch_size=2, num_tokens=2, seq_lens_cpu=np.ones(2, np.int32), fresh_size=2)
    with pytest.raises(TypeError, match="fresh_size is declared as Split.SIZE"):
        filter_batch(batch, 0, 1)


def test_rows_of_a_request_that_verifies_proposals_stay_together() -> None:
    rows = [(4, 1), (4, 1), (2, 1), (2, 1), (5, 1), (5, 1)]
    _, batch = parent(rows, decode=True)
    batch.width = 2
    child = filter_batch(batch, 2, 6)
    assert (child.width, child.batch_size, child.num_tokens) == (2, 4, 4)
    assert child.seq_lens.tolist() == batch.seq_lens.tolist()[2:6]
    for first, last in ((1, 4), (0, 3)):
        with pytest.raises(ValueError, match="split a request of 2 rows; wanted multiples of 2"):
            filter_batch(batch, first, last)


def test_lengths_that_only_the_device_knows_are_cut_there() -> None:
    """The host mirrors may be absent or upper bounds: a child takes the device's own numbers."""
    _, batch = parent([(4, 1), (2, 1), (5, 1)], decode=True)
    batch.seq_lens = batch.seq_lens - 1
    for mirror in (batch.seq_lens_cpu, None):
        batch.seq_lens_cpu = mirror
        child = filter_batch(batch, 1, 3)
        assert child.seq_lens.tolist() == [2, 5]
        assert child.num_token_non_padded.tolist() == [2]


def test_what_forbids_a_split_is_named() -> None:
    _, batch = parent([(0, 2), (1, 2)])
    assert refusal(batch) == ""
    batch.spec_info = Draft(torch.tensor([1.0, 2.0]), tree=torch.zeros(2))
    assert refusal(batch) == "tree"
