"""For every drafter, chains and trees, with and without overlap, eager and with graphs: texts and
log-probabilities equal plain decode, for requests of every kind in one batch.

Pairwise combinations: each drafter runs with and without overlap, and eager and with graphs, on
each lane that has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from sglcore.config.draft_kinds import IN_TREES, MODELS, WITHOUT_MODEL
from sglcore.config.engine_config import EngineConfig
from sglcore.config.settings import settings_of
from sglcore.conformance.inputs.hashed_grammar import HashedMatcher
from sglcore.schedule.draft_counts import sums_of
from sglcore.schedule.request import Request
from tests.laws.conftest import KINDS
from tests.laws.engine import TokenEngine
from tests.laws.proposers import PROPOSERS, InFlight, Proposers, Steered, drafter_classes
from tests.laws.speculation import test_speculative_laws as laws
from tests.laws.speculation.test_speculative_laws import PROMPTS, VOCABULARY
from tests.laws.speculation.texts import SAMPLING, Ran, check_same

FREE = (*SAMPLING[:3], {"temperature": 1.0, "seed": 7}, SAMPLING[4])
"""No request uses penalties or a mask, so that trees stay trees and steps may overlap."""
GRAMMARS = (None, 11, None, None, 12)
GRAPHS = ("off", *KINDS)


def is_overlapped(proposer: str, graph: str) -> bool:
    """Whether a drafter's steps overlap with this graph kind; the setting is the opposite without
    graphs."""
    return bool(([*PROPOSERS].index(proposer) + (graph != "off")) % 2)


def run(engine: TokenEngine, everything: bool, steered: Steered | None = None, wanted: Ran | None = None) -> Ran:
    """Run the prompts together: without penalties and grammars, or (`everything`) with penalties
    for some and grammars for others."""

    def prepare(requests: list[Request]) -> None:
        if steered is not None and wanted is not None:
            whole = [prompt + output for prompt, output in zip(PROMPTS, wanted.tokens, strict=True)]
            steered.begin(whole, requests)
        for request, seed in zip(requests, GRAMMARS if everything else (), strict=False):
            request.matcher = None if seed is None else HashedMatcher(seed, VOCABULARY, 0.4)

    return laws.run(engine, samplings=SAMPLING if everything else FREE, prepare=prepare)


@pytest.fixture(scope="module")
def proposers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proposers]:
    """All drafters."""
    made = Proposers(tmp_path_factory.mktemp("proposers"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(proposers: Proposers) -> tuple[Ran, Ran]:
    """The results without draft tokens for both kinds of batches."""
    engine = proposers.plain()
    return run(engine, False), run(engine, True)


def check(proposers: Proposers, plain: tuple[Ran, Ran], name: str, **settings: Any) -> tuple[TokenEngine, InFlight]:
    """Run both kinds of batches in one engine; the second finds the first's prompts in the prefix
    cache."""
    engine = proposers.engine(name, poison=True, **settings)
    worker: Any = engine.worker
    assert type(worker.drafter) is PROPOSERS[name].drafter
    worker.drafter = steered = Steered(worker.drafter)
    watched = InFlight.of(engine)
    for everything, wanted in enumerate(plain):
        check_same(run(engine, bool(everything), steered, wanted), wanted)
    counted = sums_of(engine.scheduler.drafts)
    assert 0 < counted.accepted < counted.proposed and engine.scheduler.stats().hit_tokens > 0
    return engine, watched


def runners_of(engine: TokenEngine) -> list[Any]:
    """Return the runners of the draft model, if there is one."""
    drafter: Any = engine.worker.drafter.inner  # type: ignore[attr-defined]
    own = vars(drafter)
    return [*own.get("runners", ()), *([own["runner"]] if "runner" in own else [])]


def all_runners(engine: TokenEngine) -> list[Any]:
    """Return the runners of the target and of the draft model."""
    worker: Any = engine.worker
    return [worker.runner, *runners_of(engine)]


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_whatever_proposes_changes_no_text(
    proposers: Proposers, plain: tuple[Ran, Ran], proposer: str, graph: str
) -> None:
    overlap = is_overlapped(proposer, graph)
    # Graphs of all verification and draft steps are captured for five requests, with all rows of
    # each.
    engine, watched = check(proposers, plain, proposer, overlap=overlap, graph=graph, graph_buckets=(1, 2, 5))
    may_overlap = engine.worker.limits.can_overlap
    waits = PROPOSERS[proposer].waits or any(each.options.needs_exact_lengths for each in all_runners(engine))
    assert may_overlap != waits and bool(engine.worker.limits.against_overlap) == waits
    assert watched.most == 1 + (overlap and may_overlap)
    assert not (PROPOSERS[proposer].waits and may_overlap)
    assert bool(engine.paths - {"eager"}) == (graph != "off"), engine.paths
    assert all((each.graphs is not None) == (graph != "off") for each in runners_of(engine))
    proposers.close()


def test_everything_that_proposes_has_a_row() -> None:
    assert {each.kind for each in PROPOSERS.values()} == {*WITHOUT_MODEL, *MODELS}
    assert {"auto", "off", *WITHOUT_MODEL, *MODELS} == set(settings_of(EngineConfig)["speculative"].choices)
    assert {each.kind for each in PROPOSERS.values() if each.is_tree} == {*IN_TREES}
    assert {each.drafter for each in PROPOSERS.values()} == drafter_classes()


@pytest.mark.parametrize("graphs", [("off", kind) for kind in KINDS])
def test_every_pair_is_met(graphs: tuple[str, str]) -> None:
    met = set[tuple[Any, Any]]()
    for name, graph in product(PROPOSERS, graphs):
        overlap = is_overlapped(name, graph)
        met |= {(name, graph), (name, overlap), (graph, overlap)}
    axes = ([*PROPOSERS], [*graphs], [False, True])
    wanted = [pair for one, other in ((0, 1), (0, 2), (1, 2)) for pair in product(axes[one], axes[other])]
    assert met == set(wanted)


def test_requests_of_every_kind_are_in_one_batch() -> None:
    asked = {name for each in SAMPLING for name, value in each.items() if value}
    assert {"temperature", "top_p", "repetition_penalty", "presence_penalty", "min_tokens", "logit_bias"} <= asked
    assert any(not each["temperature"] for each in SAMPLING) and any(each is not None for each in GRAMMARS)
