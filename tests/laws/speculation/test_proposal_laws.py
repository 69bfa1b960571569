"""The draft tokens after a text, and the distribution they are drawn from, are a function of the
text: for any drafter, chunks, pages, prefix hits and earlier acceptance, with or without overlap
and graphs.

Another law compares the distribution itself with dense torch, in one of these ways, for each
drafter with a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sglcore.runtime.speculative.block_drafts import BlockDrafter
from sglcore.runtime.speculative.chain_drafts import FeatureDrafter, StandaloneDrafter
from sglcore.runtime.speculative.drafter import NONE, DraftRows
from sglcore.runtime.speculative.mtp_drafts import MultiHeadDrafter
from sglcore.runtime.speculative.tree import DraftTree
from sglcore.runtime.speculative.tree_drafts import TreeDrafter
from sglcore.schedule.draft_counts import sums_of
from sglcore.schedule.prompt_embeds import PromptEmbeds
from sglcore.schedule.request import Request
from tests.laws.drafters import make_instead
from tests.laws.engine import TokenEngine
from tests.laws.proposers import BLOCK, PROPOSERS, TOKENS, TREE, Proposers, Steered, plain_fixture, proposers_fixture
from tests.laws.speculation import test_speculative_laws as laws
from tests.laws.speculation.test_speculative_laws import PROMPTS
from tests.laws.speculation.texts import SAMPLING, Ran, check_same

FREE = (*SAMPLING[:3], {"temperature": 1.0, "seed": 7}, SAMPLING[4])
TOLERANCE = 5e-4
pytestmark = pytest.mark.needs("graphs.native")
"""Independent of the device."""

proposers, plain = proposers_fixture(), plain_fixture(FREE)


def reach_of(drafter: Any) -> int:
    """Return the number of KV slots after a text that a drafter writes; another law tests texts
    without room for them."""
    own = {BlockDrafter: BLOCK, TreeDrafter: TREE["draft_width"] * (TREE["draft_depth"] - 1)}
    return next((cells for kind, cells in own.items() if isinstance(drafter, kind)), TOKENS)


class Proposed(NamedTuple):
    """The draft tokens after a text, and log-probabilities [rows, vocab] of all draws, in order."""

    tokens: list[int]
    logprobs: Tensor


class Recording(Steered):
    """Records the draft tokens after each text, by the text's index and length. `proposes`: correct
    tokens are put in; otherwise no token is drafted, so that every length occurs."""

    def __init__(self, inner: Any, proposes: bool) -> None:
        super().__init__(inner)
        self.proposes, self.reach = proposes, reach_of(inner)
        self.found: dict[tuple[int, int], Proposed] = {}
        self._drawn = list[Tensor]()

    def listened(self, rows: DraftRows) -> DraftRows:
        """Return the rows with draws that are recorded."""
        self._drawn.clear()
        count, draw, rank = len(rows.most_lens), rows.draw, rows.rank
        assert rank is not None

        def remember(logits: Tensor) -> None:
            self._drawn.append(torch.log_softmax(logits, -1).view(count, -1, logits.shape[-1]).clone())

        def drawn(logits: Tensor, depth: int) -> Tensor:
            remember(logits)
            return draw(logits, depth)

        def ranked(logits: Tensor, depth: int, leaders: int) -> tuple[Tensor, Tensor]:
            remember(logits)
            return rank(logits, depth, leaders)

        return replace(rows, draw=drawn, rank=ranked)

    def advance(self, rows: DraftRows) -> Tensor:
        return super().advance(self.listened(rows))

    def grow(self, rows: DraftRows) -> DraftTree:
        return super().grow(self.listened(rows))

    def steer(self, rows: DraftRows, tokens: Tensor, parents: list[list[int]]) -> Tensor:
        logprobs = torch.cat(self._drawn, 1) if self._drawn else torch.zeros(len(tokens), 0, 1)
        numbers = {each.run.slot: number for number, each in enumerate(self.requests)}
        for row, (slot, length) in enumerate(zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)):
            if (
                slot in numbers
                and length + self.reach <= int(rows.limits[row])
                and length < len(self.texts[numbers[slot]])
            ):
                self.found[numbers[slot], length] = Proposed(tokens[row].tolist(), logprobs[row])
        return super().steer(rows, tokens, parents) if self.proposes else torch.full_like(tokens, NONE)


def recorded(engine: TokenEngine, plain: Ran, proposes: bool, times: int, table: Tensor | None = None) -> Recording:
    """Run all prompts `times` times; as embeddings from `table` if given."""
    worker: Any = engine.worker
    worker.drafter = recording = Recording(worker.drafter, proposes)
    texts = [prompt + output for prompt, output in zip(PROMPTS, plain.tokens, strict=True)]

    def prepare(requests: list[Request]) -> None:
        recording.begin(texts, requests)
        if table is None:
            return
        rows = table.numpy()
        for request in requests:
            request.embeds = PromptEmbeds(rows[request.prompt_ids], request.prompt_ids.tolist())

    for _ in range(times):
        check_same(laws.run(engine, samplings=FREE, prepare=prepare), plain)
    return recording


@pytest.fixture(scope="module")
def known(proposers: Proposers, plain: Ran) -> Callable[[str], dict[tuple[int, int], Proposed]]:
    """The draft tokens of a drafter for whole prompts in new pages, with every text growing by one
    token per step."""
    found: dict[str, dict[tuple[int, int], Proposed]] = {}

    def of(name: str) -> dict[tuple[int, int], Proposed]:
        if name not in found:
            engine = proposers.engine(name, graph="off", overlap=False, prefix_cache=False)
            found[name] = recorded(engine, plain, False, 1).found
        return found[name]

    return of


WAYS = {
    "tokens of their own pages, overlapped": {"max_batch_tokens": 7, "page_size": 1, "overlap": True, "graph": "off"},
    "large pages, in graphs": {"max_batch_tokens": 16, "page_size": 16, "overlap": False, "graph": "native"},
    "small pages, overlapped, in graphs": {
        "max_batch_tokens": 3,
        "page_size": 4,
        "overlap": True,
        "graph": "native",
        "max_requests": 3,
    },
}
"""Prompts in chunks; the second time their first chunks come from the prefix cache."""


def compare(found: dict[tuple[int, int], Proposed], wanted: dict[tuple[int, int], Proposed]) -> None:
    """Compare all texts that both have."""
    both = found.keys() & wanted.keys()
    assert len(both) > 15
    for key in both:
        one, other = found[key], wanted[key]
        assert torch.equal(one.logprobs.isinf(), other.logprobs.isinf()), key
        worst = (one.logprobs - other.logprobs).nan_to_num().abs().max() if one.logprobs.numel() else 0.0
        assert worst < TOLERANCE and one.tokens == other.tokens, (key, worst)


def check(proposers: Proposers, plain: Ran, wanted: dict[tuple[int, int], Proposed], name: str, way: str) -> None:
    """All draft tokens equal the known ones."""
    settings = {"poison": True, "scramble_pages": 2, "graph_buckets": (1, 2, 5), **WAYS[way]}
    engine = proposers.engine(name, **settings)
    found = recorded(engine, plain, True, 2).found
    stats, counted = engine.scheduler.stats(), sums_of(engine.scheduler.drafts)
    assert stats.hit_tokens > 0 and 0 < counted.accepted < counted.proposed
    compare(found, wanted)


NAMES = [name for name in PROPOSERS if name != "suffix"]
"""A suffix drafter's tokens depend on the texts of other requests."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("proposer", NAMES)
def test_what_is_proposed_is_a_function_of_the_text(
    proposers: Proposers, plain: Ran, known: Any, proposer: str, way: str
) -> None:
    check(proposers, plain, known(proposer), proposer, way)
    proposers.close()


@pytest.mark.parametrize("proposer", [name for name in NAMES if name != "ngram"])
def test_what_is_proposed_after_embeddings_is_what_is_after_their_tokens(
    proposers: Proposers, plain: Ran, known: Any, proposer: str
) -> None:
    table = proposers.target.get_input_embeddings().weight.detach()
    found = recorded(proposers.engine(proposer, graph="off", max_batch_tokens=16), plain, True, 1, table).found
    compare(found, known(proposer))
    proposers.close()


def of_the_root_alone(rows: DraftRows) -> DraftRows:
    """Return the rows of a verification with KV slots for the row before the root only."""
    batch = rows.batch
    if not batch.forward_mode.is_decode:
        return rows
    kept = torch.zeros_like(batch.positions)
    kept[rows.select] = 1
    slots, places = batch.req_pool_indices * kept, batch.positions * kept
    return replace(rows, batch=replace(batch, req_pool_indices=slots, positions=places, seq_lens=places + 1))


class SkipsVerified(FeatureDrafter):
    """Mutant: keeps the KV entries of its own draft tokens after verification."""

    def take_in(self, rows: DraftRows) -> Tensor:
        return super().take_in(of_the_root_alone(rows))


class TreesSkipVerified(TreeDrafter):
    def take_in(self, rows: DraftRows) -> Tensor:
        return super().take_in(of_the_root_alone(rows))


class SkipsTheLast(StandaloneDrafter):
    """Mutant: the last draft token, which the drafter never ran, gets no KV entry."""

    def take_in(self, rows: DraftRows) -> Tensor:
        roots = rows.ids.index_select(0, rows.select)
        return self.run(self.decode(rows, roots, 0)) if rows.batch.forward_mode.is_decode else super().take_in(rows)


class InjectsTheRootAlone(BlockDrafter):
    def inject(self, rows: DraftRows) -> None:
        super().inject(of_the_root_alone(rows))


class ShiftedFeatures(BlockDrafter):
    """Mutant: stores the target's features of each token in the KV slot of the token before."""

    def inject(self, rows: DraftRows) -> None:
        assert rows.features is not None
        super().inject(replace(rows, features=rows.features.roll(-1, 0)))


class WritesNothingAgain(MultiHeadDrafter):
    def front(self, slots: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        owners, positions = super().front(slots, cells)
        return owners * 0, positions * 0


DEFECTS = {
    "eagle": SkipsVerified,
    "eagle, trees": TreesSkipVerified,
    "standalone": SkipsTheLast,
    "dflash": InjectsTheRootAlone,
    "mtp of several layers": WritesNothingAgain,
}


@pytest.mark.parametrize(("proposer", "defect"), [*DEFECTS.items(), ("dflash", ShiftedFeatures)])
def test_what_goes_on_from_other_cells_than_those_of_its_text_shows(
    proposers: Proposers, plain: Ran, known: Any, proposer: str, defect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = known(proposer)
    make_instead(monkeypatch, defect.__bases__[0].__name__, defect)
    with pytest.raises(AssertionError, match=r"\(\(\d+, \d+\), tensor"):
        check(proposers, plain, wanted, proposer, "large pages, in graphs")
    proposers.close()
