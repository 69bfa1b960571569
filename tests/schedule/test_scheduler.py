"""The scheduler's promises, one behaviour at a time; the random invariants are in
test_traces.py."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from msgspec.structs import astuple

from sglcore.core.errors import ConfigError, SglcoreError
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch
from sglcore.schedule.request import Request, State
from sglcore.schedule.request_errors import RequestError
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.scheduler_stats import SchedulerStats
from sglcore.worker.model_worker import BatchResult
from sglcore.worker.schedule_batch import ForwardMode
from tests.schedule.drive import Drive
from tests.schedule.fake_worker import make_limits, make_params

DECODE, EXTEND, MIXED, EMBED = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.EMBED


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers_and_the_remedy() -> None:
    with pytest.raises(RequestError, match=r"64 tokens.*holds 64.*shorten the prompt by 1 or raise max_model_len"):
        Drive(max_model_len=64).add("a", 64)


def test_a_refusal_is_a_value_error_and_one_of_ours() -> None:
    assert issubclass(RequestError, ValueError) and issubclass(RequestError, SglcoreError)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([0, 50], "token id 50, wanted 0..49"), ([-1], "token id -1"), ([[1], [2]], "empty")],
)
def test_a_prompt_that_can_not_run_is_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Drive(vocab_size=50).add("a", prompt)


@pytest.mark.parametrize("ids", [np.array([1, 2**40]), np.array([1.5]), [2**33]])
def test_ids_that_are_no_32_bit_integers_are_refused_instead_of_wrapped(ids: np.ndarray) -> None:
    with pytest.raises(RequestError, match=r"token ids|integer"):
        Request("a", ids, make_params())


def test_a_name_may_be_used_again_only_after_its_request_has_ended() -> None:
    drive = Drive()
    first = drive.add("a", 3, 1)
    with pytest.raises(RequestError, match="added before"):
        drive.add("a", 3)
    drive.run()
    with pytest.raises(RequestError, match="added before"):
        drive.scheduler.add(first)
    drive.add("a", 3, 1)


def test_a_leader_must_be_added_first() -> None:
    drive = Drive()
    with pytest.raises(RequestError, match="add the leader first"):
        drive.add("b", 3, leader=drive.make("a", 3))


def test_a_model_that_only_embeds_refuses_to_generate() -> None:
    with pytest.raises(RequestError, match="only embeds"):
        Drive(generates=False).add("a", 3)


def test_an_embedding_longer_than_a_step_is_refused() -> None:
    with pytest.raises(RequestError, match=r"17 tokens.*at most 16.*shorten the prompt by 1 or raise max_batch_tokens"):
        Drive(max_batch_tokens=16).add("a", 17, task="embed")


def test_a_pool_that_can_not_hold_one_full_request_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"holds 60 tokens.*context is 64.*kv_cache_memory"):
        Drive(max_model_len=64, page_size=4, num_pages=15)


def test_the_scheduler_loads_no_tensor_library() -> None:
    code = "import sys, sglcore.schedule.step_loop; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_refused_request_leaves_nothing_behind() -> None:
    drive = Drive()
    with pytest.raises(RequestError):
        drive.add("a", [])
    assert not drive.loop.has_work
    drive.add("a", 3, 1)
    drive.run()


def test_decode_rows_come_first_in_a_stable_order_then_chunks_by_arrival() -> None:
    drive = Drive(max_requests=8, max_batch_tokens=16)
    for rid in "abc":
        drive.add(rid, 2, None)
    drive.step(2)
    drive.add("d", 20, None)
    drive.add("e", 2, None)
    drive.step(2)
    assert drive.worker.rids[:2] == [["a", "b", "c"], ["a", "b", "c"]]
    assert drive.worker.rids[2:4] == [["a", "b", "c", "d"], ["a", "b", "c", "d", "e"]]
    assert drive.worker.modes[:4] == [EXTEND, DECODE, MIXED, MIXED]


def test_every_decode_row_emits_in_every_step_while_a_long_prompt_is_computed() -> None:
    drive = Drive(max_batch_tokens=4)
    short = drive.add("short", 2, 20)
    drive.step(3)
    drive.add("long", 40, 1)
    before = len(short.output_ids)
    drive.step(10)
    assert len(short.output_ids) == before + 10


def test_without_mixed_batches_prompts_and_decodes_take_turns() -> None:
    drive = Drive(allows_mixed_batches=False, max_batch_tokens=4)
    drive.add("a", 2, 20)
    drive.step(2)
    drive.add("b", 24, 1)
    drive.step(8)
    assert drive.worker.modes[2:10] == [EXTEND, DECODE] * 4


def test_a_continuation_of_one_token_is_a_chunk_and_not_a_decode() -> None:
    drive = Drive(max_batch_tokens=4, overlap=False)
    drive.add("a", 5, 2)
    drive.run()
    assert drive.worker.modes == [EXTEND, EXTEND, DECODE]
    assert drive.worker.seen[1].num_tokens == 1


def test_steady_decode_keeps_the_composition_and_the_sampling_state() -> None:
    drive = Drive()
    drive.add("a", 2, None)
    drive.add("b", 2, None)
    drive.step()
    batches = [drive.scheduler.next_batch() for _ in range(3)]
    assert len({batch.composition for batch in batches if batch}) == 1
    assert len({id(batch.sampling) for batch in batches if batch}) == 1
    assert len({id(batch) for batch in batches}) == 1


def test_composition_changes_when_a_row_comes_or_goes() -> None:
    drive = Drive(overlap=False)
    drive.add("a", 2, 6)
    drive.add("b", 2, 3)
    drive.run()
    compositions = [batch.composition for batch in drive.worker.seen]
    assert [len(set(compositions[:1])), len(set(compositions[1:3])), len(set(compositions[3:]))] == [1, 1, 1]
    assert len(set(compositions)) == 3


def test_a_token_the_host_does_not_know_yet_travels_as_minus_its_slot() -> None:
    overlapped, sequential = Drive(), Drive(overlap=False)
    for drive in (overlapped, sequential):
        drive.add("a", 2, 4)
        drive.run()
    for batch in overlapped.worker.seen[1:]:
        assert batch.input_ids.tolist() == (-batch.slots).tolist()
    for batch in sequential.worker.seen[1:]:
        assert batch.input_ids.min() >= 0


def test_a_length_stop_runs_no_step_too_many() -> None:
    drive = Drive()
    drive.add("a", 3, 5)
    drive.run()
    assert len(drive.worker.seen) == 5


@pytest.mark.parametrize(("prompt", "outputs"), [(60, 4), (63, 1)])
def test_output_ends_where_the_context_is_full(prompt: int, outputs: int) -> None:
    drive = Drive(max_model_len=64)
    request = drive.add("a", prompt, None)
    drive.run()
    assert (len(request.output_ids), request.finish_reason) == (outputs, "length")


def test_a_stop_token_leaves_one_stale_step_whose_result_is_dropped() -> None:
    drive = Drive()
    request = drive.stop_after(drive.make("a", 3, None), 4)
    drive.scheduler.add(request)
    drive.run()
    assert len(drive.worker.seen) == 5
    assert request.output_ids == drive.alone(request)
    assert (request.finish_reason, request.stop_cause) == ("stop", request.output_ids[-1])


def test_a_stale_request_keeps_slot_and_pages_until_its_last_ticket_is_collected() -> None:
    drive = Drive(max_requests=1, prefix_cache=False)
    request = drive.stop_after(drive.make("a", 3, None), 2)
    drive.scheduler.add(request)
    drive.add("b", 3, 1)
    drive.step(3)
    assert request.state is State.FINISHED
    stats = drive.scheduler.stats()
    assert (stats.in_flight, stats.waiting) == (1, 1)
    assert stats.free_pages == stats.num_pages - 2
    drive.run()


def test_abort_works_in_every_state() -> None:
    drive = Drive(max_requests=3, max_batch_tokens=6)
    decoding, chunking, waiting = drive.add("a", 3, None), drive.add("b", 30, 4), drive.add("c", 30, 4)
    drive.step(2)
    assert [r.state for r in (decoding, chunking, waiting)] == [State.DECODING, State.EXTENDING, State.WAITING]
    for rid in "abc":
        output = drive.scheduler.abort(rid)
        assert output is not None and output.finish_reason == "abort" and output.token_ids == []
        drive.scheduler.audit()
    assert drive.scheduler.abort("a") is None
    drive.run()
    assert drive.finishes() == []


def test_a_request_can_be_aborted_while_its_last_token_is_in_flight() -> None:
    drive = Drive()
    request = drive.add("a", 3, 2)
    drive.step(2)
    assert drive.scheduler.abort("a") is not None
    drive.run()
    assert (request.finish_reason, len(request.output_ids)) == ("abort", 1)


def test_a_stop_string_ends_a_request_with_its_text() -> None:
    drive = Drive()
    request = drive.add("a", 3, None)
    drive.step(4)
    output = drive.scheduler.stop("a", "\n\n")
    assert output is not None and output.finished
    assert (request.finish_reason, request.stop_cause) == ("stop", "\n\n")
    drive.run()


def test_siblings_wait_for_the_first_one_and_share_its_prompt() -> None:
    drive = Drive(max_requests=4, max_batch_tokens=6, page_size=2)
    prompt = list(range(13))
    leader = drive.add("a", prompt, 4)
    siblings = [drive.add(f"b{index}", prompt, 4, leader=leader, seed=index) for index in (1, 2)]
    drive.run()
    assert [sibling.cached_tokens for sibling in siblings] == [12, 12]
    assert sum(batch.num_tokens for batch in drive.worker.seen if batch.forward_mode is EXTEND) <= 13 + 2


def test_siblings_start_while_the_first_one_still_decodes() -> None:
    drive = Drive(page_size=2)
    leader = drive.add("a", list(range(9)), 20)
    sibling = drive.add("b", list(range(9)), 2, leader=leader)
    drive.step(4)
    assert (leader.state, sibling.state) == (State.DECODING, State.DECODING)
    drive.run()


def test_siblings_do_not_wait_for_an_aborted_leader() -> None:
    drive = Drive(max_batch_tokens=4)
    leader = drive.add("a", list(range(13)), 4)
    sibling = drive.add("b", list(range(13)), 4, leader=leader)
    drive.step(2)
    drive.scheduler.abort("a")
    drive.run()
    assert sibling.finish_reason == "length"


def test_others_may_run_while_a_sibling_waits() -> None:
    drive = Drive(max_batch_tokens=16)
    leader = drive.add("a", list(range(10)), 1)
    drive.add("b", list(range(10)), 1, leader=leader)
    drive.add("c", 4, 1)
    drive.step()
    assert drive.worker.rids[0] == ["a", "c"]
    drive.run()


def test_a_second_prompt_uses_the_cached_pages_of_the_first() -> None:
    drive = Drive(page_size=4)
    drive.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    drive.run()
    second = drive.add("b", [1, 2, 3, 4, 5, 6, 7, 8], 1)
    drive.run()
    assert second.cached_tokens == 4
    assert drive.scheduler.stats().hit_tokens == 4


@pytest.mark.parametrize(("lookahead", "cached"), [(0, 8), (1, 8), (2, 4)])
def test_pages_are_found_again_as_soon_as_their_following_tokens_allow(lookahead: int, cached: int) -> None:
    drive = Drive(page_size=4, lookahead=lookahead)
    drive.add("a", list(range(9)), 1)
    drive.run()
    second = drive.add("b", list(range(9)), 1)
    drive.run()
    assert second.cached_tokens == cached


def test_the_output_of_a_request_is_cached_for_the_next_turn() -> None:
    drive = Drive(page_size=4)
    first = drive.add("a", 6, 8)
    drive.run()
    second = drive.add("b", [*first.prompt_ids.tolist(), *first.output_ids, 1, 2], 1)
    drive.run()
    assert second.cached_tokens == 12


def test_prompt_logprobs_are_computed_and_not_cut_short_by_the_cache() -> None:
    drive = Drive(page_size=4, max_batch_tokens=3)
    drive.add("a", 12, 1)
    drive.run()
    request = drive.add("b", drive.make("a", 12).prompt_ids.tolist(), 2, prompt_logprobs=2)
    drive.run()
    assert request.cached_tokens == 0
    assert [-int(value) for part in request.prompt_logprobs for value in part.chosen] == request.prompt_ids[1:].tolist()


@pytest.mark.parametrize("wanted", [0, 3])
def test_as_many_tokens_are_scored_at_each_place_of_a_prompt_as_were_asked_for(wanted: int) -> None:
    drive = Drive(max_batch_tokens=4)
    drive.add("a", 3, 2)
    drive.add("b", 2, 1, prompt_logprobs=wanted)
    drive.run()
    rows = [batch.prompt_logprobs.tolist() for batch in drive.worker.seen if batch.prompt_logprobs is not None]
    assert rows == [[-1, wanted], [-1, wanted]]


def test_a_retracted_request_brings_its_history_again() -> None:
    drive = Drive(max_model_len=32, page_size=4, num_pages=8, max_requests=3, prefix_cache=False)
    requests = [drive.add(rid, 4, 20, needs_history=True) for rid in ("old", "young")]
    drive.run()
    assert drive.scheduler.stats().retractions > 0
    assert [request.output_ids for request in requests] == [drive.alone(request) for request in requests]


def test_the_youngest_gives_way_when_pages_run_out_and_loses_nothing() -> None:
    drive = Drive(max_model_len=32, page_size=4, num_pages=8, max_requests=3, prefix_cache=False)
    old, young = drive.add("old", 3, 20), drive.add("young", 5, 20)
    drive.run()
    assert drive.scheduler.stats().retractions > 0
    assert drive.finishes() == ["old", "young"]
    assert [old.output_ids, young.output_ids] == [drive.alone(old), drive.alone(young)]


@pytest.mark.parametrize("overlap", [True, False])
def test_no_more_requests_are_retracted_than_are_needed(overlap: bool) -> None:
    sizes = {"max_model_len": 32, "page_size": 4, "num_pages": 10, "max_requests": 3, "max_batch_tokens": 32}
    drive = Drive(prefix_cache=False, overlap=overlap, **sizes)
    for rid, prompt in (("a", 4), ("b", 9), ("c", 9)):
        drive.add(rid, prompt, 9)
    seen = 0
    while drive.loop.has_work and not seen:
        drive.step()
        seen = drive.scheduler.stats().retractions
    drive.step()
    assert drive.scheduler.stats().retractions == 1
    drive.run()


def test_a_retracted_request_returns_before_later_ones() -> None:
    drive = Drive(max_model_len=32, page_size=4, num_pages=8, max_requests=2, prefix_cache=False)
    for rid in ("a", "b", "c"):
        drive.add(rid, 5, 16)
    drive.run()
    assert drive.scheduler.stats().retractions > 0
    assert drive.finishes() == ["a", "b", "c"]


def test_unused_cached_pages_are_evicted_before_anybody_is_retracted() -> None:
    drive = Drive(max_model_len=32, page_size=4, num_pages=8, max_requests=2)
    drive.add("a", 12, 1)
    drive.run()
    assert drive.scheduler.stats().cached_pages == 3
    drive.add("b", [40] * 12, 18)
    drive.run()
    stats = drive.scheduler.stats()
    assert (stats.retractions, stats.evicted_pages) == (0, 3)


def test_a_row_with_bad_logits_ends_alone() -> None:
    drive = Drive()
    drive.worker.bad_requests = {"b"}
    good, bad = drive.add("a", 3, 4), drive.add("b", 3, 4)
    drive.run()
    assert (good.finish_reason, bad.finish_reason) == ("length", "error")
    assert "not finite" in bad.error


def test_embeddings_are_batched_by_the_token_budget_and_take_turns_with_generation() -> None:
    drive = Drive(max_batch_tokens=8)
    drive.add("g", 2, 6)
    embeddings = [drive.add(f"e{index}", 4, task="embed") for index in range(5)]
    drive.run()
    assert drive.worker.modes[:6] == [EMBED, EXTEND, EMBED, DECODE, EMBED, DECODE]
    assert all(request.embedding is not None and request.finish_reason == "stop" for request in embeddings)


def test_embeddings_take_neither_slots_nor_pages() -> None:
    drive = Drive(max_batch_tokens=8)
    drive.add("e", 4, task="embed")
    drive.step()
    assert drive.worker.seen[0].slots.tolist() == [0]
    assert drive.scheduler.stats().free_pages == drive.limits.num_pages
    drive.run()
    assert [output.cached_tokens for output in drive.outputs] == [0]


def test_no_more_rows_run_than_a_step_has_tokens() -> None:
    drive = Drive(max_requests=4, max_batch_tokens=2)
    for rid in "abcd":
        drive.add(rid, 1, 5)
    drive.run()
    assert max(map(len, drive.worker.rids)) == 2


def test_stats_count_requests_and_pages() -> None:
    drive = Drive(max_requests=1, prefix_cache=False)
    drive.add("a", 5, None)
    drive.add("b", 5, None)
    drive.step(2)
    stats = drive.scheduler.stats()
    counts = {name: getattr(stats, name) for name in ("waiting", "running", "decoding", "in_flight", "steps")}
    assert counts == {"waiting": 1, "running": 1, "decoding": 1, "in_flight": 1, "steps": 2}
    assert stats.free_pages == stats.num_pages - 2


def test_what_did_not_happen_yet_was_not_counted() -> None:
    assert set(astuple(SchedulerStats())) == {0}
    limits = make_limits()
    pages = {"num_pages": limits.num_pages, "free_pages": limits.num_pages}
    assert Scheduler(limits).stats() == SchedulerStats(**pages)


def test_only_the_first_output_says_what_was_cached() -> None:
    drive = Drive()
    drive.add("a", 5, 3)
    drive.run()
    assert [output.cached_tokens for output in drive.outputs] == [0, -1, -1]


def test_a_result_for_another_step_is_refused() -> None:
    drive = Drive()
    drive.add("a", 3, 4)
    drive.step()
    record = drive.scheduler.in_flight.newest
    result = drive.worker.in_flight[0].result
    with pytest.raises(ValueError, match="wanted"):
        drive.scheduler.finish(record, type(result)(9, result.token_offsets, result.token_ids, result.bad_rows))


def test_an_embedding_step_without_embeddings_is_refused() -> None:
    drive = Drive()
    drive.add("e", 3, task="embed")
    assert drive.scheduler.next_batch() is not None
    empty = np.zeros(2, dtype=np.int32)
    result = BatchResult(1, empty, empty[:0], np.zeros(1, dtype=bool))
    with pytest.raises(ValueError, match="no embeddings"):
        drive.scheduler.finish(drive.scheduler.in_flight.newest, result)


def test_a_scheduler_makes_its_own_sampling_state_by_default() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add(Request("a", np.array([1, 2]), SamplingParams(), seed=5))
    batch = scheduler.next_batch()
    assert batch is not None and isinstance(batch.sampling, SamplingBatch)
