"""Properties of trees that texts do not show: requests in a batch grow separate trees, KV slots and
length bounds of drafts are correct, and so are the reported counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.conformance.inputs.hashed_grammar import HashedMatcher
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.speculative.drafter import NONE, DraftRows
from sglcore.runtime.speculative.tree import Beams, DraftTree
from sglcore.runtime.speculative.tree_drafts import TreeDrafter
from sglcore.runtime.speculative.tree_worker import TreeWorker
from sglcore.schedule.request import Request
from sglcore.schedule.running_requests import RunningRequests
from tests.checkpoints import llama, save
from tests.drafts import TARGET, eagle
from tests.laws.engine import TokenEngine
from tests.laws.speculation import test_speculative_laws as laws
from tests.laws.speculation.test_speculative_grammar import GRAMMARS
from tests.laws.speculation.test_speculative_laws import CONTEXT, PROMPTS, VOCABULARY
from tests.laws.speculation.test_tree_laws import DEPTH, FREE, SHAPE, WIDTH
from tests.laws.speculation.texts import SAMPLING, TOKENS, check_same
from tests.laws.trees import TREES, GrowingTrees

Path_ = tuple[int, ...]
Drawn = dict[int, tuple[list[int], list[int], list[int]]]
"""The tree at each length of a text: tokens, parents and depths."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a draft."""
    target = llama(**TARGET, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY)
    folder = save(target, tmp_path_factory.mktemp("trees"))
    eagle(target, folder / "draft")
    return folder


class CheckedTrees(TreeDrafter):
    """Checks every forward, and records the trees of each request slot. Waits for the device."""

    grown: dict[int, Drawn]
    chains = outside = 0
    """Number of steps with chains, and of rows without a KV slot."""
    lacking: set[tuple[int, int]]
    """Request slots and lengths of trees that had a beam without KV slots."""

    def grow(self, rows: DraftRows) -> DraftTree:
        rank, limits = rows.rank, rows.limits.tolist()
        assert rank is not None
        self.check(rows.batch, rows.limits.repeat_interleave(rows.width) if rows.batch.width else None)
        self.paths: list[list[Path_]] = [[()] for _ in limits]
        followed: list[set[Path_]] = [set() for _ in limits]

        def checked(logits: Tensor, depth: int, count: int) -> tuple[Tensor, Tensor]:
            tokens, scores = rank(logits, depth, count)
            each = len(self.paths[0])
            firsts = [rows.draw(one, depth) for one in logits.view(len(limits), each, -1).unbind(1)]
            assert torch.equal(torch.stack(firsts, 1).flatten(), tokens[:, 0]), "the first of a race is what is drawn"
            for row, leaders in enumerate(tokens.view(len(limits), each, count).tolist()):
                for path, own in zip(self.paths[row], leaders, strict=True):
                    followed[row] |= {(*path, token) for token in own}
            return tokens, scores

        rows.rank = checked
        tree = super().grow(rows)
        if rows.is_chain:
            self.chains += 1
            assert (tree.depths == torch.arange(1, tree.depths.shape[1] + 1, device=tree.depths.device)).all()
            return tree
        parts = [part.tolist() for part in tree]
        for row, (slot, length) in enumerate(zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)):
            tokens, parents, depths = (part[row] for part in parts)
            paths: list[Path_] = [()]
            for token, parent, depth in zip(tokens, parents, depths, strict=True):
                paths.append((*paths[parent], token))
                assert len(paths[-1]) == depth
                assert token == NONE or paths[-1] in followed[row], "a node grew from its parent's beam"
            if length + WIDTH * (DEPTH - 1) <= limits[row]:
                self.grown.setdefault(slot, {})[length] = tokens, parents, depths
            else:
                self.lacking.add((slot, length))
        return tree

    def batch(self, rows: DraftRows, beams: Beams, *given: Any) -> tuple[ForwardBatch, Tensor]:
        pairs = zip(beams.origins.tolist(), beams.tokens.tolist(), strict=True)
        self.paths = [
            [(*self.paths[row][origin], token) for origin, token in zip(*pair, strict=True)]
            for row, pair in enumerate(pairs)
        ]
        batch, seen = super().batch(rows, beams, *given)
        self.check(batch, rows.limits.repeat_interleave(beams.tokens.shape[1]))
        return batch, seen

    def check(self, batch: ForwardBatch, limits: Tensor | None) -> None:
        """Every decode row has a KV slot in its pages or is in request slot 0, and its length is at
        most the host's bound."""
        if limits is None:
            return
        slots, lens, bounds = batch.req_pool_indices, batch.seq_lens, batch.seq_lens_cpu
        is_outside = slots == 0
        assert (is_outside | (lens <= limits)).all()
        assert (lens[is_outside] == 1).all()
        assert (batch.positions[is_outside] == 0).all()
        assert bounds is not None
        assert (np.asarray(lens.cpu()) <= bounds).all()
        assert bounds.max() <= self.runner.attn_backend.req_to_token_pool.max_tokens
        self.outside += int(is_outside.sum())


def grown(folder: Path, prompts: list[list[int]], samplings: Any, monkeypatch: Any, **settings: Any) -> CheckedTrees:
    """Return the drafter after these prompts have run."""
    monkeypatch.setattr("sglcore.runtime.speculative.kinds.eagle_steps.TreeDrafter", CheckedTrees)
    engine = TokenEngine(folder, speculative="eagle", graph="off", **{**SHAPE, **settings})
    worker: Any = engine.worker
    worker.drafter.grown, worker.drafter.lacking = {}, set()
    try:
        laws.run(engine, prompts, samplings=samplings)
    finally:
        engine.worker.close()
    return worker.drafter


@pytest.mark.needs("device")
def test_many_requests_grow_the_trees_that_each_grows_alone(folder: Path, monkeypatch: Any) -> None:
    together = grown(folder, PROMPTS, FREE, monkeypatch, overlap=False).grown
    of_prompts = {min(trees): trees for trees in together.values()}
    for prompt, sampling in zip(PROMPTS, FREE, strict=True):
        (alone,) = grown(folder, [prompt], [sampling], monkeypatch, overlap=False).grown.values()
        assert len(alone) > 5
        assert of_prompts[len(prompt)] == alone


def ends(drafter: CheckedTrees) -> dict[int, int]:
    """Return by request slot the length of a text with its last token as root."""
    prompts = {len(prompt) for prompt in PROMPTS}
    return {slot: min(prompts & set(trees)) + TOKENS - 1 for slot, trees in drafter.grown.items()}


@pytest.mark.needs("device")
@pytest.mark.parametrize(("page_size", "nodes"), [(1, 8), (4, 3 + 1)])
def test_beams_have_cells_as_long_as_a_text_goes_on(folder: Path, monkeypatch: Any, page_size: int, nodes: int) -> None:
    """Holds for any number of verified nodes."""
    given = {"overlap": False, "page_size": page_size, "draft_tokens": nodes - 1}
    found = grown(folder, PROMPTS, FREE, monkeypatch, **given)
    last = ends(found)
    assert len(last) == len(PROMPTS)
    assert not [(slot, length) for slot, length in found.lacking if length < last[slot]]


class ReachesTheEnd(RunningRequests):
    """Mutant: requests have no KV slots after their last token."""

    def _start(self, request: Request) -> None:
        super()._start(request)
        request.run.most_cells = request.run.final_seq_len


class ReachesAsManyAsTokens(RunningRequests):
    """Mutant: reserves no pages for beams."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.reach = 1 + self._limits.draft_tokens


@pytest.mark.needs("device")
@pytest.mark.parametrize("defect", [ReachesTheEnd, ReachesAsManyAsTokens])
def test_cells_that_are_missing_show(folder: Path, monkeypatch: Any, defect: Any) -> None:
    monkeypatch.setattr("sglcore.schedule.scheduler.RunningRequests", defect)
    with pytest.raises(AssertionError):
        test_beams_have_cells_as_long_as_a_text_goes_on(folder, monkeypatch, 1, 4)


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "settings", [{"max_model_len": 64, "max_batch_tokens": 16}, {"max_model_len": 80, "kv_cache_memory": 160 << 10}]
)
def test_drafts_write_no_cells_but_their_own(
    folder: Path, monkeypatch: Any, overlap: bool, settings: dict[str, int]
) -> None:
    assert grown(folder, PROMPTS, FREE, monkeypatch, overlap=overlap, **settings).outside


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
def test_beams_of_few_candidates_have_gaps_and_change_no_text(folder: Path, monkeypatch: Any, overlap: bool) -> None:
    """Trees contain nodes without a token between others."""
    samplings = [{**each, "top_k": 2} if each["temperature"] else each for each in FREE]
    plain = TokenEngine(folder, graph="off")
    texts = laws.run(plain, samplings=samplings)
    plain.worker.close()
    monkeypatch.setattr("sglcore.runtime.speculative.kinds.eagle_steps.TreeDrafter", CheckedTrees)
    given = {**SHAPE, "draft_tokens": 16}
    engine = TokenEngine(folder, speculative="eagle", graph="off", overlap=overlap, **given)
    worker: Any = engine.worker
    worker.drafter.grown, worker.drafter.lacking = {}, set()
    check_same(laws.run(engine, samplings=samplings), texts)
    engine.worker.close()
    trees = [tokens for slot in worker.drafter.grown.values() for tokens, *_ in slot.values()]
    assert any(NONE in tokens[: tokens.index(max(tokens))] for tokens in trees)


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
def test_grammars_of_texts_that_nothing_counts_have_chains(folder: Path, overlap: bool) -> None:
    """No other request needs chains, and grammars allow most wrong tokens."""

    def prepare(requests: list[Request]) -> None:
        for request, seed in zip(requests, GRAMMARS, strict=True):
            request.matcher = None if seed is None else HashedMatcher(seed, VOCABULARY, 0.8)

    plain = TokenEngine(folder, graph="off")
    texts = laws.run(plain, samplings=FREE, prepare=prepare)
    plain.worker.close()
    engine = TokenEngine(folder, speculative="eagle", graph="off", overlap=overlap, **SHAPE)
    worker: Any = engine.worker
    whole = [prompt + output for prompt, output in zip(PROMPTS, texts.tokens, strict=True)]
    worker.drafter = TREES["guessing"](worker.shape.nodes, DEPTH, whole, VOCABULARY)
    check_same(laws.run(engine, samplings=FREE, prepare=prepare), texts)
    engine.worker.close()


@pytest.mark.needs("device")
def test_what_counts_its_text_is_proposed_chains_by_the_draft_itself(folder: Path, monkeypatch: Any) -> None:
    assert grown(folder, PROMPTS, SAMPLING, monkeypatch, overlap=False).chains


class Counted(TreeWorker):
    """Counts each step's draft tokens in plain Python, and checks rows and lengths."""

    offered: list[int]

    def _place(self, staged: ForwardBatch, *given: Any) -> None:
        super()._place(staged, *given)
        is_outside = staged.req_pool_indices == 0
        assert (staged.seq_lens[is_outside] == 1).all()
        assert (staged.positions[is_outside] == 0).all()
        assert (staged.positions < staged.seq_lens).all()

    def _walk(self, staged: ForwardBatch, rows: Any, sampled: Any, steps: int) -> Any:
        before, width = self._lengths[rows.slots], staged.num_tokens // len(rows.slots)
        proposals = self._proposals[rows.slots].tolist()
        cells = zip(proposals, before.tolist(), rows.limits.tolist(), strict=True)
        wanted = [
            sum(token != NONE and at + n < limit for n, token in enumerate(own[: width - 1], 1))
            for own, at, limit in cells
        ]
        runs, path = super()._walk(staged, rows, sampled, steps)
        assert runs[1].tolist() == wanted
        assert (runs[0] <= runs[1]).all()
        assert torch.equal(runs[3], (before + runs[0] + 1).minimum(rows.limits.maximum(before)))
        assert torch.equal(self._lengths[rows.slots], runs[3])
        self.offered += wanted
        return runs, path


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_told_of_proposals_is_what_had_cells(folder: Path, monkeypatch: Any, overlap: bool) -> None:
    plain = TokenEngine(folder, graph="off")
    texts = laws.run(plain, samplings=FREE)
    plain.worker.close()
    monkeypatch.setattr("sglcore.runtime.speculative.make_worker.TreeWorker", Counted)
    engine = TokenEngine(folder, speculative="eagle", graph="off", overlap=overlap, max_model_len=64, **SHAPE)
    worker: Any = engine.worker
    worker.offered = []
    whole = [prompt + output for prompt, output in zip(PROMPTS, texts.tokens, strict=True)]
    worker.drafter = TREES["oracle"](worker.shape.nodes, DEPTH, whole, VOCABULARY)
    check_same(laws.run(engine, samplings=FREE), texts)
    engine.worker.close()
    assert min(worker.offered) < max(worker.offered)


class Spoiled(GrowingTrees):
    """Uses `token`, with a NaN embedding, as the wrong token, unless it is already taken."""

    token: int

    def _wrong(self, taken: set[int]) -> int:
        return super()._wrong(taken) if self.token in taken else self.token


@pytest.mark.parametrize("overlap", [False, True])
def test_a_wrong_node_without_numbers_spoils_no_other(tmp_path: Path, graph: str, overlap: bool) -> None:
    target = llama(**TARGET, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY, tie_word_embeddings=False)
    plain = TokenEngine(save(target, tmp_path / "sound"), graph="off")
    texts = laws.run(plain, samplings=FREE)
    plain.worker.close()
    whole = [prompt + output for prompt, output in zip(PROMPTS, texts.tokens, strict=True)]
    token = next(token for token in range(VOCABULARY) if all(token not in text for text in whole))
    target.model.embed_tokens.weight.data[token] = torch.nan
    folder = save(target, tmp_path / "spoiled")
    eagle(target, folder / "draft")
    engine = TokenEngine(folder, speculative="eagle", graph=graph, overlap=overlap, **SHAPE)
    worker: Any = engine.worker
    worker.drafter = Spoiled(worker.shape.nodes, DEPTH, whole, VOCABULARY)
    worker.drafter.token = token
    check_same(laws.run(engine, samplings=FREE), texts)
    engine.worker.close()


class Chained(TreeDrafter):
    """Records the lengths of the chains that it drafts."""

    lengths: set[int]

    def grow(self, rows: DraftRows) -> DraftTree:
        tree = super().grow(rows)
        if rows.is_chain:
            self.lengths |= {*(tree.tokens != NONE).sum(1).tolist()}
        return tree


@pytest.mark.needs("device")
def test_chains_in_place_of_trees_are_as_deep_as_these(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("sglcore.runtime.speculative.kinds.eagle_steps.TreeDrafter", Chained)
    engine = TokenEngine(folder, speculative="eagle", graph="off", **SHAPE)
    worker: Any = engine.worker
    worker.drafter.lengths = set()
    laws.run(engine)
    engine.worker.close()
    assert worker.drafter.lengths == {DEPTH}
