"""Draft trees of standalone models and of drafts without a KV cache, tested as those of drafts that
read features."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch, StalePlanError
from sglcore.runtime.speculative.make_worker import cells_of_drafts
from sglcore.runtime.speculative.speculation_choice import Speculation
from sglcore.runtime.speculative.tree import Beams
from sglcore.runtime.speculative.tree_drafts import FrozenTreeDrafter, StandaloneTreeDrafter
from sglcore.runtime.speculative.tree_worker import TreeWorker
from sglcore.step.tree_shapes import TreeShape
from tests.checkpoints import llama, save
from tests.drafts import TARGET
from tests.frozen_drafts import frozen
from tests.laws.drafters import make_instead
from tests.laws.engine import TokenEngine, random_prompts
from tests.laws.speculation.test_draft_laws import TOLERANCE
from tests.laws.speculation.test_frozen_laws import FULL, cells_of
from tests.laws.speculation.test_speculative_laws import CONTEXT, VOCABULARY
from tests.laws.speculation.test_tree_laws import DEPTH, FREE, SHAPE, WIDTH, Records, difference, ran
from tests.laws.speculation.texts import SAMPLING, TOKENS, check_same

Made = tuple[Any, Path, Any]
NAMES = {"standalone": "StandaloneTreeDrafter", "frozen-mtp": "FrozenTreeDrafter"}


SOUND: dict[str, Any] = {"standalone": StandaloneTreeDrafter, "frozen-mtp": FrozenTreeDrafter}


class DenseModel:
    """A transformers model that runs each branch from its first token."""

    def __init__(self, oracle: Any) -> None:
        self.oracle = oracle

    @torch.no_grad()
    def propose(self, tokens: list[int], path: list[int]) -> Tensor:
        """Return log-probabilities [vocab] after tokens and a path."""
        return torch.log_softmax(self.oracle(torch.tensor([tokens + path])).logits[0, -1], -1)


def near(target: Any, folder: Path) -> Any:
    """Return a model near the target, so that some of its draft tokens are accepted."""
    draft = llama(**TARGET, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for own, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            own.copy_(theirs + 0.15 * theirs.std().nan_to_num() * torch.randn(theirs.shape, generator=generator))
    save(draft, folder)
    return draft


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """For each kind a target, its folder with a draft in it, and the draft in dense torch."""
    target = llama(**TARGET, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY)
    found = {}
    for kind in NAMES:
        folder = save(target, tmp_path_factory.mktemp(kind))
        if kind == "standalone":
            found[kind] = target, folder, DenseModel(near(target, folder / kind))
        else:
            found[kind] = target, folder, frozen(target, folder / kind, FULL, 12, 12)
    return found


def engine_of(made: dict[str, Made], kind: str, **settings: Any) -> TokenEngine:
    folder = made[kind][1]
    return TokenEngine(folder, speculative=kind, draft_model=str(folder / kind), **settings)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("overlap", [False, True])
def test_trees_change_no_text(made: dict[str, Made], kind: str, graph: str, overlap: bool) -> None:
    plain = ran(TokenEngine(made[kind][1], graph="off"))
    sizes = {"graph_buckets": (1, 2, 5), "graph_token_buckets": (64,)}
    engine = engine_of(made, kind, graph=graph, overlap=overlap, **SHAPE, **sizes)
    assert isinstance(engine.worker, TreeWorker)
    check_same(ran(engine), plain)
    assert graph == "off" or engine.paths - {"eager"}, engine.paths


class RecordedModel(Records, StandaloneTreeDrafter):
    pass


class RecordedFrozen(Records, FrozenTreeDrafter):
    pass


RECORDED = {"standalone": RecordedModel, "frozen-mtp": RecordedFrozen}


def differs(made: dict[str, Made], kind: str, monkeypatch: Any, base: Any = None, **settings: Any) -> float:
    own = {"draft_model": str(made[kind][1] / kind), **settings}
    return difference(made[kind], kind, monkeypatch, base or RECORDED[kind], NAMES[kind], **own)


@pytest.mark.parametrize("kind", NAMES)
def test_beams_are_drawn_of_what_dense_torch_gives_on_their_own_branch(
    made: dict[str, Made], kind: str, graph: str, monkeypatch: Any
) -> None:
    assert differs(made, kind, monkeypatch, graph=graph) < TOLERANCE


@pytest.mark.needs("device")
def test_greedy_trees_take_no_more_steps_than_chains_of_their_depth(made: dict[str, Made]) -> None:
    """All recorded beams are verified, and the chain is one of them."""
    all_of = {"draft_width": 2, "draft_depth": 2, "draft_tokens": 6}
    found = []
    for settings in ({"draft_tokens": 2}, all_of):
        engine = engine_of(made, "standalone", graph="off", overlap=False, **settings)
        texts = ran(engine, [{"temperature": 0.0}] * len(FREE))
        found.append((texts, sum(engine.scheduler.drafts.values())))
    (chains, steps), (trees, fewer) = found
    check_same(trees, chains)
    assert fewer < steps < len(FREE) * (TOKENS - 1)


@pytest.mark.needs("device")
@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize(("samplings", "overlap"), [(FREE, False), (SAMPLING, False), (SAMPLING, True)])
def test_steps_whose_draws_count_the_text_get_chains(
    made: dict[str, Made], kind: str, samplings: Any, overlap: bool, monkeypatch: Any
) -> None:
    """Also, the host's length bound of every draft forward is at least the rows' lengths."""
    chains = list[bool]()

    class Watched(SOUND[kind]):
        def grow(self, rows: Any) -> Any:
            tree = super().grow(rows)
            if rows.is_chain:
                nodes = torch.arange(tree.parents.shape[1], dtype=torch.int32)
                chains.append(bool((tree.parents.cpu() == nodes).all() and (tree.depths.cpu() == nodes + 1).all()))
            return tree

    make_instead(monkeypatch, NAMES[kind], Watched)
    engine: Any = engine_of(made, kind, graph="off", overlap=overlap, **SHAPE)
    runner, forwards = engine.worker.drafter.runner, 0
    own = runner.forward

    def checked(batch: ForwardBatch) -> Any:
        nonlocal forwards
        if batch.forward_mode.is_decode:
            assert (np.asarray(batch.seq_lens.cpu()) <= batch.seq_lens_cpu).all()
            forwards += 1
        return own(batch)

    runner.forward = checked
    check_same(ran(engine, samplings), ran(TokenEngine(made[kind][1], graph="off"), samplings))
    assert bool(chains) == (samplings is SAMPLING)
    assert all(chains) and forwards


@pytest.mark.parametrize(
    ("kind", "lookahead", "cells"), [("eagle3", 1, 12), ("standalone", 0, 13), ("frozen-mtp", 0, 7), ("mtp", 1, 12)]
)
def test_rows_have_cells_for_all_that_a_tree_takes(kind: str, lookahead: int, cells: int) -> None:
    """Three beams, five levels deep, with seven nodes verified."""
    drafter: Any = SimpleNamespace(tokens=7, lookahead=lookahead)
    assert cells_of_drafts(Speculation(kind, (7,), tree=TreeShape(3, 5, 8)), drafter) == cells
    assert not cells_of_drafts(Speculation(kind, (7,)), drafter)


@pytest.mark.needs("device")
def test_a_draft_that_keeps_nothing_writes_to_nobodys_cells(made: dict[str, Made], monkeypatch: Any) -> None:
    class Watched(FrozenTreeDrafter):
        changed = 0

        def grow(self, rows: Any) -> Any:
            before = cells_of(engine.worker)
            found = super().grow(rows)
            same = [torch.equal(one, other) for one, other in zip(before, cells_of(engine.worker), strict=True)]
            Watched.changed += not all(same)
            return found

    monkeypatch.setattr("sglcore.runtime.speculative.kinds.frozen_mtp_steps.FrozenTreeDrafter", Watched)
    engine: Any = engine_of(made, "frozen-mtp", graph="off", **SHAPE)
    engine.run(random_prompts(5, [7]), 10)
    engine.worker.close()
    assert not Watched.changed


class SeesSiblings(RecordedModel):
    def batch(self, *given: Any) -> Any:
        batch, seen = super().batch(*given)
        batch.visible = None
        return batch, seen


class StandsAtItsCell(RecordedModel):
    def batch(self, *given: Any) -> Any:
        batch, seen = super().batch(*given)
        batch.positions = batch.seq_lens - 1
        return batch, seen


class WritesOverTheRoot(RecordedModel):
    """Mutant: uses the KV slots of a draft that reads features."""

    def batch(self, *given: Any) -> Any:
        self.lookahead = 1
        batch, seen = super().batch(*given)
        self.lookahead = 0
        batch.features = None
        return batch, seen


class SeesItsParentsSibling(RecordedModel):
    def batch(self, rows: Any, beams: Beams, depth: int, hidden: Tensor, seen: Any) -> Any:
        return super().batch(rows, beams, depth, hidden, None if seen is None else seen.roll(1, 1))


class MovesOn(RecordedFrozen):
    """Mutant: a beam has the position after the root instead of the root's."""

    def batch(self, *given: Any) -> ForwardBatch:
        batch = super().batch(*given)
        batch.positions = batch.positions + 1
        return batch


class ReadsAnotherBeam(RecordedFrozen):
    def batch(self, *given: Any) -> ForwardBatch:
        batch = super().batch(*given)
        assert batch.features is not None
        batch.features = batch.features.roll(1, 0)
        return batch


class KeepsItsParentsFeature(RecordedFrozen):
    """Mutant: uses the first beams' features at every depth."""

    kept: Tensor | None = None

    def batch(self, before: Any, beams: Any, depth: int, hidden: Tensor) -> ForwardBatch:
        batch = super().batch(before, beams, depth, hidden)
        self.kept = batch.features if depth == 2 else self.kept
        batch.features = self.kept
        return batch


MODEL_DEFECTS = (SeesSiblings, StandsAtItsCell, WritesOverTheRoot, SeesItsParentsSibling)
FROZEN_DEFECTS = (MovesOn, ReadsAnotherBeam, KeepsItsParentsFeature)


@pytest.mark.needs("device")
@pytest.mark.parametrize("defect", [*MODEL_DEFECTS, *FROZEN_DEFECTS])
def test_a_defect_of_a_beam_shows(made: dict[str, Made], defect: Any, monkeypatch: Any) -> None:
    kind = "standalone" if defect in MODEL_DEFECTS else "frozen-mtp"
    assert differs(made, kind, monkeypatch, defect, graph="off") > 0.01


class PlansForOne(FrozenTreeDrafter):
    def planned(self, batch: ForwardBatch, steps: int) -> ForwardBatch:
        return super().planned(batch, 1)


@pytest.mark.needs("device")
def test_one_plan_serves_all_forwards_of_beams(made: dict[str, Made], monkeypatch: Any) -> None:
    assert DEPTH > 2 and WIDTH > 1
    monkeypatch.setattr("sglcore.runtime.speculative.kinds.frozen_mtp_steps.FrozenTreeDrafter", PlansForOne)
    engine = engine_of(made, "frozen-mtp", graph="off", **SHAPE)
    with pytest.raises(StalePlanError, match="planned for 1 forwards, this is one more"):
        engine.run(random_prompts(5, [7]), 10)
    engine.worker.close()
