"""A small overlapped engine: without a defect it gives the CPU's results and no fault; every
planted defect is reported."""

from dataclasses import dataclass

import pytest
import torch

WIDTH, VOCAB, SLOTS, PAGES = 16, 32, 4, 64


@dataclass
class Weights:
    embed: torch.Tensor
    mix: torch.Tensor
    head: torch.Tensor


def make_weights():
    generator = torch.Generator().manual_seed(7)
    return Weights(
        *(torch.randn(*shape, generator=generator) for shape in ((VOCAB, WIDTH), (WIDTH, WIDTH), (WIDTH, VOCAB)))
    )


class Engine:
    """An engine that decodes SLOTS requests. `defect` plants one defect."""

    def __init__(self, dev, weights, defect="", make_graph=None):
        self.dev, self.defect = dev, defect
        self.weights = Weights(*(tensor.to(dev) for tensor in (weights.embed, weights.mix, weights.head)))
        self.pool = torch.zeros(PAGES, WIDTH, device=dev)
        self.tokens = torch.zeros(SLOTS, dtype=torch.int64, device=dev)
        self.cells = torch.zeros(SLOTS, dtype=torch.int64, device=dev)
        self.next = torch.zeros(SLOTS, dtype=torch.int64, device=dev)
        self.staging = [torch.zeros(SLOTS, dtype=torch.int64).pin_memory() for _ in range(2)]
        self.results = [torch.zeros(SLOTS, dtype=torch.int64).pin_memory() for _ in range(2)]
        if defect == "pageable":
            self.staging = [torch.zeros(SLOTS, dtype=torch.int64) for _ in range(2)]
        self.staged = [torch.Event(dev) for _ in range(2)]
        self.landed = [torch.Event(dev) for _ in range(2)]
        self.schedule, self.forward_stream, self.results_stream = (
            torch.accelerator.current_stream(),
            torch.Stream(dev),
            torch.Stream(dev),
        )
        self.step_count = 0
        torch.accelerator.synchronize()
        self.graph = make_graph() if make_graph else None
        if self.graph:
            self.graph.capture(self.model, self.schedule if defect == "default_capture" else self.forward_stream)
        if defect == "replaced_buffer":
            self.next = self.next.clone()
            torch.accelerator.synchronize()

    def model(self):
        if self.defect == "unwritten_index":
            self.cells = torch.empty_like(self.cells)
        hidden = self.weights.embed.index_select(0, self.tokens)
        self.pool.index_copy_(0, self.cells, hidden)
        context = self.pool.sum(0, keepdim=True)
        if self.defect == "mask":
            hidden = hidden[hidden[:, 0] > -100]
        if self.defect == "item":
            hidden = hidden * (1 if hidden[0, 0].item() < 100 else 0)
        logits = torch.tanh((hidden + context) @ self.weights.mix) @ self.weights.head
        self.next.copy_(logits.argmax(-1))
        self.tokens.copy_(self.next)

    def submit(self):
        """Queue one step and return its ticket."""
        ticket = self.step_count % 2
        staging = self.staging[0 if self.defect == "refill" else ticket]
        if self.step_count >= 2:
            self.staged[ticket].synchronize()
        staging.copy_(torch.arange(SLOTS) + SLOTS * self.step_count)
        if self.defect != "no_wait_before_staging":
            self.schedule.wait_stream(self.forward_stream)
        self.cells.copy_(staging, non_blocking=True)
        self.staged[ticket].record(self.schedule)
        if self.defect != "no_wait_before_forward":
            self.forward_stream.wait_stream(self.schedule)
        with self.forward_stream:
            self.graph.replay() if self.graph else self.model()
            shared = self.next.clone()
        if self.defect != "no_wait_before_result":
            self.results_stream.wait_stream(self.forward_stream)
        with self.results_stream:
            self.results[ticket].copy_(shared, non_blocking=True)
        self.landed[ticket].record(self.results_stream)
        if self.defect != "no_retention":
            shared.record_stream(self.results_stream)
        self.step_count += 1
        return ticket

    def collect(self, ticket):
        if self.defect != "read_early":
            self.landed[ticket].synchronize()
        return self.results[ticket].tolist()


def run(sim, engine, steps=6):
    rows, running = [], None
    with sim.no_sync():
        for _ in range(steps):
            queued = engine.submit()
            if running is not None:
                rows.append(engine.collect(running))
            running = queued
        rows.append(engine.collect(running))
    torch.accelerator.synchronize()
    return rows


def wanted(weights, steps=6):
    pool, tokens, rows = torch.zeros(PAGES, WIDTH), torch.zeros(SLOTS, dtype=torch.int64), []
    for step in range(steps):
        hidden = weights.embed[tokens]
        pool[torch.arange(SLOTS) + SLOTS * step] = hidden
        tokens = (torch.tanh((hidden + pool.sum(0, keepdim=True)) @ weights.mix) @ weights.head).argmax(-1)
        rows.append(tokens.tolist())
    return rows


@pytest.mark.parametrize("captured", [False, True])
def test_a_clean_engine_gives_the_numbers_of_the_cpu_and_no_fault(sim, dev, make_graph, captured):
    weights = make_weights()
    engine = Engine(dev, weights, make_graph=make_graph if captured else None)
    assert run(sim, engine) == wanted(weights)
    assert not sim.faults


EAGER = {
    "no_wait_before_staging": "race",
    "no_wait_before_forward": "race",
    "no_wait_before_result": "race",
    "no_retention": "use_after_free",
    "refill": "pinned_source_changed",
    "read_early": "pinned_read_early",
    "pageable": "sync_forbidden",
    "item": "sync_forbidden",
    "mask": "sync_forbidden",
    "unwritten_index": "uninitialised",
}

CAPTURED = {
    "item": "sync_in_capture",
    "mask": "data_dependent",
    "default_capture": "wrong_capture",
    "replaced_buffer": "stale_graph",
    "no_wait_before_staging": "race",
    "no_wait_before_forward": "race",
}


@pytest.mark.parametrize("defect", EAGER)
def test_every_defect_of_the_eager_engine_is_named(sim, dev, defect):
    with sim.expect(EAGER[defect]) as caught:
        run(sim, Engine(dev, make_weights(), defect))
    assert "test_engine.py" in caught.text


@pytest.mark.parametrize("defect", CAPTURED)
def test_every_defect_of_the_captured_engine_is_named(sim, dev, make_graph, defect):
    with sim.expect(CAPTURED[defect]) as caught:
        run(sim, Engine(dev, make_weights(), defect, make_graph))
    assert "test_engine.py" in caught.text or "conftest.py" in caught.text
