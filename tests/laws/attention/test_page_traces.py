"""Random requests that arrive, stop, are aborted and preempted during verification of real drafts'
tokens: each step writes only to pages that belong to one of its requests alone, no page is lost,
and each text is a prefix of the text without draft tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglcore.runtime.speculative import block_drafts, chain_drafts, draft_batches, tree_drafts, tree_worker
from sglcore.runtime.speculative.drafter import NONE
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request
from sglcore.worker.model_worker import Ticket
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.laws.engine import TokenEngine, random_prompts
from tests.laws.proposers import InFlight, Proposers, Steered
from tests.laws.speculation.test_speculative_laws import run

POOL = 6
LENGTHS, MOST = (5, 9, 14, 3, 18, 7), 28
PROMPTS = random_prompts(9, LENGTHS)
SAMPLINGS = [{"temperature": float(index % 2), "seed": index} for index in range(POOL)]
SMALL: dict[str, Any] = {
    "max_model_len": 56,
    "max_requests": 4,
    "max_batch_tokens": 16,
    "page_size": 4,
    "kv_cache_memory": 96 << 10,
}
"""With few pages, so that running requests are preempted at times."""
pytestmark = pytest.mark.needs("graphs.native")
"""Independent of the device."""


class Coming(NamedTuple):
    """A request: the index of its prompt and sampling, its largest number of tokens, the token at
    which it stops, the step before which it arrives, and the number of steps until it is
    aborted."""

    which: int
    tokens: int
    stop: int | None
    step: int
    patience: int | None


COMING = st.builds(
    Coming,
    st.integers(0, POOL - 1),
    st.sampled_from((MOST, MOST, 1, 7)),
    st.sampled_from((None, None, *range(MOST))),
    st.integers(0, 9),
    st.sampled_from((None, None, None, *range(8))),
)


class Always:
    """A random generator that accepts the largest possible number of draft tokens."""

    def integers(self, end: int) -> int:
        """Return the largest value."""
        return end - 1

    def choice(self, values: Sequence[int]) -> int:
        """Return the first value."""
        return values[0]


class Never(Steered):
    """Drafts no valid token."""

    def steer(self, rows: Any, tokens: Tensor, parents: list[list[int]]) -> Tensor:
        return torch.full_like(tokens, NONE)


STEERED: dict[str, Callable[[Any], Steered]] = {
    "some": Steered,
    "all": lambda inner: Steered(inner, Always()),
    "none": Never,
}


class Guarded(InFlight):
    """Compares the whole KV pools before and after each step. Waits for the device."""

    holders: Callable[[], list[Request]]

    def submit(self, batch: ScheduleBatch) -> Ticket:
        before = [each.clone() for each in self.stored()]
        ticket = super().submit(batch)
        assert self.now <= 2
        size, cells = self.limits.page_size, set[int]()
        for one, other in zip(before, self.stored(), strict=True):
            cells |= {*(one != other).flatten(1).any(1).nonzero()[:, 0].tolist()}
        written = {cell // size for cell in cells} - {0}
        slots = {*batch.slots.tolist()}
        holders = self.holders()
        users = Counter(page for each in holders for page in each.held.pages)
        own = {page for each in holders if each.run.slot in slots for page in each.held.pages if users[page] == 1}
        assert written <= own, f"step {batch.step} wrote to pages {written - own}"
        return ticket

    def stored(self) -> list[Tensor]:
        """Return keys and values of the target and of its draft, by KV slot."""
        worker: Any = self.worker
        own = vars(worker.drafter.inner)
        runners = [worker.runner, *own.get("runners", ()), *([own["runner"]] if "runner" in own else [])]
        pools = {id(each.attn_backend): each.attn_backend.token_to_kv_pool for each in runners}
        return [part for pool in pools.values() for layer in range(pool.num_layers) for part in pool.kv(layer)]


@dataclass
class Traces:
    """Engines that run traces, and the texts without draft tokens. `seen` counts events."""

    proposers: Proposers
    texts: list[list[int]]
    seen: Counter[str]

    def guarded(self, name: str, overlap: bool) -> TokenEngine:
        """Start an engine for a trace."""
        return self.proposers.engine(name, graph="off", overlap=overlap, **SMALL)

    def play(self, engine: TokenEngine, coming: Sequence[Coming], accepts: str) -> None:
        """Run one trace to its end, and check it."""
        worker: Any = engine.worker
        worker.drafter = steered = STEERED[accepts](worker.drafter)
        watched = Guarded.of(engine)
        watched.holders = engine.scheduler.running.holders
        requests = [self.request(number, each) for number, each in enumerate(coming)]
        steered.begin([PROMPTS[each.which] + self.texts[each.which] for each in coming], requests)
        before, step = engine.scheduler.stats(), 0
        waiting = sorted(zip(coming, requests, strict=True), key=lambda pair: pair[0].step)
        leaving = dict[str, int]()
        while waiting or engine.loop.has_work:
            while waiting and waiting[0][0].step <= step:
                each, request = waiting.pop(0)
                engine.scheduler.add(request)
                if each.patience is not None:
                    leaving[request.rid] = step + each.patience
            for rid in [rid for rid, last in leaving.items() if last == step]:
                self.seen["given up"] += engine.scheduler.abort(rid) is not None
            if engine.loop.has_work:
                engine.loop.step()
            engine.scheduler.audit()
            step += 1
        self.check(engine, coming, requests, before, watched)

    def request(self, number: int, each: Coming) -> Request:
        """Make the request of a trace."""
        stops = () if each.stop is None else (self.texts[each.which][each.stop],)
        own = {**SAMPLINGS[each.which], "stop_token_ids": list(stops), "max_tokens": each.tokens, "ignore_eos": True}
        params = SamplingParams(**own)
        prompt = np.array(PROMPTS[each.which], np.int32)
        return Request(f"r{number}", prompt, params, seed=params.seed or 0, stop_ids=frozenset(stops))

    def check(
        self, engine: TokenEngine, coming: Sequence[Coming], requests: list[Request], before: Any, watched: InFlight
    ) -> None:
        """All pages are free or cached again, and each text is the expected one, or a prefix of it
        if aborted."""
        stats = engine.scheduler.stats()
        assert stats.free_pages + stats.cached_pages == stats.num_pages
        for each, request in zip(coming, requests, strict=True):
            whole, found = self.texts[each.which], list(request.output_ids)
            assert request.finish_reason in ("length", "stop", "abort"), request.error
            ends = [n for n, token in enumerate(whole, 1) if each.stop is not None and token == whole[each.stop]]
            wanted = whole[: min([each.tokens, *ends])]
            assert found == (wanted if request.finish_reason != "abort" else wanted[: len(found)])
            self.seen["stopped"] += request.finish_reason == "stop"
        self.seen["retracted"] += stats.retractions > before.retractions
        self.seen["overlapped"] += watched.most == 2


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traces]:
    """Traces for all drafters."""
    proposers = Proposers(tmp_path_factory.mktemp("proposers"))
    found = run(proposers.plain(), PROMPTS, MOST, SAMPLINGS)
    yield Traces(proposers, found.tokens, Counter())
    proposers.close()


tree_worker_move = tree_worker.move_path
BOTH = [(name, overlap) for name in ("eagle, trees", "dflash") for overlap in (False, True)]
OTHERS = [("mtp of several layers", True), ("standalone", False), ("frozen-mtp", True)]
TRACES = st.lists(COMING, min_size=4, max_size=9), st.sampled_from([*STEERED])


def play_all(traces: Traces, proposer: str, overlap: bool, examples: int = 12) -> None:
    """Run random traces, each in a new engine."""
    traces.seen.clear()

    # Report a failing trace without shrinking: a failed engine is no start for smaller traces.
    @settings(max_examples=examples, derandomize=True, database=None, phases=[Phase.generate])
    @given(*TRACES)
    def play(coming: list[Coming], accepts: str) -> None:
        try:
            traces.play(traces.guarded(proposer, overlap), coming, accepts)
        finally:
            traces.proposers.close()

    play()


@pytest.mark.parametrize(("proposer", "overlap"), [*BOTH, *OTHERS])
def test_no_step_writes_to_the_pages_of_others(traces: Traces, proposer: str, overlap: bool) -> None:
    play_all(traces, proposer, overlap)
    assert min(traces.seen[each] for each in ("given up", "stopped", "retracted")) > 0, traces.seen
    assert bool(traces.seen["overlapped"]) == overlap


@pytest.mark.parametrize(
    ("proposer", "module"), [("eagle, trees", tree_drafts), ("dflash", block_drafts), ("standalone", chain_drafts)]
)
def test_a_draft_that_writes_behind_its_pages_shows(
    traces: Traces, proposer: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = draft_batches.placed
    monkeypatch.setattr(module, "placed", lambda slots, at, ends: placed(slots, at, ends + SMALL["page_size"]))
    with pytest.raises(AssertionError, match="wrote to pages"):
        play_all(traces, proposer, True)


def test_a_path_that_is_moved_to_another_page_shows(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    def move(pool: Any, cells: Tensor, path: Tensor) -> None:
        tree_worker_move(pool, (cells + SMALL["page_size"]) % pool.num_cells, path)

    monkeypatch.setattr(tree_worker, "move_path", move)
    with pytest.raises(AssertionError, match="wrote to pages|At index"):
        play_all(traces, "eagle, trees", True)
