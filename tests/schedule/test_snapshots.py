"""Requests with recurrent states share prefixes by snapshots: when a snapshot is taken, which
requests restore it, and which snapshot is evicted.

The fake worker keeps a state for each slot and fails if a forward continues from another state than
its prefix's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglcore.schedule.cache.in_batch_prefix import Awaited
from sglcore.schedule.prompt_embeds import PromptEmbeds
from sglcore.schedule.request import Request
from tests.schedule.drive import Drive

SYSTEM = [(3 * index) % 5 for index in range(96)]


def make_drive(**given: Any) -> Drive:
    """A drive with pages of 4 tokens and room for all requests."""
    room = {"max_model_len": 256, "num_pages": 200, "max_batch_tokens": 400, "max_requests": 8}
    return Drive(**{**room, "keeps_state": True, "num_snapshots": 16, **given})


def run_one(drive: Drive, rid: str, prompt: list[int], max_tokens: int = 1, **given: Any) -> Request:
    """Run a request from its beginning to its end."""
    request = drive.add(rid, prompt, max_tokens, **given)
    drive.run()
    assert request.output_ids == drive.alone(request)
    return request


def conversation(drive: Drive, request: Request) -> list[int]:
    """The request's prompt and output."""
    return [*request.prompt_ids.tolist(), *request.output_ids]


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8), (41, 40)])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_that_comes_again_begins_at_its_last_page(length: int, cached: int, lookahead: int) -> None:
    drive = make_drive(lookahead=lookahead)
    for rid in ("a", "b"):
        request = run_one(drive, rid, SYSTEM[:length])
    assert request.cached_tokens == cached
    stats = drive.scheduler.stats()
    assert (stats.snapshot_hits, stats.hit_tokens) == (int(cached > 0), cached)


def test_a_shared_beginning_is_a_hit_from_the_third_prompt_on() -> None:
    """The second request finds the pages without a state, and leaves one."""
    drive = make_drive()
    prompts = [[*SYSTEM[:40], *[own] * 9] for own in range(4)]
    assert [run_one(drive, f"r{own}", prompt).cached_tokens for own, prompt in enumerate(prompts)] == [0, 0, 40, 40]
    assert run_one(drive, "again", prompts[1]).cached_tokens == 48


@pytest.mark.parametrize(("lookahead", "common"), [(0, 40), (1, 36), (2, 36)])
def test_a_shared_beginning_is_a_hit_while_all_before_still_run(lookahead: int, common: int) -> None:
    """The second request's snapshot belongs to the first one's pages."""
    drive = make_drive(lookahead=lookahead)
    requests = [drive.make(f"r{own}", [*SYSTEM[:40], *[own] * 9], 60) for own in range(4)]
    for request in requests:
        drive.scheduler.add(request)
        drive.step(5)
    assert [request.cached_tokens for request in requests] == [0, 0, common, common]
    drive.run()
    assert all(request.output_ids == drive.alone(request) for request in requests)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 9, 30])
def test_the_next_turn_of_a_conversation_begins_at_its_last_full_page(most: int) -> None:
    drive = make_drive()
    first = run_one(drive, "first", SYSTEM[:21], most)
    second = run_one(drive, "second", [*conversation(drive, first), 7, 7, 7, 7])
    assert second.cached_tokens == (21 + most - 1) // 4 * 4


def test_a_request_that_stops_while_a_step_is_in_flight_leaves_its_state() -> None:
    for count in range(1, 12):
        drive = make_drive()
        first = drive.stop_after(drive.make("first", 9, 40), count)
        drive.scheduler.add(first)
        drive.run()
        second = run_one(drive, "second", [*conversation(drive, first), 7, 7, 7, 7])
        assert second.cached_tokens == (9 + len(first.output_ids)) // 4 * 4 or not drive.loop.overlap


def test_samples_of_one_prompt_begin_where_its_last_page_begins() -> None:
    drive = make_drive()
    leader = drive.add("s0", SYSTEM[:41], 5, seed=0)
    others = [drive.add(f"s{seed}", SYSTEM[:41], 5, seed=seed, leader=leader) for seed in (1, 2, 3)]
    drive.run()
    assert [request.cached_tokens for request in (leader, *others)] == [0, 40, 40, 40]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("budget", [30, 100, 400])
def test_a_common_prefix_of_prompts_that_come_at_once_is_computed_once(overlap: bool, budget: int) -> None:
    drive = make_drive(overlap=overlap, max_batch_tokens=budget)
    requests = [drive.add(f"r{index}", [*SYSTEM, index, *[index] * 8], 3) for index in range(5)]
    drive.run()
    assert [request.cached_tokens for request in requests] == [0, 96, 96, 96, 96]
    assert drive.scheduler.stats().computed_prompt_tokens == 105 + 4 * 9


def test_who_comes_while_a_long_prompt_is_computed_has_its_state_at_the_common_end() -> None:
    drive = make_drive(max_batch_tokens=30)
    first = drive.add("first", [*SYSTEM, *[1] * 90], 2)
    drive.step(2)
    late = drive.add("late", [*SYSTEM, 2, 2], 2)
    drive.step()
    assert drive.awaited(late) == Awaited(first, 24)
    drive.run()
    assert late.cached_tokens == 96


def test_who_comes_when_the_state_at_the_common_end_is_planned_waits_and_asks_no_more() -> None:
    drive = make_drive(max_batch_tokens=32)
    first = drive.add("first", [*SYSTEM, *[1] * 90], 2)
    late = drive.add("late", [*SYSTEM, 2, 2], 2)
    while first.held.num_cells < 96:
        drive.step()
    last = drive.add("last", [*SYSTEM, 3, 3], 2)
    drive.step()
    assert drive.awaited(last) == Awaited(first, 24)
    drive.run()
    assert (late.cached_tokens, last.cached_tokens) == (96, 96)


@pytest.mark.parametrize(("budget", "steps"), [(90, 2), (80, 1)])
def test_who_comes_after_the_common_end_was_passed_takes_the_deepest_state_or_none(budget: int, steps: int) -> None:
    """The late request's chunk leaves a state at the common end, which only this request uses."""
    drive = make_drive(max_batch_tokens=budget)
    drive.add("first", [*SYSTEM[:80], *[1] * 150], 2)
    drive.step(steps)
    late = drive.add("late", [*SYSTEM[:80], 2, 2], 2)
    drive.step(1)
    assert drive.awaited(late) is None
    drive.run()
    assert late.cached_tokens == 0


def test_steps_in_which_no_state_moves_say_nothing_of_states() -> None:
    drive = make_drive()
    run_one(drive, "a", SYSTEM[:6], 20)
    moves = [batch.state_to is not None for batch in drive.worker.seen]
    assert [length for length, moved in zip([4, *range(6, 26)], moves, strict=True) if moved] == [4, *range(8, 25, 4)]


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_retracted_request_goes_on_from_its_last_full_page(lookahead: int) -> None:
    drive = make_drive(max_model_len=40, num_pages=14, max_batch_tokens=64, num_snapshots=8, lookahead=lookahead)
    requests = [drive.add(rid, [first] * 9, 24) for first, rid in enumerate("ab")]
    drive.run()
    assert drive.scheduler.stats().retractions > 0 and drive.scheduler.stats().snapshot_hits > 0
    assert all(request.output_ids == drive.alone(request) for request in requests)


@pytest.mark.parametrize("given", [{"num_snapshots": 0}, {"prefix_cache": False}])
def test_where_no_snapshot_is_kept_no_chunk_is_cut_and_nothing_cached(given: dict[str, Any]) -> None:
    drive = make_drive(**given)
    assert [run_one(drive, rid, SYSTEM[:21], 3).cached_tokens for rid in "ab"] == [0, 0]
    stats = drive.scheduler.stats()
    assert (stats.steps, stats.cached_pages, stats.num_snapshots) == (6, 0, 0)


def test_where_all_places_are_held_by_requests_others_go_on_without() -> None:
    drive = make_drive(num_snapshots=1)
    drive.add("first", SYSTEM[:6], 60)
    drive.step(4)
    assert drive.scheduler.stats().free_snapshots == 0
    second = drive.add("second", [1] * 21, 3)
    drive.step(2)
    assert drive.worker.rids[-1] == ["first", "second"] and second.held.num_cells >= 21
    drive.run()


def test_spares_leave_half_of_the_places_to_the_cache() -> None:
    drive = make_drive(num_snapshots=6)
    for index in range(6):
        drive.add(f"r{index}", [index, 1], 40)
    drive.step(30)
    stats = drive.scheduler.stats()
    assert (stats.free_snapshots, stats.cached_snapshots) == (3, 0)
    drive.run()
    assert drive.scheduler.stats().cached_snapshots == 3


def test_a_request_has_one_spare_however_long_it_runs() -> None:
    drive = make_drive()
    drive.add("long", [1, 2], 200)
    for _ in range(12):
        drive.step(12)
        assert drive.scheduler.stats().free_snapshots == 15
    drive.run()


@pytest.mark.parametrize(("length", "most", "cached"), [(43, 1, 40), (43, 9, 48), (44, 1, 44), (44, 9, 52)])
def test_what_no_node_can_have_yet_is_the_requests_own_until_it_ends(length: int, most: int, cached: int) -> None:
    """The first request's pages are in use, so the second one's are published only at its end, with
    its longest state."""
    drive = make_drive()
    drive.add("first", [*SYSTEM[:20], *[9] * 9], 150)
    drive.step(8)
    second = drive.add("second", SYSTEM[:length], most)
    drive.step(3)
    stats = drive.scheduler.stats()
    held = stats.num_snapshots - stats.free_snapshots - stats.cached_snapshots
    assert held == 2 or most == 1, "a spare of each"
    drive.step(12)
    assert second.finish_reason == "length"
    third = drive.add("third", [*conversation(drive, second), 7, 7, 7, 7], 1)
    drive.step(6)
    assert third.cached_tokens == cached
    drive.run()


def test_the_snapshot_used_least_recently_gives_way() -> None:
    drive = make_drive(num_snapshots=2)
    for first in (1, 2, 1, 3):
        run_one(drive, f"{drive.scheduler.stats().steps}", [first] * 9)
    assert drive.scheduler.stats().evicted_snapshots == 1
    assert run_one(drive, "kept", [1] * 9).cached_tokens == 8
    assert run_one(drive, "gone", [2] * 9).cached_tokens == 0


def test_a_page_that_is_evicted_gives_its_snapshot_back() -> None:
    drive = Drive(max_model_len=40, num_pages=10, max_batch_tokens=64, keeps_state=True, num_snapshots=8)
    for first in range(6):
        run_one(drive, f"r{first}", [first] * 17)
    stats = drive.scheduler.stats()
    assert stats.evicted_pages > 0 and stats.evicted_snapshots == 0
    assert stats.cached_snapshots + stats.free_snapshots == 8


def test_a_prompt_whose_scores_are_wanted_begins_with_zeros_and_leaves_its_state() -> None:
    drive = make_drive()
    scored = [run_one(drive, rid, SYSTEM[:21], 2, prompt_logprobs=0) for rid in "ab"]
    assert [request.cached_tokens for request in scored] == [0, 0]
    assert run_one(drive, "plain", SYSTEM[:21]).cached_tokens == 20


def test_an_embedding_moves_no_state() -> None:
    drive = make_drive()
    request = drive.add("e", 9, task="embed")
    drive.run()
    assert request.embedding is not None and drive.worker.seen[0].state_from is None


@pytest.mark.parametrize("keeps_state", [True, False])
def test_embeddings_leave_nothing_and_nobody_waits_for_them(keeps_state: bool) -> None:
    drive = make_drive(keeps_state=keeps_state, max_batch_tokens=100, embed_size=2)
    embeds = PromptEmbeds(np.zeros((96, 2)), SYSTEM)
    first, text = drive.add("first", SYSTEM, 20, embeds=embeds), drive.add("text", SYSTEM, 3)
    for _ in range(20):
        assert drive.awaited(text) is None
        drive.step()
        stats = drive.scheduler.stats()
        held = stats.num_snapshots - stats.free_snapshots - stats.cached_snapshots
        assert held <= len(text.held.states.places), "the text's alone"
    drive.run()
    assert (first.cached_tokens, text.cached_tokens) == (0, 0)
    assert run_one(drive, "again", SYSTEM).cached_tokens == 92


def test_a_worker_without_states_is_told_of_none() -> None:
    drive = make_drive(keeps_state=False)
    assert [run_one(drive, rid, SYSTEM[:41], 9).cached_tokens for rid in "ab"] == [0, 40]
    assert all(batch.state_from is None and batch.state_to is None for batch in drive.worker.seen)
    assert drive.scheduler.stats().num_snapshots == 0
