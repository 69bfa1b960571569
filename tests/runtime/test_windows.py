"""Sliding-window layers with a pool of their own: chunks, batches, graphs and micro-batches do not
change the tokens, and no key or value outside the window is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend, Bucket
from sglcore.runtime.attention.gathered import GatheredAttention
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.attention.windowed import WindowedAttention, WindowedPlan
from sglcore.runtime.forward_batch import ForwardBatch, StalePlanError
from sglcore.runtime.graphs.shadow_mode import Shadow, leaving_cells
from sglcore.runtime.memory.geometry import geometry
from sglcore.runtime.memory.pools import MHATokenToKVPool, WindowTable, cell_bytes
from sglcore.step.batch_field import spec_of
from sglcore.step.sizing import Geometry
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from tests.runtime.tiny import PAGE, SHARED, STAGED, Site, make_site, random_tokens, tokens_of
from tests.runtime.windows import WindowDesk, make_windowed

KINDS = [((None, 3), 3), ((6, None, 3), 6), ((5, 5), 5)]
"""The sliding window of each layer, and the longest one."""


def run(site: Any, batch: ScheduleBatch) -> list[list[int]]:
    """The tokens of each request."""
    result = site.worker.collect(site.worker.submit(batch))
    return [tokens_of(result, row) for row in range(batch.batch_size)]


def script(site: Any, window: int, desk: type[WindowDesk] = WindowDesk) -> WindowDesk:
    """Chunked prefill, mixed steps, decode, and reuse of a slot; compare every token with the
    oracle."""
    host, first, second = desk(site, window, seed=3), random_tokens(5, 15), random_tokens(6, 7)
    run(site, host.extend({2: first[:6]}, emits=[False]))
    run(site, host.extend({2: first[6:10], 5: second[:4]}, emits=[False, False]))
    texts = {2: [*first], 5: [*second]}
    for slot, (token,) in zip((2, 5), run(site, host.extend({2: first[10:], 5: second[4:]})), strict=True):
        texts[slot].append(token)
    for _ in range(9):
        for slot, (token,) in zip((2, 5), run(site, host.decode(2, 5)), strict=True):
            texts[slot].append(token)
    host.leave(5)
    third = random_tokens(7, 8)
    mixed = host.batch({2: [-2], 5: third}, ForwardMode.MIXED)
    for slot, found in zip((2, 5), run(site, mixed), strict=True):
        texts[slot] = [*(texts[2] if slot == 2 else third), *found]
    for _ in range(4):
        for slot, (token,) in zip((5, 2), run(site, host.decode(5, 2)), strict=True):
            texts[slot].append(token)
    assert texts[2][15:] == site.model.continuation(first, 15)
    assert texts[5][8:] == site.model.continuation(third, 5)
    assert host.drops > 5
    return host


@pytest.mark.parametrize("buckets", [(), (1, 4)])
@pytest.mark.parametrize("facts", [SHARED, STAGED])
@pytest.mark.parametrize(("windows", "longest"), KINDS)
def test_every_token_is_what_the_whole_text_gives(windows: Any, longest: int, facts: Any, buckets: Any) -> None:
    site = make_windowed(windows, facts=facts, buckets=buckets, poison=True)
    script(site, longest)
    assert site.attention.token_to_kv_pool.num_layers == len(windows)


@pytest.mark.parametrize("window", [ReferenceAttention, GatheredAttention])
@pytest.mark.parametrize("full", [ReferenceAttention, GatheredAttention])
def test_each_kind_of_layers_has_a_backend_of_its_own(full: Any, window: Any) -> None:
    site = make_windowed(full=full, window=window, buckets=(2,))
    script(site, 3)


def test_compared_replays_leave_the_cells_of_both_pools() -> None:
    site = make_windowed(buckets=(2,), window=GatheredAttention)
    assert site.runner.graphs is not None
    site.runner.graphs.shadow = Shadow(2)
    script(site, 3)
    assert site.runner.graphs.shadow.compared >= 4


def test_layers_with_windows_see_a_batch_of_shorter_requests() -> None:
    """Checks every length and location that a backend may read, on the device and on the host."""
    seen: list[ForwardBatch] = []

    class Watched(ReferenceAttention):
        def plan(self, batch: ForwardBatch) -> Any:
            seen.append(batch)
            return super().plan(batch)

    site = make_windowed(full=Watched, window=Watched)
    host = WindowDesk(site, 3)
    run(site, host.extend({2: random_tokens(5, 9)}))
    run(site, host.extend({5: random_tokens(6, 7)}))
    given = host.batch({2: [-2], 5: random_tokens(7, 4)}, ForwardMode.MIXED)
    run(site, given)
    batch, view = seen[-2:]
    assert given.window_starts is not None and given.window_starts.tolist() == [4, 4]
    lengths = {"seq_lens": [6, 7], "extend_prefix_lens": [5, 3], "extend_seq_lens": [1, 4]}
    for name, wanted in lengths.items():
        assert getattr(view, name).tolist() == getattr(view, f"{name}_cpu").tolist() == wanted
    assert view.positions.tolist() == [5, 3, 4, 5, 6]
    assert view.out_cache_loc is batch.window_cache_loc
    assert batch.num_token_non_padded is not None
    names = ("forward_mode", "batch_size", "num_tokens", "req_pool_indices", "extend_start_loc", "num_token_non_padded")
    assert all(getattr(view, name) is getattr(batch, name) for name in names)


def test_a_list_that_comes_without_anything_else_is_written() -> None:
    site = make_windowed()
    host = WindowDesk(site, 3)
    run(site, host.extend({2: random_tokens(5, 6)}))
    batch = host.decode(2)
    assert batch.window_pages is not None and not len(batch.new_pages)
    site.runner.init_batch(batch)
    assert site.runner.extensions.window_table is not None
    assert (
        site.runner.extensions.window_table.page_table[2, : len(batch.window_pages)].tolist()
        == batch.window_pages.tolist()
    )


def test_the_longest_window_that_frees_something_in_time_is_what_such_layers_keep() -> None:
    windows = (None, 6, 3, 20, 19)
    layers = [Attention(index, 4, 2, 8, sliding_window=window) for index, window in enumerate(windows)]
    unkept = Attention(5, 4, 2, 8, sliding_window=3, cached=False)
    each = 2 * 2 * 8 * 4
    found = [geometry([*layers, unkept], [], most, 1, torch.float32, cell_bytes) for most in (21, 20, 19, 3)]
    assert found == [
        Geometry(each, 4 * each, 20),
        Geometry(2 * each, 3 * each, 19),
        Geometry(3 * each, 2 * each, 6),
        Geometry(5 * each),
    ]


def pools_of(site: Site) -> list[MHATokenToKVPool]:
    """The pool of the full-attention layers and the pool of the sliding-window layers."""
    return [part.token_to_kv_pool for part in site.attention.parts]  # pyright: ignore[reportReturnType]


def test_what_runs_beside_a_step_leaves_no_cell_of_either_pool() -> None:
    site = make_windowed()
    batch = site.runner.init_batch(WindowDesk(site, 3).extend({1: random_tokens(1, 6)}))
    site.runner.run_eager(batch)
    parts = [part for layer, pool in enumerate(pools_of(site)) for part in pool.kv(layer)]
    before = [part.clone() for part in parts]

    def overwrite() -> Tensor:
        for layer in site.model.attention_layers:
            pool, cells = site.attention.cells_of(layer, batch)
            assert cells is not None
            for part in pool.kv(layer.layer_id):
                part[cells] = 7.0
        return torch.zeros(0)

    leaving_cells(site.runner.context(batch), batch, overwrite)
    for part, kept in zip(parts, before, strict=True):
        torch.testing.assert_close(part, kept, rtol=0, atol=0, equal_nan=True)


@torch.inference_mode()
@pytest.mark.parametrize("place", [0, 1])
def test_a_graph_or_a_plan_of_before_either_pool_moved_is_refused(place: int) -> None:
    site = make_windowed(buckets=(2,))
    desk = WindowDesk(site, 3)
    run(site, desk.extend({1: random_tokens(1, 6)}))
    planned = site.runner.init_batch(desk.extend({2: random_tokens(1, 2)}))
    pools_of(site)[1 - place].replace_storage()
    planned.mark_forward_metadata_ready(site.attention.plan(planned))
    pools_of(site)[place].replace_storage()
    with pytest.raises(StalePlanError, match="generation"):
        site.runner.forward(planned)
    with pytest.raises(StalePlanError, match="generation"):
        site.worker.submit(desk.decode(1))


def test_every_member_of_a_backend_is_forwarded() -> None:
    members = {name for name in vars(AttentionBackend) if not name.startswith("_")}
    # Excluded: final members, members that only the selection reads from the parts, and `encode`,
    # which uses no KV cells.
    members -= {"forward", "planned", "unavailable", "encode", "calls", "remark"}
    assert members <= set(vars(WindowedAttention))
    attributes = vars(make_windowed().attention)
    assert set(vars(make_site().attention)) | {"facts"} <= set(attributes)


@pytest.mark.parametrize("part", ["full", "window"])
def test_what_one_part_can_not_do_both_can_not(part: str) -> None:
    class Plain(ReferenceAttention):
        facts = replace(ReferenceAttention.facts, takes_stored=False, features=frozenset({"mixed"}))

    assert make_windowed().attention.takes_stored
    given: Any = {part: Plain}
    attention = make_windowed(**given).attention
    assert not attention.takes_stored and not attention.facts.takes_stored
    assert attention.facts.features == {"mixed"}


@pytest.mark.parametrize("part", ["full", "window"])
def test_one_part_that_needs_exact_lengths_is_enough(part: str) -> None:
    class Exact(ReferenceAttention):
        facts = replace(ReferenceAttention.facts, needs_host_lengths=True)

    class Masks(ReferenceAttention):
        facts = replace(Exact.facts, masks_bounds=True)

    both: Any = {"full": Masks, "window": Masks}
    facts = make_windowed(**both).attention.facts
    assert facts.needs_host_lengths and not facts.needs_exact_lengths
    assert make_windowed(**(both | {part: Exact})).attention.facts.needs_exact_lengths
    one: Any = {part: Masks}
    assert not make_windowed(**one).attention.facts.needs_exact_lengths, "the other part reads none on the host"


@pytest.mark.parametrize(
    ("name", "counterpart"),
    [("window_seq_lens", "seq_lens"), ("window_positions", "positions"), ("window_cache_loc", "out_cache_loc")],
)
def test_padding_is_to_windows_what_it_is_to_the_other_layers(name: str, counterpart: str) -> None:
    found, wanted = spec_of(ForwardBatch, name), spec_of(ForwardBatch, counterpart)
    assert (found.axis, found.split, found.dtype) == (wanted.axis, wanted.split, wanted.dtype)
    assert found.padding == wanted.padding


def test_a_graph_takes_one_update() -> None:
    class Tells(ReferenceAttention):
        def refresh(self, plan: Any, batch: Any) -> Any:
            super().refresh(plan, batch)
            return "lengths"

    parts: Any = ({"full": Tells}, {"window": Tells})
    for given in parts:
        site = make_windowed(**given)
        plan, batch = (
            site.attention.capture_plan(Bucket(1, 1)),
            site.runner.init_batch(WindowDesk(site, 3).extend({1: [4]})),
        )
        assert site.attention.refresh(plan, batch) == "lengths"
    with pytest.raises(TypeError, match="both update"):
        make_windowed(full=Tells, window=Tells, buckets=(1,))


# -- planted defects: the script shows each
# -------------------------------------------------------------------------


class FreedEarly(WindowDesk):
    """Frees the last page that the window still sees."""

    def dead(self, length: int) -> int:
        return super().dead(length + 1)


class OffByAPage(WindowDesk):
    """Reports that each window page list begins one page later."""

    def batch(self, *given: Any, **values: Any) -> ScheduleBatch:
        made = super().batch(*given, **values)
        assert made.window_starts is not None
        made.window_starts = np.minimum(made.window_starts + PAGE, made.prefix_lens // PAGE * PAGE)
        return made


class ListNotSent(WindowDesk):
    """The device does not receive a list that lost its first page and did not grow."""

    def _advance(self, slot: int, before: int) -> list[int]:
        held = len(self.windows.get(slot, []))
        found = super()._advance(slot, before)
        return found if len(found) > held or not before else []


class Clipped(WindowedAttention):
    """Sliding-window layers get the host lengths of the full-attention layers."""

    def plan(self, batch: ForwardBatch) -> WindowedPlan:
        return super().plan(replace(batch, window_seq_lens_cpu=batch.seq_lens_cpu))


class FirstViewKept(WindowedAttention):
    """A captured plan keeps the lengths of its capture."""

    def refresh(self, plan: WindowedPlan, batch: ForwardBatch) -> Any:
        view = plan.view
        super().refresh(plan, batch)
        if view is not None:
            self.window.refresh(plan.window, view)


class OtherCells(WindowedAttention):
    """Sliding-window layers write keys and values to the KV cells of the full-attention layers."""

    def cells_of(self, layer: Attention, batch: ForwardBatch) -> Any:
        pool, cells = super().cells_of(layer, batch)
        assert batch.out_cache_loc is not None
        return pool, cells if pool is self.token_to_kv_pool else batch.out_cache_loc % pool.num_cells


class WholeView(WindowedAttention):
    """Sliding-window layers see their requests from the first token on."""

    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: WindowedPlan) -> Tensor:
        if layer.sliding_window is None:
            return super().attend(q, layer, batch, plan)
        return self.window.attend(q, layer, batch, self.window.plan(batch))


class StaleTable(WindowTable):
    """The second and later pages of a slot are never overwritten."""

    def write(self, entries: Tensor, pages: Tensor) -> None:
        old = self.page_table.view(-1)[entries]
        super().write(entries, torch.where((entries % self.max_pages > 0) & (old > 0), old, pages))


@pytest.mark.parametrize("desk", [FreedEarly, OffByAPage, ListNotSent])
def test_a_host_that_gives_windows_away_is_caught(desk: type[WindowDesk]) -> None:
    with pytest.raises((AssertionError, IndexError, ValueError)):
        script(make_windowed(), 3, desk)


@pytest.mark.parametrize("defect", [Clipped, FirstViewKept, OtherCells, WholeView])
def test_a_backend_that_mixes_the_kinds_up_is_caught(defect: type[WindowedAttention]) -> None:
    site = make_windowed(buckets=(2,))
    site.attention.__class__ = defect
    with pytest.raises((AssertionError, IndexError)):
        script(site, 3)


def test_a_table_that_keeps_old_pages_is_caught() -> None:
    site = make_windowed()
    assert site.runner.extensions.window_table is not None
    site.runner.extensions.window_table.__class__ = StaleTable
    with pytest.raises(AssertionError):
        script(site, 3)


def test_a_list_longer_than_a_slot_holds_is_refused() -> None:
    site = make_windowed()
    batch = WindowDesk(site, 3).extend({1: random_tokens(1, 40)})
    with pytest.raises(ValueError, match="has 10 pages, its slot holds 5"):
        site.worker.submit(batch)
