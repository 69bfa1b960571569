"""How an open prompt (prefill in layer slices) changes the plan of other requests: steps that wait
for its tokens, and pages of requests that left it."""

from __future__ import annotations

import numpy as np
import pytest

from sglcore.schedule.make_loop import make_scheduler
from sglcore.schedule.request import Request, State
from sglcore.schedule.step_loop import Loop
from sglcore.worker.model_worker import Limits, Ticket
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.schedule.fake_slices import FakeSlicedWorker
from tests.schedule.fake_worker import FakeMatcher, compose, make_limits, make_params


class Watched(FakeSlicedWorker):
    """Records for each slice its last layer and whether the scheduler must wait for its tokens
    before it plans a step."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.scheduler = make_scheduler(limits, prefix_cache=False, compose=compose)
        self.waits = list[tuple[int, bool]]()

    def submit(self, batch: ScheduleBatch) -> Ticket:
        if batch.layers is not None:
            self.waits.append((int(batch.layers[1]), self.scheduler.awaits_tokens))
        return super().submit(batch)


class Beside:
    """A decoding request, and a loop that prompts are added to."""

    def __init__(self, layers: int, **other: int) -> None:
        sizes = {"page_size": 1, "num_pages": 28, "max_model_len": 28, "max_batch_tokens": 28, **other}
        limits = make_limits(sliced_layers=layers, slice_budget=1, **sizes)
        self.worker = Watched(limits)
        self.scheduler = self.worker.scheduler
        self.loop = Loop(self.scheduler, self.worker)
        self.first = self.add("first", 2, 20 if limits.max_model_len == 28 else 180)
        while not self.first.output_ids:
            self.loop.step()

    def add(self, name: str, length: int, tokens: int, *, is_masked: bool = False) -> Request:
        """Queue a prompt."""
        made = Request(name, np.arange(length, dtype=np.int32) % 50, make_params(tokens))
        made.matcher = FakeMatcher(made) if is_masked else None
        self.scheduler.add(made)
        return made


@pytest.mark.parametrize("is_masked", [False, True])
def test_steps_behind_a_slice_wait_for_its_tokens_where_it_brings_some_under_a_grammar(is_masked: bool) -> None:
    found = Beside(4)
    prompt = found.add("prompt", 5, 1, is_masked=is_masked)
    while not prompt.output_ids:
        found.loop.step()
    assert found.worker.waits == [(1, False), (2, False), (3, False), (4, is_masked)]


def test_short_prompts_have_every_second_chunk_beside_a_long_one() -> None:
    """The long prompt gets the other chunks, so it is not overtaken for ever."""
    found = Beside(2, num_pages=400, max_model_len=200, max_batch_tokens=8)
    long = found.add("long", 100, 1)
    while not found.worker.waits:
        found.loop.step()
    short = found.add("short", 6, 1)
    for _ in range(12):
        found.loop.step()
    assert short.output_ids and not long.output_ids
    for number in range(200):
        if long.output_ids:
            break
        found.add(f"other{number}", 6, 1)
        found.loop.step()
    assert long.output_ids and number < 2 * 100 // 8 * 5


def test_pages_of_who_left_an_open_prompt_are_awaited_and_nobody_gives_way_for_them() -> None:
    found = Beside(12)
    gone, staying = found.add("gone", 15, 2), found.add("staying", 4, 2)
    while not found.worker.waits:
        found.loop.step()
    found.scheduler.abort(gone.rid)
    while found.loop.has_work:
        found.loop.step()
        found.scheduler.audit()
    assert len(found.first.output_ids) == 20 and len(staying.output_ids) == 2
    assert found.scheduler.stats().retractions == 0


@pytest.mark.parametrize(("length", "room"), [(10, 28), (14, 18)])
def test_who_gives_way_while_its_layers_run_has_computed_nothing_and_comes_back(length: int, room: int) -> None:
    """Once with a prompt that ends with its last slice, and once with one that has more chunks. The
    other request of the open prompt stays."""
    found = Beside(14, max_batch_tokens=room)
    staying, gone = found.add("staying", 8, 2), found.add("gone", length, 2)
    while not found.worker.waits:
        found.loop.step()
    sliced = found.scheduler.running.sliced
    assert sliced is not None and sliced.requests == [staying, gone]
    left = False
    for _ in range(400):
        if not found.loop.has_work:
            break
        found.loop.step()
        found.scheduler.audit()
        if (sliced := found.scheduler.running.sliced) is not None and gone in sliced.released:
            left = True
            assert [request for request, _ in sliced.staying] == [staying] and gone.state is State.WAITING
    assert left and found.scheduler.stats().retractions
    assert [len(each.output_ids) for each in (staying, gone)] == [2, 2] and not found.loop.has_work


def test_without_overlap_nothing_runs_beside_a_slice() -> None:
    found = Beside(4)
    found.loop.drain()
    found.loop, found.worker.most_in_flight = Loop(found.scheduler, found.worker, overlap=False), 0
    prompt = found.add("prompt", 5, 1)
    while not prompt.output_ids:
        found.loop.step()
    assert len(found.worker.slices) == 4 and found.worker.most_in_flight == 1


def test_a_prompt_says_how_many_rows_decode_beside_it() -> None:
    found = Beside(4)
    found.add("one", 5, 1)
    found.add("other", 4, 1)
    while not found.worker.waits:
        found.loop.step()
    opened = next(batch for batch in found.worker.seen if batch.layers is not None)
    assert (opened.batch_size, opened.decode_rows) == (2, 1)


def test_the_rest_of_a_long_prompt_is_promised_where_others_have_turns() -> None:
    found = Beside(2, num_pages=400, max_model_len=200, max_batch_tokens=8)
    long = found.add("long", 100, 1)
    while not found.worker.waits:
        found.loop.step()
    left = 100 - len(long.held.pages)
    assert left > 50 and found.scheduler.running._promised() >= left
