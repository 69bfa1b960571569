"""Draft tokens from the prefix cache: texts equal plain decode, a repeated text takes few steps,
and lookups do not change the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglcore.runtime.speculative import verify_worker
from sglcore.schedule.cache import prefix_proposals
from sglcore.schedule.cache.prefix_proposals import PrefixProposals
from sglcore.schedule.draft_counts import sums_of
from sglcore.schedule.request import Request
from tests.laws.engine import TokenEngine
from tests.laws.speculation.test_speculative_laws import CONTEXT, engines, folder, plain, run
from tests.laws.speculation.texts import Ran, check_same

__all__ = ["engines", "folder", "plain"]
SUFFIX: dict[str, Any] = {"speculative": "suffix", "graph": "off", "poison": True}
pytestmark = pytest.mark.needs("device")


def length_of(engine: TokenEngine, *args: Any) -> float:
    """Return the mean acceptance length of one more run."""
    before = sums_of(engine.scheduler.drafts)
    run(engine, *args)
    after = sums_of(engine.scheduler.drafts)
    return 1 + (after.accepted - before.accepted) / (after.steps - before.steps)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_texts_that_come_again_are_the_same(engines, plain: Ran, page_size: int) -> None:
    engine = engines("ngram", plain, page_size=page_size, **SUFFIX)
    for _ in range(3):
        check_same(run(engine), plain)


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_text_that_comes_again_takes_few_steps(engines, plain: Ran, tokens: int) -> None:
    engine = engines("ngram", plain, tokens, **SUFFIX)
    # The drafter itself proposes nothing, so accepted tokens come from the cache.
    engine.worker.drafter = Silent(tokens)
    texts = ([list(range(3, 19))], CONTEXT - 20, [{"temperature": 1.0, "seed": 5}])
    assert length_of(engine, *texts) == 1
    assert length_of(engine, *texts) >= 0.8 * (tokens + 1)


class Silent:
    """Drafts nothing."""

    lookahead, reads_history = 0, True

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def advance(self, rows: Any) -> Any:
        return rows.slots.new_full((len(rows.slots), self.tokens), -1)

    def close(self) -> None:
        """Nothing to free."""


def test_a_cache_that_holds_no_two_texts_changes_none(engines, plain: Ran) -> None:
    engine = engines("ngram", plain, kv_cache_memory=40 << 10, max_model_len=80, **SUFFIX)
    for _ in range(3):
        check_same(run(engine), plain)
    assert engine.scheduler.stats().retractions > 0


def test_pages_that_are_evicted_between_lookup_and_step_harm_nothing(
    engines, plain: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("ngram", plain, **SUFFIX)
    memory, own = engine.scheduler.memory, PrefixProposals.propose

    def propose(self: PrefixProposals, requests: list[Request]) -> Any:
        found = own(self, requests)
        memory.flush()
        return found

    run(engine)
    monkeypatch.setattr(PrefixProposals, "propose", propose)
    for _ in range(2):
        check_same(run(engine), plain)


def test_a_lookup_leaves_the_cache_as_it_is(engines, plain: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines("ngram", plain, **SUFFIX)
    memory, own, looked_up = engine.scheduler.memory, PrefixProposals.propose, []

    def propose(self: PrefixProposals, requests: list[Request]) -> Any:
        def state() -> Any:
            nodes = sorted((node.page, node.users, node.tick) for node in memory.cache.nodes())
            return nodes, memory.cache.num_unused, memory.pool.free, memory.version

        before = state()
        found = own(self, requests)
        assert state() == before
        looked_up.append(found)
        return found

    monkeypatch.setattr(PrefixProposals, "propose", propose)
    for _ in range(2):
        run(engine)
    assert any(found is not None for found in looked_up)


def test_whatever_the_host_proposes_no_text_changes(engines, plain: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    monkeypatch.setattr(PrefixProposals, "following", lambda self, request: random.integers(0, 97, 4).tolist())
    check_same(run(engines("ngram", plain, **SUFFIX)), plain)


def _one_late(self: PrefixProposals, request: Request) -> list[int]:
    return FOLLOWING(self, request)[1:]


FOLLOWING = PrefixProposals.following


@pytest.mark.parametrize(
    ("owner", "name", "defect"),
    [
        (PrefixProposals, "following", _one_late),
        (prefix_proposals, "latest", lambda node, text: None),
        (verify_worker, "replace_proposals", lambda table, slots, given: None),
    ],
)
def test_planted_defects_take_more_steps(
    engines, plain: Ran, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, defect: Any
) -> None:
    monkeypatch.setattr(owner, name, defect)
    with pytest.raises(AssertionError):
        test_a_text_that_comes_again_takes_few_steps(engines, plain, 4)
