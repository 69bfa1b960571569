"""Window pages: how many a request holds, when they are returned, and which prefixes are shared
given the window pages in the cache.

The fake worker keeps their KV cells and fails where a list does not hold exactly the prefix tokens
that the window sees.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglcore.core.errors import ConfigError
from sglcore.schedule.cache.in_batch_prefix import Awaited
from sglcore.schedule.cache.prefix_cache import Node
from sglcore.schedule.cache.shared_pages import least_window_pages
from sglcore.schedule.prompt_embeds import PromptEmbeds
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.schedule.drive import Drive
from tests.schedule.fake_worker import compose, make_limits

SYSTEM = [(3 * index) % 5 for index in range(96)]


def make_drive(**given: Any) -> Drive:
    """A drive with pages of 4 tokens, a window of 9, and room for all requests."""
    room = {"max_model_len": 256, "num_pages": 200, "max_batch_tokens": 400, "max_requests": 8}
    return Drive(**{**room, "window": 9, "num_window_pages": 160, **given})


def run_one(drive: Drive, rid: str, prompt: list[int], max_tokens: int = 1, **given: Any) -> Request:
    """Run a request from its beginning to its end."""
    request = drive.add(rid, prompt, max_tokens, **given)
    drive.run()
    assert request.output_ids == drive.alone(request)
    return request


def conversation(drive: Drive, request: Request) -> list[int]:
    """The request's prompt and output."""
    return [*request.prompt_ids.tolist(), *request.output_ids]


def in_use(drive: Drive) -> int:
    """Number of window pages held by requests."""
    stats = drive.scheduler.stats()
    return stats.num_window_pages - stats.free_window_pages - stats.cached_window_pages


def starts(batch: ScheduleBatch) -> list[int]:
    """For each row, the number of tokens before its first window page."""
    assert batch.window_starts is not None
    return batch.window_starts.tolist()


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5])
@pytest.mark.parametrize(("window", "most"), [(1, 1), (2, 2), (5, 2), (6, 3), (9, 3), (10, 4)])
def test_a_request_that_decodes_holds_the_window_and_the_page_that_it_writes(
    window: int, most: int, lookahead: int
) -> None:
    """Plus the pages that another request could continue from, if they lie before the window."""
    drive = make_drive(window=window, prefix_cache=False, lookahead=lookahead)
    most += -(-lookahead // 4)
    assert drive.scheduler.running.memory.windows.span == most
    drive.add("long", [1, 2], 200)
    held = []
    for _ in range(150):
        drive.step()
        held.append(in_use(drive))
    assert max(held) == most and len(set(held[40:])) == 1
    drive.run()
    assert in_use(drive) == 0


def test_a_list_is_sent_when_a_page_is_begun_and_at_no_other_time() -> None:
    drive = make_drive(prefix_cache=False)
    drive.add("a", [1, 2, 3, 4, 5], 40)
    drive.run()
    batches = drive.worker.seen
    assert [int(batch.seq_lens[0]) for batch in batches if batch.window_pages is not None] == [5, *range(9, 45, 4)]
    assert [starts(batch) for batch in batches[-6:]] == [[28], [28], [32], [32], [32], [32]]


def test_a_long_prompt_s_pages_go_back_before_the_next_step_takes_any() -> None:
    """Two prompts in chunks of 16 tokens; the pool has the window pages of one window for each and
    of one step's tokens."""
    drive = make_drive(window=5, max_batch_tokens=16, num_window_pages=9, prefix_cache=False)
    requests = [drive.add(rid, 150, 3) for rid in "ab"]
    drive.run()
    assert drive.scheduler.stats().retractions == 0
    assert len(drive.worker.seen) <= 2 * 10 + 4
    assert all(request.output_ids == drive.alone(request) for request in requests)


def test_a_prompt_that_decodes_next_gives_its_pages_back_with_its_first_token() -> None:
    drive = make_drive(prefix_cache=False)
    drive.add("a", 151, 40)
    drive.step()
    assert in_use(drive) == 38
    drive.step()
    assert in_use(drive) == 3
    assert starts(drive.worker.seen[1]) == [140]
    drive.run()


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8), (41, 40), (44, 40)])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_that_comes_again_begins_at_its_last_page(length: int, cached: int, lookahead: int) -> None:
    drive = make_drive(lookahead=lookahead)
    for rid in ("a", "b"):
        request = run_one(drive, rid, SYSTEM[:length], 30)
    assert request.cached_tokens == cached
    assert drive.scheduler.stats().hit_tokens == cached


@pytest.mark.parametrize("suffix", [2, 9, 60])
def test_a_shared_beginning_is_a_hit_from_the_third_prompt_on(suffix: int) -> None:
    """If the first suffix is longer than the window, the second request finds KV pages without
    window pages, and leaves window pages for later ones."""
    drive = make_drive()
    prompts = [[*SYSTEM[:40], *[own] * suffix] for own in range(4)]
    cached = [run_one(drive, f"r{own}", prompt, 3).cached_tokens for own, prompt in enumerate(prompts)]
    assert cached == [0, 40 if suffix == 2 else 0, 40, 40]


@pytest.mark.parametrize(("lookahead", "common"), [(0, 40), (1, 36), (2, 36)])
@pytest.mark.parametrize("suffix", [9, 60])
def test_a_shared_beginning_is_a_hit_while_all_before_still_run(lookahead: int, common: int, suffix: int) -> None:
    """The second request's window pages belong to the first one's KV pages."""
    drive = make_drive(lookahead=lookahead, num_pages=300)
    requests = [drive.make(f"r{own}", [*SYSTEM[:40], *[own] * suffix], 60) for own in range(4)]
    for request in requests:
        drive.scheduler.add(request)
        drive.step(5)
    assert [request.cached_tokens for request in requests] == [0, 0, common, common]
    drive.run()
    assert all(request.output_ids == drive.alone(request) for request in requests)


def test_a_short_suffix_leaves_the_common_window_while_its_request_runs() -> None:
    """The second request still has the window pages in its list, though the KV pages are the first
    one's."""
    drive = make_drive(window=30)
    prompts = [[*SYSTEM[:40], *[1] * 60], [*SYSTEM[:40], 2, 2], [*SYSTEM[:40], 3, 3]]
    requests = [drive.make(f"r{own}", prompt, 60) for own, prompt in enumerate(prompts)]
    for request in requests:
        drive.scheduler.add(request)
        drive.step(4)
    assert [request.cached_tokens for request in requests] == [0, 0, 40]
    drive.run()
    assert all(request.output_ids == drive.alone(request) for request in requests)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 9, 30])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_the_next_turn_of_a_conversation_begins_at_its_last_full_page(most: int, lookahead: int) -> None:
    drive = make_drive(lookahead=lookahead)
    first = run_one(drive, "first", SYSTEM[:21], most)
    second = run_one(drive, "second", [*conversation(drive, first), 7, 7, 7, 7])
    assert second.cached_tokens == (21 + most - 1 - lookahead) // 4 * 4


def test_samples_of_one_prompt_begin_where_its_last_page_begins() -> None:
    for length, cached in ((41, 40), (44, 40)):
        drive = make_drive()
        leader = drive.add("s0", SYSTEM[:length], 5, seed=0)
        others = [drive.add(f"s{seed}", SYSTEM[:length], 5, seed=seed, leader=leader) for seed in (1, 2, 3)]
        drive.run()
        assert [request.cached_tokens for request in (leader, *others)] == [0, cached, cached, cached]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("budget", [30, 100, 400])
def test_a_common_prefix_of_prompts_that_come_at_once_is_computed_once(overlap: bool, budget: int) -> None:
    drive = make_drive(overlap=overlap, max_batch_tokens=budget)
    requests = [drive.add(f"r{index}", [*SYSTEM, index, *[index] * 30], 3) for index in range(5)]
    drive.run()
    assert [request.cached_tokens for request in requests] == [0, 96, 96, 96, 96]
    assert drive.scheduler.stats().computed_prompt_tokens == 127 + 4 * 31


def test_a_common_prefix_shorter_than_the_window_is_computed_once() -> None:
    drive = make_drive(window=120)
    requests = [drive.add(f"r{index}", [*SYSTEM, index, *[index] * 30], 3) for index in range(3)]
    drive.run()
    assert [request.cached_tokens for request in requests] == [0, 96, 96]


def test_who_waits_starts_when_the_common_part_is_there_not_the_rest() -> None:
    drive = make_drive(max_batch_tokens=100)
    drive.add("a", [*SYSTEM, *[1] * 140], 2)
    second = drive.add("b", [*SYSTEM, 0, 0], 2)
    drive.run()
    assert drive.worker.rids[:3] == [["a"], ["a"], ["a", "b"]]
    assert second.cached_tokens == 96


def test_who_comes_in_the_step_that_passes_the_common_end_still_has_its_window() -> None:
    drive = make_drive()
    first = drive.add("first", [*SYSTEM, *[1] * 90], 2)
    drive.step()
    late = drive.add("late", [*SYSTEM, 2, 2], 2)
    drive.step()
    assert drive.awaited(late) == Awaited(first, 24) or late.cached_tokens == 96
    drive.run()
    assert late.cached_tokens == 96


def test_who_comes_after_the_window_was_given_back_computes_its_prompt() -> None:
    drive = make_drive(max_batch_tokens=150)
    drive.add("first", [*SYSTEM[:80], *[1] * 150], 2)
    drive.step(2)
    late = drive.add("late", [*SYSTEM[:80], 2, 2], 2)
    drive.step()
    assert drive.awaited(late) is None
    drive.run()
    assert late.cached_tokens == 0


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_retracted_request_goes_on_from_its_last_full_page(lookahead: int) -> None:
    drive = make_drive(max_model_len=40, num_pages=14, max_batch_tokens=64, lookahead=lookahead)
    requests = [drive.add(rid, [first] * 9, 24) for first, rid in enumerate("ab")]
    drive.run()
    assert drive.scheduler.stats().retractions > 0 and drive.scheduler.stats().hit_tokens > 0
    assert all(request.output_ids == drive.alone(request) for request in requests)


def test_kept_window_pages_are_on_their_way_back() -> None:
    """Until its step is collected, the second prompt keeps two window pages for a request that
    branches off at the same token, and one for a request with the same tokens."""
    drive = make_drive()
    run_one(drive, "first", [*SYSTEM[:40], *[1] * 60], 3)
    drive.add("second", [*SYSTEM[:40], *[2] * 60], 9)
    drive.step()
    drive.scheduler.next_batch()
    running = drive.scheduler.running
    windows = running.memory.windows
    assert windows.kept == 3
    expected = windows.available + windows.kept
    assert (running._comes_back(expected), running._comes_back(expected + 1)) == (True, False)


def test_who_is_short_of_window_pages_alone_takes_them_from_the_youngest() -> None:
    drive = make_drive(window=33, max_batch_tokens=4, num_window_pages=12, prefix_cache=False)
    requests = [drive.add(rid, 4, 60) for rid in "abc"]
    drive.run()
    stats = drive.scheduler.stats()
    assert stats.retractions > 0 and stats.evicted_pages == 0
    assert drive.finishes() == ["a", "b", "c"]
    assert all(request.output_ids == drive.alone(request) for request in requests)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize(("window", "budget"), [(1, 1), (2, 3), (9, 1), (9, 16), (40, 7)])
def test_one_request_of_full_length_always_fits(lookahead: int, page_size: int, window: int, budget: int) -> None:
    sizes: dict[str, Any] = {
        "max_model_len": 96,
        "page_size": page_size,
        "num_pages": 96 // page_size,
        "lookahead": lookahead,
    }
    limits = make_limits(**sizes, window=window, max_batch_tokens=budget)
    least = least_window_pages(limits)
    assert least == -(-(window + budget + (lookahead == 3)) // page_size) + 2
    drive = Drive(**sizes, window=window, max_batch_tokens=budget, num_window_pages=least)
    for rid, prompt in (("a", SYSTEM[:90]), ("b", [*SYSTEM[:70], 9]), ("c", SYSTEM[:90])):
        run_one(drive, rid, prompt, 200)
    assert drive.scheduler.stats().retractions == 0


def test_a_pool_that_holds_no_window_and_step_is_refused() -> None:
    limits = make_limits(window=9, num_window_pages=8)
    with pytest.raises(ConfigError, match="holds 8 pages; a window of 9 tokens and a step of 16 need 9"):
        Scheduler(limits, compose=compose)


@pytest.mark.parametrize("users", [0, 1, 2])
def test_who_begins_with_cached_window_pages_needs_room_for_those_that_it_is_the_first_to_use(users: int) -> None:
    """Of 8 window pages a node holds 3; a hit after the third KV page sees two of them, and a list
    has at most 3."""
    drive = make_drive(num_window_pages=8, max_batch_tokens=12)
    memory = drive.scheduler.running.memory
    run_one(drive, "a", SYSTEM[:12])
    path = memory.cache.match(np.array(SYSTEM[:13], dtype=np.int32))
    for index in range(users):
        memory.windows.restore(drive.make(f"r{index}", 13).held.windows, path, set())
    assert drive.scheduler.stats().cached_window_pages == 3
    rooms = [memory.windows.has_room(path, missing, promised) for missing, promised in ((9, 5), (9, 6), (1, 6), (0, 6))]
    assert rooms == [True, False, False, True]


def test_nobody_is_admitted_to_the_window_page_that_a_running_request_needs_next() -> None:
    drive = make_drive(window=33, max_batch_tokens=4, num_window_pages=12, prefix_cache=False)
    drive.add("old", 4, 33)
    drive.step(30)
    newcomer = drive.add("new", 12, 2)
    drive.step(2)
    assert newcomer.run.slot == 0
    drive.run()
    assert drive.scheduler.stats().retractions == 0


@pytest.mark.parametrize(("siblings", "is_admitted"), [(1, True), (2, False)])
def test_who_passes_others_over_leaves_them_a_window_page_each(siblings: int, is_admitted: bool) -> None:
    """Of 8 window pages the leader holds 3 and is promised one more; the last request needs 3."""
    drive = make_drive(num_window_pages=8, max_batch_tokens=12)
    leader = drive.add("s0", SYSTEM[:14], 5)
    for seed in range(1, siblings + 1):
        drive.add(f"s{seed}", SYSTEM[:14], 5, seed=seed, leader=leader)
    drive.add("new", [9] * 10, 2)
    drive.step(2)
    assert ("new" in drive.worker.rids[1]) is is_admitted
    drive.run()


def test_who_was_refused_for_want_of_window_pages_is_asked_again_when_a_prompt_has_given_its_own_back() -> None:
    drive = make_drive(num_window_pages=9, max_batch_tokens=16, prefix_cache=False)
    drive.add("old", 30, 20)
    drive.add("new", 10, 2)
    drive.step(3)
    assert drive.worker.rids == [["old"], ["old"], ["old", "new"]]
    drive.run()


def test_the_window_used_least_recently_gives_way() -> None:
    drive = make_drive(max_batch_tokens=16, num_window_pages=9)
    for first in (1, 2, 3, 1, 4):
        run_one(drive, f"{drive.scheduler.stats().steps}", [first] * 13, 2)
    stats = drive.scheduler.stats()
    assert (stats.evicted_window_pages, stats.cached_window_pages, stats.evicted_pages) == (1, 7, 0)
    assert run_one(drive, "kept", [1] * 13).cached_tokens == 12
    assert run_one(drive, "gone", [2] * 13).cached_tokens == 0


def test_a_page_that_is_evicted_gives_its_window_page_back() -> None:
    drive = Drive(max_model_len=40, num_pages=10, max_batch_tokens=64, window=9, num_window_pages=60)
    for first in range(6):
        run_one(drive, f"r{first}", [first] * 17)
    stats = drive.scheduler.stats()
    assert stats.evicted_pages > 0 and stats.evicted_window_pages == 0
    assert stats.cached_window_pages <= stats.cached_pages and in_use(drive) == 0


def test_a_state_and_a_window_are_shared_where_both_are() -> None:
    drive = make_drive(keeps_state=True, num_snapshots=16)
    prompts = [[*SYSTEM[:40], *[own] * 30] for own in range(4)]
    assert [run_one(drive, f"r{own}", prompt).cached_tokens for own, prompt in enumerate(prompts)] == [0, 0, 40, 40]
    first = run_one(drive, "again", prompts[1], 9)
    assert first.cached_tokens == 68
    assert run_one(drive, "next", [*conversation(drive, first), 7, 7, 7, 7]).cached_tokens == 76


def test_the_deepest_state_that_has_its_window_is_gone_on_from() -> None:
    """There is a state after page 4 but its window is missing; after page 6 there is a window but
    no state."""
    memory = make_drive(keeps_state=True, num_snapshots=16).scheduler.running.memory
    path = [Node(None, b"", page) for page in range(1, 7)]
    for index in (0, 1, 4, 5):
        path[index].window_page = index + 1
    found = []
    for index in (3, 1):
        path[index].snapshot = index
        found.append(memory._shareable(path))
    assert found == [0, 2]


def test_a_state_that_is_left_without_the_window_before_it_is_of_no_use() -> None:
    drive = make_drive(keeps_state=True, num_snapshots=16, max_batch_tokens=16, num_window_pages=9)
    for first in (1, 2, 3, 4):
        run_one(drive, f"r{first}", [first] * 17)
    assert drive.scheduler.stats().cached_snapshots >= 4
    assert run_one(drive, "gone", [1] * 17).cached_tokens == 0


@pytest.mark.parametrize("given", [{"prefix_cache": False}, {"keeps_state": True}])
def test_where_nothing_is_cached_no_window_page_is(given: dict[str, Any]) -> None:
    drive = make_drive(**given)
    assert [run_one(drive, rid, SYSTEM[:41], 9).cached_tokens for rid in "ab"] == [0, 0]
    assert drive.scheduler.stats().free_window_pages == 160


def test_a_prompt_whose_scores_are_wanted_begins_with_nothing_and_leaves_its_window() -> None:
    drive = make_drive()
    scored = [run_one(drive, rid, SYSTEM[:21], 2, prompt_logprobs=0) for rid in "ab"]
    assert [request.cached_tokens for request in scored] == [0, 0]
    assert run_one(drive, "plain", SYSTEM[:21]).cached_tokens == 20


def test_an_embedding_has_no_window_pages() -> None:
    drive = make_drive()
    request = drive.add("e", 9, task="embed")
    drive.run()
    batch = drive.worker.seen[0]
    assert request.embedding is not None
    assert (batch.window_starts, batch.window_offsets, batch.window_pages) == (None, None, None)


def test_embeddings_as_a_prompt_share_no_window() -> None:
    drive = make_drive(embed_size=2)
    embeds = PromptEmbeds(np.zeros((96, 2)), SYSTEM)
    run_one(drive, "first", SYSTEM, 20, embeds=embeds)
    assert drive.scheduler.stats().free_window_pages == 160
    assert run_one(drive, "text", SYSTEM).cached_tokens == 0


def test_a_step_that_failed_leaves_no_window_page() -> None:
    for fails in ("fail_submit", "fail_collect"):
        drive = make_drive()
        setattr(drive.worker, fails, {3})
        drive.add("a", SYSTEM[:41], 9)
        drive.step(2)
        drive.add("b", [9] * 30, 9)
        with pytest.raises(RuntimeError, match="planned failure"):
            drive.step(2)
        drive.loop.drain()
        drive.scheduler.audit()
        assert in_use(drive) == 0
        run_one(drive, "c", SYSTEM[:41], 9)
        run_one(drive, "d", [9] * 30, 9)


def test_an_aborted_request_leaves_the_window_of_its_last_full_page() -> None:
    drive = make_drive()
    drive.add("a", SYSTEM[:30], 60)
    drive.step(3)
    drive.scheduler.abort("a")
    drive.run()
    assert in_use(drive) == 0
    assert run_one(drive, "again", SYSTEM[:40]).cached_tokens == 28


def test_a_worker_without_window_pages_is_told_of_none() -> None:
    drive = make_drive(num_window_pages=0)
    assert [run_one(drive, rid, SYSTEM[:41], 9).cached_tokens for rid in "ab"] == [0, 40]
    assert all(batch.window_starts is None and batch.window_pages is None for batch in drive.worker.seen)
    assert drive.scheduler.stats().num_window_pages == 0
