"""Tests with the draft models of the embedded model: tokens and log-probabilities are those of
plain decode, and acceptance is that of the processor's device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.parity import TokenEngine
from devices.mlx.tests.running import running
from devices.mlx.tests.speculating import SAMPLING, AtRandom, Ran, check_same, run
from devices.mlx.tests.test_in_place import bytes_beside
from devices.mlx.tests.test_speculative import constrain
from sglcore.engine.start import embedded_model
from sglcore_mlx.speculative import draft_stepper as module
from sglcore_mlx.speculative.draft_stepper import DraftStepper
from sglcore_mlx.speculative.drafter import Roots
from sglcore_mlx.speculative.worker import SpeculativeWorker

KINDS = ("eagle3", "mtp-layers", "dflash", "standalone")
VOCAB = 1024
SETTINGS: Mapping[str, Any] = MappingProxyType(
    {"page_size": 4, "kv_cache_memory": 4 << 20, "max_requests": len(SAMPLING), "max_model_len": 128}
)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [[*rng.integers(300, VOCAB, 5 + 6 * index).tolist()] for index in range(len(SAMPLING))]


def opened(kind: str, **settings: Any) -> TokenEngine:
    """Start the embedded model with one of its drafts, or with itself as the draft."""
    where = {"mtp-layers": {"draft_model": "mtp-layers"}, "standalone": {"draft_model": str(embedded_model())}}
    given = {"draft_tokens": 4, "poison": True, **SETTINGS, **where.get(kind, {}), **settings}
    return TokenEngine(embedded_model(), speculative=kind.partition("-")[0], **given)


@pytest.fixture(scope="module")
def plain() -> Iterator[TokenEngine]:
    """An engine without speculation."""
    with TokenEngine(embedded_model(), **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def wanted(plain: TokenEngine) -> Ran:
    """The results without speculation."""
    return run(plain, prompts())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graph", ["off", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_changes_no_text(wanted: Ran, kind: str, graph: str, overlap: bool) -> None:
    with opened(kind, graph=graph) as engine:
        found = run(engine, prompts(), overlap=overlap, stagger=2, chunk=16)
    check_same(found, wanted)
    assert 0 < found.accepted < found.proposed


@pytest.mark.parametrize("kind", KINDS)
def test_neither_retraction_nor_cached_pages_nor_other_lengths_change_one(wanted: Ran, kind: str) -> None:
    with opened(kind) as engine:
        assert isinstance(engine.worker, SpeculativeWorker)
        engine.worker.length = AtRandom(4)
        session = engine.session(pages=56)
        for hits in (False, True):
            found = run(engine, prompts(), session=session)
            check_same(found, wanted)
            assert (found.hits > 0) >= hits
    assert found.retractions > 0


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_grammar_and_a_draft_change_none(plain: TokenEngine, kind: str) -> None:
    bound = run(plain, prompts(), prepare=constrain)
    with opened(kind) as engine:
        check_same(run(engine, prompts(), prepare=constrain), bound)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_what_is_proposed_and_right_is_what_it_is_on_the_processors_device(kind: str) -> None:
    found: list[Ran] = []
    for device in ("mlx", "cpu"):
        with opened(kind, device=device) as engine:
            found.append(run(engine, prompts(), overlap=False))
    mine, theirs = found
    assert mine.tokens == theirs.tokens
    # Two draft tokens that are equally likely to within float32's rounding may be exchanged.
    assert abs(mine.accepted - theirs.accepted) <= 2 and abs(mine.decodes - theirs.decodes) <= 2
    assert mine.accepted > 40


class _Copies(DraftStepper):
    """Makes the draft's KV cache of a layer again, while something still holds it."""

    def _store(self, slots: mx.array, *given: Any) -> None:
        super()._store(slots, *given)
        nothing = mx.minimum(mx.max(self._drafts.proposals), 0).astype(mx.float32)
        self._held = self._state.draft_cells[0]
        self._state.draft_cells[0] = self._held + nothing


CELLS = 96 << 20


@pytest.mark.parametrize("graph", ["off", "compiled"])
def test_steps_with_a_draft_copy_no_cells(graph: str) -> None:
    with running(speculative="eagle3", draft_tokens=4, kv_cache_memory=CELLS, dtype="float32", graph=graph) as built:
        layer = built["pools"].draft_cells[0].nbytes
        assert layer > 8 << 20
        assert bytes_beside(built, prompts=3) < layer


def test_a_copy_of_the_cells_of_a_draft_is_seen() -> None:
    with running(speculative="eagle3", draft_tokens=4, kv_cache_memory=CELLS, dtype="float32", graph="off") as built:
        built["worker"]._stepper.__class__ = _Copies
        assert bytes_beside(built, prompts=3) > built["pools"].draft_cells[0].nbytes


def test_draft_tokens_that_are_drawn_with_other_noise_are_accepted_less_often(
    wanted: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is the same; only acceptance shows it."""
    with opened("eagle3") as engine:
        right = run(engine, prompts(), overlap=False)
    monkeypatch.setattr(module, "Roots", lambda ids, lengths: Roots(ids, lengths + 1))
    with opened("eagle3") as engine:
        found = run(engine, prompts(), overlap=False)
    check_same(found, wanted)
    assert found.accepted < 0.9 * right.accepted
