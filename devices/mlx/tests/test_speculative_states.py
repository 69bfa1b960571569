"""Tests draft tokens on models with recurrent states: a state takes in the accepted tokens, and
nothing else. Tokens and log-probabilities equal those of plain decode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.parity import TokenEngine, write_tiny
from devices.mlx.tests.speculating import PROMPTS, AtRandom, Ran, check_same, plant, run
from sglcore_mlx.layers import recurrent
from sglcore_mlx.speculative.stepper import SpeculativeStepper
from sglcore_mlx.speculative.worker import SpeculativeWorker

SETTINGS = {"poison": True, "max_requests": len(PROMPTS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("states") / "hybrid", hybrid=True)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Iterator[Ran]:
    """The results without speculation."""
    with TokenEngine(folder, **SETTINGS) as engine:
        yield run(engine)


def opened(folder: Path, wanted: Ran, drafter: str, **settings: Any) -> TokenEngine:
    engine = TokenEngine(folder, speculative="ngram", draft_tokens=4, **SETTINGS, **settings)
    if drafter != "ngram":
        plant(engine, drafter, wanted)
    return engine


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graph", ["off", "compiled"])
@pytest.mark.parametrize("drafter", ["ngram", "oracle", "adversary", "guessing"])
def test_proposals_change_no_text(folder: Path, wanted: Ran, drafter: str, graph: str, overlap: bool) -> None:
    with opened(folder, wanted, drafter, graph=graph) as engine:
        found = run(engine, overlap=overlap)
    check_same(found, wanted)
    assert found.proposed > 0 and (drafter != "oracle" or found.accepted == found.proposed)


def test_joins_chunks_lengths_retractions_and_cached_states_change_none(folder: Path, wanted: Ran) -> None:
    with opened(folder, wanted, "guessing") as engine:
        assert isinstance(engine.worker, SpeculativeWorker)
        check_same(run(engine, stagger=2, chunk=12), wanted)
        engine.worker.length = AtRandom(4)
        session = engine.session(pages=34)
        first, again = (run(engine, session=session) for _ in range(2))
        check_same(first, wanted)
        check_same(again, wanted)
    assert first.retractions > 0


def takes_in_all(patch: pytest.MonkeyPatch) -> None:
    """The states take in rejected tokens too."""
    patch.setattr(recurrent, "_within", lambda x, lens: x)


def keeps_the_last_tail(patch: pytest.MonkeyPatch) -> None:
    """The convolution continues after the last token, accepted or not."""
    own = recurrent.CausalConv.__call__
    patch.setattr(recurrent.CausalConv, "__call__", lambda self, x, tails, lens=None: own(self, x, tails))


def stands_still(patch: pytest.MonkeyPatch) -> None:
    """The states do not advance in a verification."""
    patch.setattr(SpeculativeStepper, "_advance", lambda self, batch, found, runs: None)


def takes_in_one_less(patch: pytest.MonkeyPatch) -> None:
    own = SpeculativeStepper._advance

    def late(self: Any, batch: Any, found: Any, runs: Any) -> None:
        own(self, batch, found, type(runs)(mx.maximum(runs.accepted - 1, 0), runs.proposed, runs.roots, runs.lengths))

    patch.setattr(SpeculativeStepper, "_advance", late)


DEFECTS = (takes_in_all, keeps_the_last_tail, stands_still, takes_in_one_less)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda each: each.__name__)
def test_states_that_advance_wrongly_show(
    folder: Path, wanted: Ran, defect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    with opened(folder, wanted, "guessing") as engine:
        found = run(engine)
    assert (
        found.tokens != wanted.tokens
        or max(
            float(np.abs(np.subtract(one, other)).max())
            for one, other in zip(found.logprobs, wanted.logprobs, strict=True)
        )
        > 1e-3
    )
