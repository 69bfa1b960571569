"""The worker on a device with streams: `submit` does not wait and makes few copies, and nothing is
read too early."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from ci.lanes import Lane
from sglcore.checkpoint.pooling_config import Pooling
from sglcore.device.facts import Facts
from sglcore.runtime.attention.contract import AttentionShape
from sglcore.runtime.attention.reference import ReferenceAttention
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.pools import MHATokenToKVPool, ReqToTokenPool
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.pooling import EmbeddingSteps, Pooler
from sglcore.runtime.readback import Readback, ReadbackQueue
from sglcore.runtime.registry_builders import build_decode_registry, build_prefill_registry
from sglcore.runtime.staging import RING, HostBlock, PinnedRing, StagedArrays
from sglcore.runtime.streams import Streams, make_streams
from sglcore.runtime.token_table import TokenTable
from sglcore.runtime.tp_worker import Pending, TpModelWorker
from sglcore.sampling.params import SamplingParams
from sglcore.worker.model_worker import BatchResult, Limits, Ticket
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from tests.runtime.tiny import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    PAGES,
    SLOTS,
    VOCAB,
    Desk,
    TinyModel,
    ints,
    offsets,
    random_tokens,
    tokens_of,
)

pytestmark = [pytest.mark.needs("streams", "simulator")]

PROMPTS = {2: random_tokens(1, 5), 5: random_tokens(2, 2), 1: random_tokens(3, 7)}


@pytest.fixture
def sim(lane: Lane) -> Iterator[Any]:
    """The simulated device of this process; an unexpected fault fails the test."""
    module = sys.modules.get("sglcore_sim")
    found = None if module is None else module.current()
    if found is None:
        pytest.skip("needs a simulated device: its counters and faults are what is looked at")
    found.reset()
    yield found
    seen = [str(fault) for fault in found.faults]
    found.reset()
    assert not seen, seen


class WorkerSite:
    """A tiny model on the simulated device, its worker, and the host that makes batches."""

    def __init__(self, sim: Any, worker: type[TpModelWorker] = TpModelWorker, streams: type[Streams] = Streams) -> None:
        device = str(sim.device())
        self.facts = Facts(tensor_device=device, has_streams=True, has_pinned_memory=True, index_dtype="int32")
        self.oracle, self.model, self.desk = TinyModel(), on_device(device), Desk(4)
        made = make_streams(self.facts)
        layers = ((KV_HEADS, HEAD_DIM),) * len(self.model.windows)
        table = ReqToTokenPool(SLOTS, CONTEXT, PAGE, device)
        cells = MHATokenToKVPool(PAGES, PAGE, layers, torch.float32, device)
        shape = AttentionShape(HEADS, layers, tuple(dict.fromkeys(self.model.windows)))
        tokens = TokenTable(SLOTS, CONTEXT, device)
        self.runner = ModelRunner(
            self.model,
            ReferenceAttention(shape, table, cells, KernelTable()),
            build_decode_registry(self.facts, table, max_bs=SLOTS),
            build_prefill_registry(self.facts, table, max_bs=2, max_num_tokens=4),
            tokens,
            streams=streams(made.schedule, made.forward),
        )
        limits = Limits(CONTEXT, SLOTS, PAGE, PAGES, SLOTS * CONTEXT, VOCAB)
        pooler = Pooler(Pooling(("mean",), is_normalized=True), self.model.logits, torch.float32)
        self.worker = worker(self.runner, tokens, limits, [EmbeddingSteps(pooler)])

    def collected(self, batch: ScheduleBatch) -> BatchResult:
        """Submit and collect."""
        return self.worker.collect(self.worker.submit(batch))

    def start(self, **values: Any) -> Ticket:
        """Submit the step that brings all prompts."""
        return self.worker.submit(self.desk.extend(PROMPTS, composition=0, **values))

    @property
    def waits(self) -> int:
        """The number of times a pinned buffer was requested before its last copy had finished."""
        registries = (self.runner.decode_registry, self.runner.prefill_registry)
        rings = (self.runner.staging_ring, self.worker._readbacks.ring)
        return sum(registry.block.waits for registry in registries) + sum(ring.waits for ring in rings)


def on_device(device: str) -> TinyModel:
    """The tiny model with its weights on `device`."""
    model = TinyModel()
    model.embedding, model.places, model.head = (
        part.to(device) for part in (model.embedding, model.places, model.head)
    )
    model.qkv, model.out = [part.to(device) for part in model.qkv], [part.to(device) for part in model.out]
    return model


def overlapped(site: WorkerSite, count: int, params: Any = None, **values: Any) -> dict[int, list[int]]:
    """The tokens of all prompts, with two steps in flight."""
    tokens: dict[int, list[int]] = {slot: [] for slot in PROMPTS}

    def take(ticket: Ticket) -> None:
        result = site.worker.collect(ticket)
        for row, slot in enumerate(PROMPTS):
            tokens[slot] += tokens_of(result, row)

    running = site.start(params=params, **values)
    for _ in range(count - 1):
        queued = site.worker.submit(site.desk.decode(*PROMPTS, params=params, composition=1))
        take(running)
        running = queued
    take(running)
    return tokens


def wanted(site: WorkerSite, count: int) -> dict[int, list[int]]:
    """The tokens of each prompt alone, by the model on the host."""
    return {slot: site.oracle.continuation(prompt, count) for slot, prompt in PROMPTS.items()}


PENALISED = [
    (SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.3), 7, 0, len(p)) for p in PROMPTS.values()
]
HISTORY: dict[str, Any] = {
    "history_offsets": offsets([len(prompt) for prompt in PROMPTS.values()]),
    "history_ids": ints([token for prompt in PROMPTS.values() for token in prompt]),
}


def test_two_steps_in_flight_give_the_tokens_of_each_request_alone(sim: Any) -> None:
    site = WorkerSite(sim)
    assert overlapped(site, 9) == wanted(site, 9)
    assert site.waits == 0


def counted(sim: Any, site: WorkerSite, batch: ScheduleBatch) -> tuple[Ticket, int, int]:
    """Submit while waiting is forbidden; return the ticket and the numbers of copies to the device
    and to the host."""
    before = dict(sim.stats())
    with sim.no_sync():
        ticket = site.worker.submit(batch)
    after = sim.stats()
    for name in ("host_syncs", "pageable_h2d", "event_waits"):
        assert after[name] == before[name], name
    return ticket, after["h2d_copies"] - before["h2d_copies"], after["d2h_copies"] - before["d2h_copies"]


@pytest.mark.parametrize("penalised", [False, True])
def test_a_decode_step_is_one_copy_each_way_and_a_new_composition_at_most_two(sim: Any, penalised: bool) -> None:
    site = WorkerSite(sim)
    values = {"params": PENALISED, **HISTORY} if penalised else {}
    params = {"params": PENALISED} if penalised else {}
    ticket, there, back = counted(sim, site, site.desk.extend(PROMPTS, composition=0, **values))
    assert there <= 2 and back == 1
    for step in range(9):
        site.worker.collect(ticket)
        ticket, there, back = counted(sim, site, site.desk.decode(*PROMPTS, composition=1, **params))
        assert (there, back) == (1, 1) if step else (there <= 2 and back == 1)
    site.worker.collect(ticket)
    assert site.waits == 0


def test_collect_waits_for_one_event_and_nothing_else(sim: Any) -> None:
    site = WorkerSite(sim)
    first = site.start()
    second = site.worker.submit(site.desk.decode(*PROMPTS, composition=1))
    before = dict(sim.stats())
    with sim.no_sync():
        site.worker.collect(first)
    after = sim.stats()
    assert after["host_syncs"] == before["host_syncs"]
    assert after["event_waits"] <= before["event_waits"] + 1
    site.worker.collect(second)


def test_a_step_with_everything_that_can_be_asked_waits_for_nothing(sim: Any) -> None:
    site = WorkerSite(sim)
    biased = SamplingParams(temperature=0.8, logit_bias={3: 4.0}, logprobs=2, top_k=7, min_p=0.01)
    rows = {1: random_tokens(1, 6), 3: random_tokens(2, 9), 4: random_tokens(3, 2)}
    extra: dict[str, Any] = {"next_ids": ints([-1, 4, -1]), "prompt_logprobs": ints([1, 2, -1])}
    batch = site.desk.extend(rows, params=[(biased, 1), (biased, 2), (biased, 3)], emits=[True, False, True], **extra)
    ticket, there, back = counted(sim, site, batch)
    assert there <= 2 and back == 1
    result = site.worker.collect(ticket)
    assert result.logprobs is not None and result.logprobs.top_ids.shape == (2, 2)
    exact = torch.log_softmax(site.oracle.logits(site.oracle.dense(rows[3])), -1)
    targets = [*rows[3][1:], 4]
    for found, row, target in zip(result.prompt_logprobs[3 - 2].chosen, exact, targets, strict=True):
        assert found == pytest.approx(float(row[target]), abs=1e-4)


def test_embeddings_wait_for_nothing_and_are_right(sim: Any) -> None:
    site = WorkerSite(sim)
    rows = {1: random_tokens(1, 4), 2: random_tokens(2, 6)}
    batch = site.desk.extend(rows, ForwardMode.EMBED, emits=[False] * 2)
    ticket, there, back = counted(sim, site, batch)
    assert (there, back) == (1, 1)
    found = site.worker.collect(ticket).embeddings
    assert found is not None
    for row, tokens in enumerate(rows.values()):
        mean = site.oracle.dense(tokens).mean(0)
        assert found[row].tolist() == pytest.approx((mean / mean.norm()).tolist(), abs=1e-5)


def test_a_dropped_ticket_harms_no_other_step(sim: Any) -> None:
    site = WorkerSite(sim)
    first = site.worker.collect(site.start())
    tokens = {slot: tokens_of(first, row) for row, slot in enumerate(PROMPTS)}
    for step in range(6):
        ticket = site.worker.submit(site.desk.decode(*PROMPTS, composition=1))
        if step % 3 == 2:
            result = site.worker.collect(ticket)
            for row, slot in enumerate(PROMPTS):
                tokens[slot] += tokens_of(result, row)
        del ticket
        gc.collect()
    alone = wanted(site, 7)
    assert tokens == {slot: [found[0], found[3], found[6]] for slot, found in alone.items()}


def test_what_the_device_uses_is_kept_until_collect_and_no_longer(sim: Any) -> None:
    site = WorkerSite(sim)
    ticket = site.start()
    pending = ticket.payload
    assert isinstance(pending, Pending) and pending.arrays is not None
    addresses = {tensor.data_ptr() for tensor in pending.kept}
    for tensor in (*pending.arrays.arrived.values(), *pending.readback.kept):
        assert tensor.data_ptr() in addresses
    for name in ("input_ids", "seq_lens", "out_cache_loc", "extend_seq_lens"):
        buffer = site.runner.prefill_registry.input_buffer(name).tensor
        assert buffer.data_ptr() in addresses
    del pending, tensor
    site.worker.collect(ticket)
    assert ticket.payload is None
    held = {}
    for _ in range(12):
        site.collected(site.desk.decode(*PROMPTS, composition=1))
        site.model.seen.clear()
        gc.collect()
        held[len(held)] = sim.stats()["allocated"]
    assert len(set(list(held.values())[6:])) == 1


def test_an_error_between_the_copies_leaves_the_rings_as_they_were(sim: Any) -> None:
    site = WorkerSite(sim)
    first = site.worker.collect(site.start())
    found = {slot: tokens_of(first, row) for row, slot in enumerate(PROMPTS)}
    for _ in range(5):
        bad = site.desk.decode(*PROMPTS, composition=1)
        bad.page_counts = bad.page_counts + site.runner.attn_backend.req_to_token_pool.max_pages
        bad.new_pages, bad.new_page_offsets = ints([1]), ints([0, 1, 1, 1])
        with pytest.raises(ValueError, match="its slot holds"):
            site.worker.submit(bad)
        for slot in PROMPTS:
            site.desk.lens[slot] -= 1
    for slot in PROMPTS:
        del site.desk.pages[slot][-(-site.desk.lens[slot] // PAGE) :]
    result = site.collected(site.desk.decode(*PROMPTS, composition=1))
    for row, slot in enumerate(PROMPTS):
        assert found[slot] + tokens_of(result, row) == site.oracle.continuation(PROMPTS[slot], 2)
    assert site.waits == 0


def test_closing_waits_for_steps_under_way(sim: Any) -> None:
    site = WorkerSite(sim)
    ticket = site.start()
    site.worker.close()
    assert sim.stats()["pending"] == 0
    site.worker.collect(ticket)


# -- mutants
# --------------------------------------------------------------------------------------------------


class NoWait(ReadbackQueue):
    """Results are copied to the host without waiting for the step."""

    def post(self, tensors: Any) -> Readback:
        schedule = self._streams.schedule
        assert schedule is not None
        lease = self.ring.lease(tensors[0].numel())
        with schedule:
            lease.buffer.memory[: tensors[0].numel()].copy_(tensors[0], non_blocking=True)
            lease.buffer.copied()
        return Readback(tensors[:1], (tensors[0], lease))


class ReadsEarly(Readback):
    """Results are read without waiting for their event."""

    def read(self) -> list[Any]:
        assert self._sent is not None
        packed, lease = self._sent
        return [lease.buffer.memory[: packed.numel()].tolist()]


class Early(ReadbackQueue):
    """Returns readbacks that are read too early."""

    def post(self, tensors: Any) -> Readback:
        readback = super().post(tensors)
        return ReadsEarly(readback._tensors, readback._sent)


class Unrecorded(ReadbackQueue):
    """Results are freed while the copy on the other stream still reads them."""

    def post(self, tensors: Any) -> Readback:
        forward, schedule = self._streams.forward, self._streams.schedule
        assert forward is not None and schedule is not None
        lease = self.ring.lease(tensors[0].numel())
        results = tensors[0].clone()
        schedule.wait_stream(forward)
        with schedule:
            lease.buffer.memory[: results.numel()].copy_(results, non_blocking=True)
            lease.buffer.copied()
        del results
        return Readback([torch.empty(0, device=tensors[0].device)], (torch.zeros_like(tensors[0]), lease))


class OtherStream(Streams):
    """Steps run on the schedule stream instead of the forward stream."""

    def running(self) -> Any:
        return nullcontext()


class OneBuffer(PinnedRing):
    """One pinned buffer for all leases, without waiting for its copies."""

    def lease(self, size: int) -> Any:
        lease = super().lease(size)
        if len(self._lent[0][0].words) >= size:
            lease.buffer = self._lent[0][0]
        return lease


class TakesOver(TpModelWorker):
    """Work is still in flight on the schedule stream when the worker is made."""

    def _take_over(self) -> None:
        self.runner.token_table.last.zero_()
        super()._take_over()


class NeverTakesOver(TpModelWorker):
    """The forward stream starts without waiting for the schedule stream."""

    def _take_over(self) -> None:
        self.runner.token_table.last.zero_()


def break_readback(site: WorkerSite, kind: type[ReadbackQueue]) -> None:
    """Install a broken readback queue."""
    site.worker._readbacks = kind(site.runner.streams, torch.device(site.facts.tensor_device), True)


def test_results_copied_before_the_step_is_through_are_caught(sim: Any) -> None:
    site = WorkerSite(sim)
    break_readback(site, NoWait)
    with sim.expect("race"):
        site.start()


def test_results_read_before_their_event_are_caught(sim: Any) -> None:
    site = WorkerSite(sim)
    break_readback(site, Early)
    ticket = site.start()
    with sim.expect("pinned_read_early"):
        site.worker.collect(ticket)


def test_results_freed_while_they_are_copied_are_caught(sim: Any) -> None:
    site = WorkerSite(sim)
    break_readback(site, Unrecorded)
    with sim.expect("use_after_free"):
        site.start()
        for _ in range(2):
            site.worker.submit(site.desk.decode(*PROMPTS, composition=1))


def test_a_worker_that_does_not_wait_for_the_weights_is_caught(sim: Any) -> None:
    good = WorkerSite(sim, worker=TakesOver)
    good.worker.collect(good.start())
    bad = WorkerSite(sim, worker=NeverTakesOver)
    with sim.expect("race"):
        bad.start()


def test_a_step_on_another_stream_than_the_one_before_is_caught(sim: Any) -> None:
    site = WorkerSite(sim)
    site.worker.collect(site.start())
    right = site.runner.streams
    with sim.expect("race"):
        for streams in (OtherStream(right.schedule, right.forward), right):
            site.worker._streams = streams
            site.worker.submit(site.desk.decode(*PROMPTS, composition=1))


def test_a_pinned_buffer_that_is_refilled_under_a_copy_is_caught(sim: Any) -> None:
    class OneMirror(HostBlock):
        def commit(self) -> None:
            self._turn = 0
            self._mirrors[0]._copied = False
            super().commit()

    site = WorkerSite(sim)
    block = site.runner.decode_registry.block
    block.__class__ = OneMirror
    site.worker.collect(site.start())
    with sim.expect("pinned_source_changed"):
        tickets = [site.worker.submit(site.desk.decode(*PROMPTS, composition=1)) for _ in range(2)]
        for ticket in tickets:
            site.worker.collect(ticket)


def staged_arrays(sim: Any, kind: type[StagedArrays] = StagedArrays, ring: type[PinnedRing] = PinnedRing) -> None:
    """Send more arrays than there are pinned buffers, each too large for the block, without waiting
    for the device in between."""
    block, made = HostBlock(4, str(sim.device()), shares_memory=False, pinned=True), ring(sim.device(), True)
    arrived = []
    for step in range(RING + 2):
        arrays = kind({"values": np.full(9, step, np.int32)})
        arrays.pack(block, made)
        arrays.arrive(block)
        arrived.append(arrays.arrived["values"])
        del arrays
    assert [tensor.tolist() for tensor in arrived] == [[step] * 9 for step in range(RING + 2)]


class RecordsFirst(StagedArrays):
    """Records the event of a copy before the copy."""

    def arrive(self, block: HostBlock) -> None:
        assert self._lease is not None
        buffer = self._lease.buffer
        buffer.copied()
        event, buffer._event = buffer._event, None
        super().arrive(block)
        buffer._event = event


class LendsAtOnce(PinnedRing):
    """Lends a buffer again although its last copy has not finished."""

    def lease(self, size: int) -> Any:
        for buffer, _ in self._lent:
            buffer._copied = False
        return super().lease(size)


def test_arrays_of_many_steps_arrive_whole_though_their_buffers_are_lent_again(sim: Any) -> None:
    staged_arrays(sim)


@pytest.mark.parametrize("broken", [{"kind": RecordsFirst}, {"ring": LendsAtOnce}])
def test_a_buffer_that_is_lent_again_under_its_copy_is_caught(sim: Any, broken: dict[str, Any]) -> None:
    with sim.expect("pinned_source_changed"):
        staged_arrays(sim, **broken)


def test_results_of_two_steps_in_one_buffer_are_caught(sim: Any) -> None:
    site = WorkerSite(sim)
    site.worker._readbacks.ring = OneBuffer(torch.device(site.facts.tensor_device), True)
    first = site.start()
    second = site.worker.submit(site.desk.decode(*PROMPTS, composition=1))
    one, two = site.worker.collect(first), site.worker.collect(second)
    alone = wanted(site, 2)
    assert np.array_equal([tokens_of(two, row)[0] for row in range(3)], [found[1] for found in alone.values()])
    assert [tokens_of(one, row)[0] for row in range(3)] != [found[0] for found in alone.values()]
