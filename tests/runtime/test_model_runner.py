"""The runner's eager path: staged batches run in place, others are copied or aliased; results equal
the oracle's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.step.batch_field import specs
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from tests.runtime.tiny import (
    HIDDEN,
    SHARED,
    STAGED,
    Desk,
    Site,
    TinyModel,
    assert_close,
    ints,
    make_site,
    offsets,
    random_tokens,
)

FIRST, SECOND = random_tokens(1, 5), random_tokens(2, 4)
facts_of_both = pytest.mark.parametrize("facts", [SHARED, STAGED], ids=["shared", "staged"])


def on_the_device(batch: ForwardBatch) -> ForwardBatch:
    """The same batch in tensors of its own, as from a draft or another engine."""
    values: dict[str, Any] = {spec.name: getattr(batch, spec.name) for spec in specs(ForwardBatch)}
    for name, value in values.items():
        if isinstance(value, Tensor):
            values[name] = value.clone()
    return ForwardBatch(**values)


def start(site: Site) -> tuple[Desk, ForwardBatch]:
    """Two staged prompts and their host."""
    desk = Desk()
    return desk, site.runner.init_batch(desk.extend({1: FIRST, 3: SECOND}))


@facts_of_both
@pytest.mark.parametrize("poison", [False, True])
def test_chunks_decodes_and_mixed_steps_give_what_each_request_gives_alone(facts: Any, poison: bool) -> None:
    site, desk = make_site(facts=facts, poison=poison), Desk(5)
    run, extra = site.runner, random_tokens(3, 6)
    first = run.run_eager(run.init_batch(desk.extend({1: FIRST, 3: SECOND[:2]})))
    site.tokens.last[1] = extra[0]
    mixed = run.run_eager(run.init_batch(desk.batch({1: [-1], 3: SECOND[2:], 2: extra[1:3]}, ForwardMode.MIXED)))
    site.tokens.last[torch.tensor([1, 2, 3])] = torch.tensor(extra[3:], dtype=torch.int32)
    decode = run.run_eager(run.init_batch(desk.decode(3, 1, 2)))
    one = site.model.dense([*FIRST, extra[0], extra[3]])
    two = site.model.dense([*extra[1:3], extra[4]])
    three = site.model.dense([*SECOND, extra[5]])
    assert_close(first, torch.cat([one[:5], three[:2]]))
    assert_close(mixed, torch.cat([one[5:6], three[2:4], two[:2]]))
    assert_close(decode, torch.stack([three[4], one[6], two[2]]))


def test_a_staged_batch_runs_where_it_lies() -> None:
    site = make_site()
    _, staged = start(site)
    site.runner.run_eager(staged)
    assert site.model.seen[-1] is staged
    assert site.runner.registry_for(staged).owns(staged)


def test_a_batch_that_is_on_the_device_already_is_copied_into_the_slots() -> None:
    site = make_site()
    desk, staged = start(site)
    wanted = site.runner.run_eager(staged)
    mine = on_the_device(staged)
    mine.plan_record = None
    site.runner.init_batch(desk.extend({4: SECOND}))
    assert_close(site.runner.run_eager(mine), wanted)
    seen = site.model.seen[-1]
    assert seen is not mine
    assert site.runner.prefill_registry.owns(seen)
    assert seen.seq_lens.data_ptr() != mine.seq_lens.data_ptr()
    assert mine.plan_record is None


def test_with_eager_input_no_copy_the_same_tensors_run_in_a_new_batch() -> None:
    site = make_site(eager_input_no_copy=True)
    desk, staged = start(site)
    wanted = site.runner.run_eager(staged)
    mine = on_the_device(staged)
    mine.plan_record = None
    later = site.runner.init_batch(desk.extend({4: SECOND}))
    assert later.input_ids is not None
    before = later.input_ids.clone()
    assert_close(site.runner.run_eager(mine), wanted)
    seen = site.model.seen[-1]
    assert seen is not mine
    for spec in specs(ForwardBatch):
        if spec.name != "plan_record":
            assert getattr(seen, spec.name) is getattr(mine, spec.name)
    assert mine.plan_record is None
    assert torch.equal(later.input_ids, before)


def test_a_batch_from_elsewhere_larger_than_the_registry_makes_it_grow() -> None:
    site = make_site()
    _, staged = start(site)
    mine = on_the_device(staged)
    small = make_site(site.model)
    assert small.runner.prefill_registry.max_num_tokens < mine.num_tokens
    small.table.page_table.copy_(site.table.page_table)
    assert_close(small.runner.run_eager(mine), site.runner.run_eager(staged))
    assert small.runner.prefill_registry.max_num_tokens == 16


def test_growth_leaves_the_batch_in_flight_as_it_was() -> None:
    site = make_site()
    desk = Desk()
    staged = site.runner.init_batch(desk.extend({1: FIRST[:4]}))
    site.runner.init_batch(desk.extend({2: SECOND, 3: FIRST, 4: FIRST}))
    assert_close(site.runner.run_eager(staged), site.model.dense(FIRST[:4]))


def test_an_input_of_embeddings_is_carried_to_the_model() -> None:
    site = make_site()
    _, staged = start(site)
    mine = on_the_device(staged)
    mine.input_embeds = torch.ones(mine.num_tokens, HIDDEN)
    site.runner.run_eager(mine)
    assert site.model.seen[-1].input_embeds is mine.input_embeds


@pytest.mark.parametrize("mode", [ForwardMode.IDLE, ForwardMode.EXTEND, ForwardMode.DECODE])
def test_a_step_without_rows_runs_and_gives_no_hidden_states(mode: ForwardMode) -> None:
    site = make_site(buckets=(1, 2))
    none, no_offsets = ints([]), offsets([])
    batch = ScheduleBatch(
        1, mode, none, none, none, no_offsets, none, none, no_offsets, none, torch.zeros(0, dtype=torch.bool).numpy()
    )
    hidden, path = site.runner.forward(site.runner.init_batch(batch))
    assert hidden.shape == (0, HIDDEN)
    assert path == "eager"


def test_logits_are_those_of_the_rows_asked_for() -> None:
    site = make_site()
    _, staged = start(site)
    hidden = site.runner.run_eager(staged)
    rows = torch.tensor([4, 8])
    assert_close(site.runner.logits(hidden, rows), site.runner.logits(hidden, None)[rows])


def test_a_new_request_in_a_used_slot_and_used_pages_reads_nothing_of_the_old_one() -> None:
    site, desk = make_site(TinyModel(4)), Desk()
    site.runner.run_eager(site.runner.init_batch(desk.extend({1: random_tokens(8, 11)})))
    for keys, values in (site.cells.kv(0), site.cells.kv(1)):
        keys[4:], values[4:] = torch.nan, torch.nan
    desk.leave(1)
    assert_close(site.runner.run_eager(site.runner.init_batch(desk.extend({1: SECOND}))), site.model.dense(SECOND))


def test_replacing_a_batch_makes_an_object_of_its_own() -> None:
    site = make_site()
    _, staged = start(site)
    copied = replace(staged)
    copied.capture_hidden_mode = copied.capture_hidden_mode.FULL
    assert copied.input_ids is staged.input_ids
    assert staged.capture_hidden_mode is staged.capture_hidden_mode.NONE


@pytest.mark.parametrize("poison", [False, True])
def test_what_no_step_wrote_is_no_number_where_that_is_asked(poison: bool) -> None:
    site = make_site(poison=poison)
    registry = site.runner.prefill_registry
    site.runner.init_batch(Desk().extend({1: FIRST}))
    behind = registry.input_buffer("positions").tensor
    behind.zero_()
    site.runner.init_batch(Desk().extend({1: FIRST[:2]}))
    assert bool(behind[2:].any()) is poison
