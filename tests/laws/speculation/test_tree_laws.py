"""Draft trees in whole engines: they change no text, an accepted path saves its steps, and beams
are drawn from the distribution of dense torch on their own branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sglcore.core.errors import ConfigError
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.speculative import tree_worker
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.runtime.speculative.tree import Beams, DraftTree
from sglcore.runtime.speculative.tree_drafts import TreeDrafter
from sglcore.runtime.speculative.tree_worker import TreeWorker
from tests.checkpoints import llama, save
from tests.drafts import TARGET, DenseDraft, eagle, eagle3, next_token
from tests.laws.drafters import make_instead
from tests.laws.engine import TokenEngine, random_prompts
from tests.laws.speculation import test_speculative_grammar as grammars
from tests.laws.speculation import test_speculative_laws as laws
from tests.laws.speculation.test_draft_laws import TOLERANCE, features_of
from tests.laws.speculation.test_speculative_laws import CONTEXT, PROMPTS, VOCABULARY
from tests.laws.speculation.texts import SAMPLING, TOKENS, Ran, check_same
from tests.laws.trees import TREES

NODES, DEPTH, WIDTH = 8, 3, 3
FREE = (*SAMPLING[:3], {"temperature": 1.0, "seed": 7}, SAMPLING[4])
"""No request uses penalties."""
SHAPE = {"draft_width": WIDTH, "draft_depth": DEPTH, "draft_tokens": NODES - 1}
Engines = Callable[..., TokenEngine]
Branch = Callable[[int, list[int]], Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a draft."""
    target = llama(**TARGET, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY)
    folder = save(target, tmp_path_factory.mktemp("trees"))
    eagle(target, folder / "draft")
    return folder


def ran(engine: TokenEngine, samplings: Sequence[dict[str, Any]] = FREE, **given: Any) -> Ran:
    """Run all prompts, then close the engine."""
    try:
        return laws.run(engine, samplings=samplings, **given)
    finally:
        engine.worker.close()


@pytest.fixture(scope="module")
def plain(folder: Path) -> Ran:
    """The results without draft tokens."""
    return ran(TokenEngine(folder, graph="off"))


@pytest.fixture
def engines(folder: Path) -> Engines:
    """Make engines that draft trees, with the checkpoint's own draft or with a drafter that knows
    the texts."""

    def make(drafter: str, texts: Ran, **settings: Any) -> TokenEngine:
        given = {"graph_buckets": (1, 2, 5), "graph_token_buckets": (64,), **SHAPE, **settings}
        engine = TokenEngine(folder, speculative="eagle", **given)
        worker: Any = engine.worker
        assert isinstance(worker, TreeWorker)
        if drafter != "eagle":
            whole = [prompt + output for prompt, output in zip(PROMPTS, texts.tokens, strict=True)]
            worker.drafter = TREES[drafter](worker.shape.nodes, worker.shape.depth, whole, VOCABULARY)
        return engine

    return make


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafter", ["eagle", *TREES])
def test_trees_change_no_text(engines: Engines, plain: Ran, drafter: str, graph: str, overlap: bool) -> None:
    engine = engines(drafter, plain, graph=graph, overlap=overlap)
    check_same(ran(engine), plain)
    assert graph == "off" or engine.paths - {"eager"}, engine.paths


@pytest.mark.needs("device")
@pytest.mark.parametrize(("page_size", "shape"), [(1, (2, 1, 3)), (4, (2, 4, 6)), (16, (4, 2, 13)), (4, (3, 5, 32))])
def test_neither_pages_nor_the_shape_of_trees_change_a_text(
    engines: Engines, plain: Ran, page_size: int, shape: tuple[int, int, int]
) -> None:
    width, depth, nodes = shape
    given = {"draft_width": width, "draft_depth": depth, "draft_tokens": nodes - 1}
    settings = {"graph": "off", "page_size": page_size, "max_batch_tokens": 16, "poison": True}
    for drafter in ("eagle", "guessing"):
        check_same(ran(engines(drafter, plain, **given, **settings)), plain)


@pytest.mark.needs("device")
def test_trees_in_two_halves_change_no_text(engines: Engines, plain: Ran) -> None:
    engine = engines("guessing", plain, graph="off", two_batch_overlap="on")
    check_same(ran(engine), plain)
    assert "eager:halves" in engine.paths


@pytest.mark.needs("device")
def test_a_right_path_saves_its_steps_and_no_right_node_saves_none(engines: Engines, plain: Ran) -> None:
    decodes = {name: ran(engines(name, plain, graph="off", overlap=False)).decodes for name in TREES}
    # A prefill step draws the first token. At the end of a text there are KV slots for its tokens
    # only, not for all nodes of a tree.
    assert 0 <= decodes["oracle"] - 1 - -(-(TOKENS - 1) // (DEPTH + 1)) <= 1
    assert decodes["adversary"] == TOKENS
    assert decodes["oracle"] < decodes["guessing"] < decodes["adversary"]


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
def test_steps_whose_draws_count_the_text_verify_chains(engines: Engines, folder: Path, overlap: bool) -> None:
    wanted = ran(TokenEngine(folder, graph="off"), SAMPLING)
    for drafter in ("eagle", "guessing", "oracle"):
        check_same(ran(engines(drafter, wanted, graph="off", overlap=overlap), SAMPLING), wanted)


@pytest.mark.needs("device")
def test_a_request_that_counts_its_text_may_join_trees_and_leave(engines: Engines, folder: Path) -> None:
    """The request joins while trees are drafted, and leaves while chains are drafted."""
    found = []
    for engine in (TokenEngine(folder, graph="off"), None):
        proposing = engine or engines("guessing", found[0], graph="off", max_requests=3)
        found.append(ran(proposing, (*FREE[:3], SAMPLING[3], FREE[4])))
    check_same(found[1], found[0])


@pytest.mark.needs("device")
@pytest.mark.parametrize("drafter", ["eagle", "guessing"])
def test_grammars_beside_trees_change_no_text(engines: Engines, folder: Path, drafter: str) -> None:
    found = []
    for overlap in (None, False, True):
        settings = {"graph": "off", "overlap": overlap}
        engine = engines(drafter, found[0], **settings) if found else TokenEngine(folder, graph="off")
        found.append(grammars.run(engine))
        engine.worker.close()
        check_same(found[-1], found[0])


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_cache_that_holds_no_two_texts_changes_none(engines: Engines, plain: Ran, overlap: bool) -> None:
    settings = {"kv_cache_memory": 160 << 10, "max_model_len": 80}
    engine = engines("guessing", plain, graph="off", overlap=overlap, **settings)
    check_same(ran(engine), plain)
    assert engine.scheduler.stats().retractions > 0


class Grown(NamedTuple):
    """One tree of a text: `cells` KV slots used, `limit` of its pages, and for each beam its path
    and log-probabilities."""

    cells: int
    limit: int
    beams: list[tuple[list[int], Tensor]]


class Records:
    """A tree drafter that records its distributions, for one text at a time."""

    steps: list[Grown]
    paths: list[list[int]]

    def grow(self, rows: DraftRows) -> DraftTree:
        rank, self.paths, beams = rows.rank, [[]], list[tuple[list[int], Tensor]]()
        assert rank is not None

        def remember(logits: Tensor, depth: int, count: int) -> tuple[Tensor, Tensor]:
            beams.extend(zip(self.paths, torch.log_softmax(logits.cpu(), -1), strict=True))
            return rank(logits, depth, count)

        rows.rank = remember
        found = super().grow(rows)  # type: ignore[misc]
        if beams:
            self.steps.append(Grown(int(rows.lengths[0]), int(rows.limits[0]), beams))
        return found

    def batch(self, first: Any, beams: Beams, *given: Any) -> Any:
        pairs = zip(beams.origins[0].tolist(), beams.tokens[0].tolist(), strict=True)
        self.paths = [[*self.paths[origin], token] for origin, token in pairs]
        return super().batch(first, beams, *given)  # type: ignore[misc]


class RecordingTrees(Records, TreeDrafter):
    """Recording for drafts that read features."""


def by_dense(target: Any, dense: Any, kind: str, tokens: list[int]) -> Branch:
    """Return a function of a number of KV slots and a path: the log-probabilities [vocab] after
    them."""
    if kind == "standalone":
        return lambda cells, path: dense.propose(tokens[: cells + 1], path)
    if kind == "frozen-mtp":
        return lambda cells, path: dense.propose(tokens[:cells], tokens[cells], path)[-1]
    features = features_of(target, tokens, kind)
    return lambda cells, path: dense.propose(tokens[1 : cells + 1], features[:cells], path)[-1]


def furthest(branch: Branch, tokens: list[int], steps: Sequence[Grown]) -> float:
    """Return the largest difference of log-probabilities, over all beams of trees with all their KV
    slots."""
    worst, compared = 0.0, 0
    for cells, limit, beams in steps:
        if cells >= len(tokens) or cells + 1 + WIDTH * (DEPTH - 1) > limit:
            continue
        for path, logprobs in beams:
            wanted = branch(cells, path)
            assert torch.equal(logprobs.isinf(), wanted.isinf())
            worst, compared = max(worst, float((logprobs - wanted).nan_to_num().abs().max())), compared + 1
    assert compared > 20
    return worst


def difference(
    made: tuple[Any, Path, Any],
    kind: str,
    monkeypatch: Any,
    base: Any = RecordingTrees,
    name: str = "TreeDrafter",
    **settings: Any,
) -> float:
    """Run three texts with one engine, the second with the prefix of the first; returns the largest
    difference."""
    target, folder, dense = made
    make_instead(monkeypatch, name, base)
    given = {"max_batch_tokens": 8, "scramble_pages": 2, **SHAPE, **settings}
    engine = TokenEngine(folder, speculative=kind, **given)
    worker: Any = engine.worker
    worker.drafter.steps = []
    first, other = random_prompts(5, [21, 6])
    worst = 0.0
    try:
        for prompt in (first, [*first[:18], 3], other):
            worker.drafter.steps.clear()
            (result,) = engine.run([prompt], 16, temperature=1.0)
            tokens = prompt + result.tokens
            worst = max(worst, furthest(by_dense(target, dense, kind, tokens), tokens, worker.drafter.steps))
        assert engine.scheduler.stats().hit_tokens > 0
    finally:
        engine.worker.close()
    return worst


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path, DenseDraft]]:
    """For each kind a target by transformers, its folder, and its draft in dense torch."""
    made, target = {}, llama(**TARGET)
    for kind, make in (("eagle", eagle), ("eagle3", eagle3)):
        folder = save(target, tmp_path_factory.mktemp(kind))
        made[kind] = target, folder, make(target, folder / "draft")
    folder = tmp_path_factory.mktemp("mtp")
    made["mtp"] = target, folder, next_token(target, folder, llama)
    return made


@pytest.mark.needs("device")
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_beams_are_drawn_of_what_dense_torch_gives_on_their_own_branch(
    drafts: Any, kind: str, monkeypatch: Any
) -> None:
    assert difference(drafts[kind], kind, monkeypatch, graph="off") < TOLERANCE


def test_beams_in_graphs_are_too(drafts: Any, graph: str, monkeypatch: Any) -> None:
    assert difference(drafts["eagle3"], "eagle3", monkeypatch, graph=graph) < TOLERANCE


class SeesSiblings(RecordingTrees):
    def batch(self, *given: Any) -> tuple[ForwardBatch, Tensor]:
        batch, seen = super().batch(*given)
        batch.visible = None
        return batch, seen


class StandsAtItsCell(RecordingTrees):
    def batch(self, *given: Any) -> tuple[ForwardBatch, Tensor]:
        batch, seen = super().batch(*given)
        batch.positions = batch.seq_lens - 1
        return batch, seen


class ReadsAnotherBeam(RecordingTrees):
    def batch(self, rows: Any, beams: Beams, *given: Any) -> tuple[ForwardBatch, Tensor]:
        batch, seen = super().batch(rows, beams, *given)
        assert batch.features is not None
        batch.features = batch.features.roll(1, 0)
        return batch, seen


class SeesItsParentsSibling(RecordingTrees):
    def batch(self, rows: Any, beams: Beams, depth: int, hidden: Tensor, seen: Tensor | None) -> Any:
        return super().batch(rows, beams, depth, hidden, None if seen is None else seen.roll(1, 1))


@pytest.mark.needs("device")
@pytest.mark.parametrize("defect", [SeesSiblings, StandsAtItsCell, ReadsAnotherBeam, SeesItsParentsSibling])
def test_a_defect_of_a_beam_shows(drafts: Any, defect: Any, monkeypatch: Any) -> None:
    assert difference(drafts["eagle"], "eagle", monkeypatch, defect, graph="off") > 0.01


class MovesNothing(TreeWorker):
    def _decided(self, *given: Any) -> Any:
        kept, tree_worker.move_path = tree_worker.move_path, lambda *_: None
        try:
            return super()._decided(*given)
        finally:
            tree_worker.move_path = kept


class StandsAtCells(TreeWorker):
    def _place(self, staged: ForwardBatch, *given: Any) -> None:
        super()._place(staged, *given)
        staged.positions.copy_(staged.seq_lens - 1)


class DrawsAtCells(TreeWorker):
    def _ends(self, staged: ForwardBatch) -> Tensor:
        return staged.seq_lens


class SeesAll(TreeWorker):
    def _place(self, staged: ForwardBatch, *given: Any) -> None:
        super()._place(staged, *given)
        assert staged.visible is not None
        staged.visible.fill_(-1)


class NeverAChain(TreeWorker):
    def _is_chain(self, batch: Any) -> bool:
        return False


class TreesOfTheNextSlot(TreeWorker):
    def _walk(self, *given: Any) -> Any:
        kept = self._trees.held
        self._trees.held = kept.roll(1, 1)
        try:
            return super()._walk(*given)
        finally:
            self._trees.held = kept


class RowsAsTheyWere(TreeWorker):
    def _walk(self, *given: Any) -> Any:
        runs, path = super()._walk(*given)
        return runs, torch.arange(path.shape[1], dtype=torch.int32, device=path.device).expand_as(path)


@pytest.mark.needs("device")
@pytest.mark.parametrize(
    "defect",
    [MovesNothing, StandsAtCells, DrawsAtCells, SeesAll, NeverAChain, TreesOfTheNextSlot, RowsAsTheyWere],
)
def test_a_defect_where_trees_are_verified_shows(engines: Engines, folder: Path, defect: Any, monkeypatch: Any) -> None:
    samplings = SAMPLING if defect is NeverAChain else FREE
    wanted = ran(TokenEngine(folder, graph="off"), samplings)
    sound = ran(engines("guessing", wanted, graph="off", overlap=False), samplings)
    monkeypatch.setattr("sglcore.runtime.speculative.make_worker.TreeWorker", defect)
    with pytest.raises(AssertionError):
        found = ran(engines("guessing", wanted, graph="off", overlap=False), samplings)
        check_same(found, wanted)
        assert found.decodes == sound.decodes


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"draft_width": 2, "draft_depth": 3, "draft_tokens": 2},
            "3 deep has 3 to 31 tokens, and 2 are requested; .*--draft-tokens or",
        ),
        ({"draft_width": 2, "draft_depth": 2, "draft_tokens": 7}, "record 6 tokens, and 7 are requested"),
        ({"draft_width": 16, "draft_depth": 4}, "write 48 KV slots, and at most 32"),
        ({"draft_width": 2, "speculative_verify": "block"}, "the rule is 'block', and these accept only chains"),
        ({"draft_width": 2, "speculative": "ngram"}, "drafts of 'ngram' are chains"),
        ({"draft_width": 2, "speculative": None}, "speculative is 'not asked', which drafts no tokens"),
        ({"draft_depth": 3}, "draft_depth applies to trees"),
    ],
)
def test_what_can_not_be_a_tree_is_refused_by_name(folder: Path, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        TokenEngine(folder, **{"speculative": "eagle", **settings})


@pytest.mark.needs("device")
def test_a_model_with_windows_verifies_no_trees(tmp_path: Path) -> None:
    from tests.checkpoints import mistral

    target = mistral(sliding_window=8)
    folder = save(target, tmp_path)
    with pytest.raises(ConfigError, match="draft_width is 2, and this model keeps sliding windows.*--draft-width 1"):
        TokenEngine(folder, speculative="eagle", draft_model=str(tmp_path), draft_width=2)
