"""The torch worker: each ticket is collected once, requests do not affect each other, and overlap
changes no token."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sglcore.runtime.sample_step import SampleStep
from sglcore.runtime.token_table import TokenTable
from sglcore.runtime.tp_worker import Pending, TpModelWorker
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.state import Masks
from sglcore.worker.model_worker import BatchResult, Ticket
from sglcore.worker.schedule_batch import CaptureHiddenMode, ForwardMode, ScheduleBatch
from tests.runtime.tiny import (
    CONTEXT,
    GREEDY,
    HIDDEN,
    SHARED,
    STAGED,
    VOCAB,
    Desk,
    Site,
    TinyModel,
    ints,
    make_site,
    offsets,
    random_tokens,
    tokens_of,
)

PROMPTS = {2: random_tokens(1, 5), 5: random_tokens(2, 2), 1: random_tokens(3, 7)}


def collected(site: Site, batch: ScheduleBatch) -> BatchResult:
    """Submit the batch and collect its result."""
    return site.worker.collect(site.worker.submit(batch))


def generate(
    site: Site, count: int, overlap: bool, params: Sequence[tuple] | None = None, slots: Sequence[int] = tuple(PROMPTS)
) -> dict[int, list[int]]:
    """The tokens of these prompts. The host never sends generated tokens; with overlap it does not
    even know them in time."""
    desk = Desk(4)
    tokens: dict[int, list[int]] = {slot: [] for slot in slots}
    prompts = {slot: PROMPTS[slot] for slot in slots}
    history: dict[str, Any] = {
        "history_offsets": offsets([len(prompt) for prompt in prompts.values()]),
        "history_ids": ints([token for prompt in prompts.values() for token in prompt]),
    }

    def collect(ticket: Ticket) -> None:
        result = site.worker.collect(ticket)
        for row, slot in enumerate(slots):
            tokens[slot] += tokens_of(result, row)

    running = site.worker.submit(desk.extend(prompts, params=params, composition=0, **history))
    for _ in range(count - 1):
        batch = desk.decode(*slots, params=params, composition=1)
        if not overlap:
            collect(running)
            running = site.worker.submit(batch)
        else:
            queued = site.worker.submit(batch)
            collect(running)
            running = queued
    collect(running)
    return tokens


def expected(model: TinyModel, count: int) -> dict[int, list[int]]:
    """The tokens of each prompt alone."""
    return {slot: model.continuation(prompt, count) for slot, prompt in PROMPTS.items()}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("buckets", [(), (1, 4)], ids=["eager", "graphs"])
@pytest.mark.parametrize("facts", [SHARED, STAGED], ids=["shared", "staged"])
def test_the_tokens_are_those_of_each_request_alone(facts: Any, buckets: tuple[int, ...], overlap: bool) -> None:
    site = make_site(facts=facts, buckets=buckets, poison=True)
    assert generate(site, 6, overlap) == expected(site.model, 6)


SAMPLED = {
    2: (SamplingParams(temperature=0.9, top_p=0.8), 7, 0, 5),
    5: (SamplingParams(temperature=1.3, repetition_penalty=1.4), 8, 0, 2),
    1: (GREEDY, 9, 0, 7),
}
"""Sampled requests; the history of the penalised one comes with its prompt only."""


@pytest.mark.parametrize("buckets", [(), (1, 4)], ids=["eager", "graphs"])
def test_sampled_and_penalised_tokens_are_the_same_in_company_alone_and_overlapped(buckets: tuple[int, ...]) -> None:
    alone = {
        slot: generate(make_site(), 8, overlap=False, params=[row], slots=(slot,))[slot]
        for slot, row in SAMPLED.items()
    }
    for overlap in (False, True):
        site = make_site(buckets=buckets)
        assert generate(site, 8, overlap, list(SAMPLED.values())) == alone
    free = generate(make_site(), 8, overlap=False, params=[(SamplingParams(temperature=1.3), 8, 0, 2)], slots=(5,))
    assert free[5] != alone[5]


def penalised(model: TinyModel, prompt: Sequence[int], count: int) -> list[int]:
    """The oracle: greedy with a repetition penalty of 1.6 and a frequency penalty of 0.7, computed
    from whole lists."""
    output: list[int] = []
    for _ in range(count):
        logits = model.logits(model.dense([*prompt, *output])[-1])
        for token in {*prompt, *output}:
            logits[token] = logits[token] / 1.6 if logits[token] > 0 else logits[token] * 1.6
            logits[token] -= 0.7 * output.count(token)
        output.append(int(logits.argmax()))
    return output


@pytest.mark.parametrize("overlap", [False, True])
def test_penalties_see_every_token_drawn_so_far_once(overlap: bool) -> None:
    site = make_site()
    params = SamplingParams(temperature=0.0, repetition_penalty=1.6, frequency_penalty=0.7)
    rows = [(params, 0, 0, len(prompt)) for prompt in PROMPTS.values()]
    wanted = {slot: penalised(site.model, prompt, 9) for slot, prompt in PROMPTS.items()}
    assert generate(site, 9, overlap, rows) == wanted
    assert wanted != expected(site.model, 9)


class LateReader(TpModelWorker):
    """Mutant: returns the device's last tokens at the time of collect instead of the step's."""

    def collect(self, ticket: Ticket) -> BatchResult:
        """Replace the tokens of the result."""
        pending = ticket.payload
        assert isinstance(pending, Pending)
        kept = pending.kept
        result = super().collect(ticket)
        slots = next(tensor for tensor in kept if tensor.dtype is torch.int32 and tensor.tolist() == list(PROMPTS))
        return replace(result, token_ids=self.runner.token_table.last[slots].numpy().copy())


def test_a_worker_that_reads_shared_state_at_collect_is_caught() -> None:
    model = TinyModel()
    assert generate(make_site(model, worker=LateReader), 6, overlap=False) == expected(model, 6)
    assert generate(make_site(model, worker=LateReader), 6, overlap=True) != expected(model, 6)


def test_a_ticket_is_collected_once() -> None:
    site = make_site()
    ticket = site.worker.submit(Desk().extend({1: [3, 4]}))
    site.worker.collect(ticket)
    with pytest.raises(ValueError, match="step 1 was collected before; a ticket is collected once"):
        site.worker.collect(ticket)


def test_results_lie_row_for_row_and_a_chunk_that_is_not_the_last_gives_none() -> None:
    site, desk = make_site(), Desk()
    first, second = random_tokens(1, 4), random_tokens(2, 6)
    result = collected(site, desk.extend({4: first, 2: second[:3]}, emits=[True, False]))
    assert (result.step, result.path) == (1, "eager")
    assert result.token_offsets.tolist() == [0, 1, 1]
    one = site.model.next_token(first)
    assert tokens_of(result, 0) == [one]
    result = collected(site, desk.batch({4: [-4], 2: second[3:5]}, ForwardMode.MIXED, emits=[True, False]))
    two = site.model.next_token([*first, one])
    assert [tokens_of(result, row) for row in (0, 1)] == [[two], []]
    result = collected(site, desk.batch({4: [two], 2: second[5:]}, ForwardMode.MIXED))
    assert tokens_of(result, 0) == [site.model.next_token([*first, one, two])]
    assert tokens_of(result, 1) == [site.model.next_token(second)]
    assert result.bad_rows.tolist() == [False, False]


def check_the_last_tokens_of_emitting_rows() -> None:
    """Rows that sample follow one that does not, and their last tokens come in another order."""
    site, desk = make_site(), Desk()
    first, second, third = (random_tokens(seed, 5) for seed in (1, 2, 3))
    result = collected(site, desk.extend({4: first[:2], 2: second, 1: third}, emits=[False, True, True]))
    ones = [site.model.next_token(prompt) for prompt in (second, third)]
    assert result.token_ids.tolist() == ones
    result = collected(site, desk.batch({4: first[2:], 1: [-1], 2: [-2]}, ForwardMode.MIXED))
    longer = (first, [*third, ones[1]], [*second, ones[0]])
    assert result.token_ids.tolist() == [site.model.next_token(tokens) for tokens in longer]


def test_the_last_tokens_are_those_of_the_rows_that_emitted_wherever_they_stand() -> None:
    check_the_last_tokens_of_emitting_rows()


def test_tokens_remembered_for_the_first_rows_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = TokenTable.publish
    first = torch.tensor([4, 2, 1])
    monkeypatch.setattr(TokenTable, "publish", lambda *args: publish(args[0], first[: len(args[1])], args[2]))
    with pytest.raises(AssertionError):
        check_the_last_tokens_of_emitting_rows()


def test_a_step_in_which_no_row_emits_gives_no_token() -> None:
    site, desk = make_site(), Desk()
    result = collected(site, desk.extend({1: [3, 4], 2: [5]}, emits=[False, False]))
    assert result.token_offsets.tolist() == [0, 0, 0]
    assert len(result.token_ids) == 0
    assert result.bad_rows.tolist() == [False, False]


class KeepsMasks(SampleStep):
    """Mutant: a mask is kept with the sampling state for the rest of the composition."""

    def run(self, *given: Any) -> Any:
        """Run the step and keep its masks."""
        found, arrived = super().run(*given), given[-1]
        if "masks" in arrived:
            masks = Masks(arrived["mask_rows"].long(), arrived["masks"])
            self.known = replace(self.known, state=replace(self.known.state, masks=masks))
        return found


@pytest.mark.parametrize(("kind", "is_free"), [(SampleStep, True), (KeepsMasks, False)])
def test_a_mask_holds_for_its_own_step_alone(kind: type[SampleStep], is_free: bool) -> None:
    site, desk, tokens = make_site(), Desk(4), list(PROMPTS[2])
    site.worker.sampling.__class__ = kind
    tokens += tokens_of(collected(site, desk.extend({2: tokens}, composition=0)), 0)
    allowed = (site.model.next_token(tokens) + 1) % VOCAB
    masks = np.packbits(np.arange(-(-VOCAB // 32) * 32) == allowed, bitorder="little").view(np.int32)[None]
    bound = desk.decode(2, composition=1, mask_rows=ints([0]), masks=masks)
    tokens += tokens_of(collected(site, bound), 0)
    assert tokens[-1] == allowed
    free = tokens_of(collected(site, desk.decode(2, composition=1)), 0)
    assert (free == [site.model.next_token(tokens)]) is is_free


def bad_model() -> TinyModel:
    """A model in which token 13 makes all later results of a request NaN."""
    model = TinyModel()
    model.embedding[13] = torch.nan
    return model


def clean(tokens: Sequence[int]) -> list[int]:
    """The tokens, with 12 in place of 13."""
    return [token if token != 13 else 12 for token in tokens]


@pytest.mark.parametrize("buckets", [(), (4,)], ids=["eager", "graphs"])
def test_bad_numbers_mark_their_own_row_and_reach_no_other(buckets: tuple[int, ...]) -> None:
    site, desk = make_site(bad_model(), buckets=buckets), Desk()
    good, other = clean(random_tokens(1, 5)), clean(random_tokens(2, 3))
    first = collected(site, desk.extend({3: good, 1: [4, 13, 6], 2: other}))
    assert first.bad_rows.tolist() == [False, True, False]
    assert tokens_of(first, 0) == [site.model.next_token(good)]
    assert tokens_of(first, 2) == [site.model.next_token(other)]
    good, other = [*good, *tokens_of(first, 0)], [*other, *tokens_of(first, 2)]
    second = collected(site, desk.decode(2, 1, 3))
    assert second.bad_rows.tolist() == [13 in other, True, 13 in good]
    assert tokens_of(second, 0) == [site.model.next_token(other)]
    assert tokens_of(second, 2) == [site.model.next_token(good)]


def test_bad_rows_are_marked_by_row_though_some_rows_emit_nothing() -> None:
    site, desk = make_site(bad_model()), Desk()
    result = collected(site, desk.extend({3: [1, 2], 2: [13], 1: [13, 1]}, emits=[True, False, True]))
    assert result.bad_rows.tolist() == [False, False, True]


def test_the_pages_and_the_slot_of_a_bad_request_serve_the_next_one() -> None:
    site, desk = make_site(bad_model()), Desk()
    collected(site, desk.extend({1: [13] * 9}))
    desk.leave(1)
    prompt = clean(random_tokens(5, 6))
    result = collected(site, desk.extend({1: prompt}))
    assert not result.bad_rows.any()
    assert tokens_of(result, 0) == [site.model.next_token(prompt)]


# -- retention
# --------------------------------------------------------------------------------------------------


def test_what_the_device_reads_is_kept_until_collect_and_no_longer() -> None:
    site, desk = make_site(), Desk()
    site.worker.collect(site.worker.submit(desk.extend({1: [3, 4]})))
    ticket = site.worker.submit(desk.extend({2: [5, 6, 7]}))
    pending = ticket.payload
    assert isinstance(pending, Pending) and pending.output.tokens is not None
    addresses = {tensor.data_ptr() for tensor in pending.kept}
    for name in ("input_ids", "positions", "seq_lens", "req_pool_indices", "out_cache_loc", "extend_seq_lens"):
        buffer = site.runner.prefill_registry.input_buffer(name).tensor
        assert buffer.data_ptr() in addresses
    results = weakref.ref(pending.output.tokens.token_ids)
    del pending
    gc.collect()
    assert results() is not None
    result = site.worker.collect(ticket)
    assert ticket.payload is None
    del result
    gc.collect()
    assert results() is None


def test_buffers_that_growth_replaced_live_until_the_step_that_reads_them_is_collected() -> None:
    site, desk = make_site(), Desk()
    ticket = site.worker.submit(desk.extend({1: [3, 4]}))
    buffer = site.runner.prefill_registry.input_buffer("out_cache_loc").tensor
    address = buffer.data_ptr()
    del buffer
    other = site.worker.submit(desk.extend({2: random_tokens(1, 30)}))
    pending = ticket.payload
    assert isinstance(pending, Pending)
    assert address in {tensor.data_ptr() for tensor in pending.kept}
    site.worker.collect(ticket)
    site.worker.collect(other)


class Hoarder(TpModelWorker):
    """Mutant: a ticket keeps its payload."""

    def collect(self, ticket: Ticket) -> BatchResult:
        """Collect and put the payload back."""
        pending = ticket.payload
        result = super().collect(ticket)
        ticket.payload = pending
        return result


def test_a_worker_that_keeps_too_long_is_caught() -> None:
    site = make_site(worker=Hoarder)
    ticket = site.worker.submit(Desk().extend({1: [3, 4]}))
    site.worker.collect(ticket)
    assert ticket.payload is not None
    site.worker.collect(ticket)


# -- other results of a step
# --------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_logits() -> None:
    site, desk = make_site(), Desk()
    rows: Mapping[int, Sequence[int]] = {1: random_tokens(1, 4), 3: random_tokens(2, 3)}
    params = [(SamplingParams(temperature=0.0, logprobs=2), 0), (SamplingParams(temperature=0.7, logprobs=0), 3)]
    result = collected(site, desk.extend(rows, params=params))
    assert result.logprobs is not None
    assert result.logprobs.top_ids.shape == (2, 2)
    for row, prompt in enumerate(rows.values()):
        wanted = torch.log_softmax(site.model.logits(site.model.dense(prompt)[-1]), -1)
        token = tokens_of(result, row)[0]
        assert result.logprobs.chosen[row] == pytest.approx(float(wanted[token]), abs=1e-4)
        assert result.logprobs.ranks[row] == int((wanted > wanted[token]).sum()) + 1
        assert result.logprobs.top_ids[row].tolist() == wanted.topk(2).indices.tolist()


def test_prompt_logprobs_score_each_token_of_the_chunk_by_the_one_before() -> None:
    site, desk = make_site(), Desk()
    prompt = random_tokens(1, 6)
    wanted = torch.log_softmax(site.model.logits(site.model.dense(prompt)), -1)
    found = []
    for start, end, next_id in ((0, 4, prompt[4]), (4, 6, -1)):
        extra: dict[str, Any] = {
            "next_ids": np.array([-1, next_id], dtype=np.int32),
            "prompt_logprobs": np.array([-1, 1], dtype=np.int32),
        }
        rows = {start + 2: [7, 8], 1: prompt[start:end]}
        result = collected(site, desk.extend(rows, emits=[True, end == 6], **extra))
        assert list(result.prompt_logprobs) == [1]
        found += result.prompt_logprobs[1].chosen.tolist()
        assert result.prompt_logprobs[1].top_ids.shape[1] == 1
    exact = [float(wanted[i, prompt[i + 1]]) for i in range(5)]
    assert found == pytest.approx(exact, abs=1e-4)


def test_an_embedding_is_the_mean_of_a_requests_hidden_states_of_length_one() -> None:
    site, desk = make_site(), Desk()
    rows = {1: random_tokens(1, 4), 2: random_tokens(2, 1), 3: random_tokens(3, 6)}
    result = collected(site, desk.extend(rows, ForwardMode.EMBED, emits=[False] * 3))
    assert result.embeddings is not None
    assert result.embeddings.shape == (3, HIDDEN)
    assert result.token_offsets.tolist() == [0, 0, 0, 0]
    for row, tokens in enumerate(rows.values()):
        mean = site.model.dense(tokens).mean(0)
        assert result.embeddings[row].tolist() == pytest.approx((mean / mean.norm()).tolist(), abs=1e-5)


def test_a_bad_embedding_marks_its_row() -> None:
    site, desk = make_site(bad_model()), Desk()
    result = collected(site, desk.extend({1: [3, 4], 2: [13]}, ForwardMode.EMBED, emits=[False] * 2))
    assert result.bad_rows.tolist() == [False, True]


def test_results_are_the_hosts_own_and_stay_as_they_are() -> None:
    site, desk = make_site(), Desk()
    first = collected(site, desk.extend({1: [3, 4]}))
    before = (first.token_ids.copy(), first.token_offsets.copy(), first.bad_rows.copy())
    for _ in range(3):
        collected(site, desk.decode(1))
    for kept, found in zip(before, (first.token_ids, first.token_offsets, first.bad_rows), strict=True):
        assert np.array_equal(kept, found)


def test_the_limits_are_those_it_was_made_with() -> None:
    limits = make_site().worker.limits
    assert (limits.max_model_len, limits.vocab_size) == (CONTEXT, VOCAB)


def test_a_third_step_in_flight_is_refused_before_it_touches_anything() -> None:
    site, desk = make_site(), Desk(4)
    tickets = [site.worker.submit(desk.extend({1: PROMPTS[1]}, composition=0)), site.worker.submit(desk.decode(1))]
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        site.worker.submit(desk.decode(1))
    site.worker.collect(tickets[0])
    site.worker.submit(desk.decode(1))


def test_more_pages_than_a_slot_holds_are_refused_instead_of_reaching_the_next_slot() -> None:
    site, desk = make_site(), Desk(4)
    batch = desk.extend({1: PROMPTS[1]}, composition=0)
    table = site.worker.runner.attn_backend.req_to_token_pool
    before = table.page_table.clone()
    batch.page_counts = batch.page_counts + table.max_pages
    with pytest.raises(ValueError, match="its slot holds"):
        site.worker.submit(batch)
    assert torch.equal(table.page_table, before)


def test_hidden_states_are_refused_before_anything_is_touched_or_taken() -> None:
    site, desk = make_site(), Desk(4)
    batch = desk.extend({1: PROMPTS[1]}, composition=0)
    batch.capture_hidden_mode.put(CaptureHiddenMode.LAST)
    before = site.worker.runner.attn_backend.req_to_token_pool.page_table.clone()
    with pytest.raises(ValueError, match="requests hidden states"):
        site.worker.submit(batch)
    assert batch.capture_hidden_mode.is_set
    assert torch.equal(site.worker.runner.attn_backend.req_to_token_pool.page_table, before)
