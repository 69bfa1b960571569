"""Draft trees against plain Python: which records are kept, which nodes attend to which, and which
path is accepted."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore.runtime.attention.reference import is_seen
from sglcore.runtime.kernels import reference_speculative
from sglcore.runtime.kernels.reference_speculative import accept_proposals, tree_walk
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.speculative.drafter import NONE
from sglcore.runtime.speculative.speculation_bring_up import reason_against_trees
from sglcore.runtime.speculative.speculation_choice import Speculation, choose_speculation
from sglcore.runtime.speculative.tree import DraftTree, TreeRecords, TreeTables, depths_of_records
from sglcore.runtime.speculative.tree_worker import TreeWorker, along
from sglcore.sampling.gumbel_race import gumbel_noise, row_keys
from sglcore.sampling.noise import CONTENDERS, ONE, OWN, SPREAD, fixed_scale
from sglcore.sampling.params_batch import SamplingNeeds
from sglcore.sampling.sampler import Sampler, SamplingState
from sglcore.sampling.state import Logprobs, SampledTokens
from sglcore.step.tree_shapes import TreeShape
from tests.laws.trees import walked
from tests.planted import planted

ROWS = 40


def random_parents(rng: np.random.Generator, nodes: int) -> list[int]:
    """The random parent of each node from 1 on."""
    return [int(rng.integers(0, node)) for node in range(1, nodes)]


def depths_of(parents: list[int]) -> list[int]:
    """The depth of each node, the root first."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


def trees_of(parents: list[list[int]]) -> Tensor:
    """The trees as a worker holds them: int32[4, R, N]."""
    tables = TreeTables(len(parents) + 1, len(parents[0]) + 1, torch.device("cpu"), KernelTable())
    depths = torch.tensor([depths_of(each)[1:] for each in parents], dtype=torch.int32)
    slots = torch.arange(1, len(parents) + 1, dtype=torch.int32)
    own = torch.tensor(parents, dtype=torch.int32)
    proposals = torch.zeros(len(parents) + 1, own.shape[1], dtype=torch.int32)
    tables.put(slots, DraftTree(own + 1, own, depths), proposals)
    assert torch.equal(proposals[1:], own + 1)
    return tables.of_slots(slots)


@pytest.mark.parametrize("nodes", [2, 8, 32])
def test_a_node_sees_its_ancestors_and_all_cells_before_the_root(nodes: int) -> None:
    rng = np.random.default_rng(nodes)
    parents = [random_parents(rng, nodes) for _ in range(ROWS)]
    found = trees_of(parents)
    for row, own in enumerate(parents):
        depths = depths_of(own)
        assert found[0, row].tolist() == [0, *own]
        assert (found[1, row] + torch.arange(nodes)).tolist() == depths
        for node in range(nodes):
            ancestors, at = {node}, node
            while at:
                at = own[at - 1]
                ancestors.add(at)
            cells = torch.arange(-40, node + 1)
            seen = is_seen(found[3, row, node], (node - cells).to(torch.int32))
            assert seen.tolist() == [cell < 0 or cell in ancestors for cell in cells.tolist()]


def test_a_slot_that_nobody_gave_a_tree_has_a_chain() -> None:
    tables = TreeTables(3, 5, torch.device("cpu"), KernelTable())
    parents, shifts, _, words = tables.of_slots(torch.tensor([2], dtype=torch.int32))
    assert parents[0].tolist() == [0, 0, 1, 2, 3]
    assert shifts[0].tolist() == [0] * 5
    assert words[0].tolist() == [-1] * 5


def walk(parents: Any, tokens: Any, drawn: Any, usable: Any, steps: int) -> tuple[Tensor, Tensor]:
    """Run `tree_walk`; return the depth of each tree's accepted path and the nodes of the path. Row
    n belongs to slot n + 1."""
    count = len(parents)
    slots, held = torch.arange(1, count + 1, dtype=torch.int32), torch.zeros(4, count + 1, len(drawn[0])).int()
    held[:, 1:] = trees_of(parents)
    proposals = torch.zeros(count + 1, len(tokens[0]), dtype=torch.int32)
    proposals[1:] = torch.tensor(tokens)
    owners = (slots[:, None] * torch.tensor(usable)).flatten()
    last, lengths, limits = (torch.full((count + 1,), n, dtype=torch.int32) for n in (0, 3, 99))
    path, runs = torch.empty(count, steps, dtype=torch.int32), torch.empty(4, count, dtype=torch.int32)
    found = torch.tensor(drawn, dtype=torch.int32).flatten()
    tree_walk(found, owners, slots, limits[1:], held, last, lengths, proposals, path, runs)
    return runs[0], path


@pytest.mark.parametrize("nodes", [2, 9, 32])
def test_the_right_path_is_what_a_walk_finds(nodes: int) -> None:
    rng = np.random.default_rng(nodes)
    parents, tokens, drawn, usable = [], [], [], []
    for _ in range(ROWS):
        own = random_parents(rng, nodes)
        # Siblings differ; a few nodes have no token.
        taken: dict[int, list[int]] = {}
        proposed = []
        for parent in own:
            token = int(rng.integers(0, 3)) + 3 * len(taken.setdefault(parent, []))
            taken[parent].append(token)
            proposed.append(token if rng.random() < 0.9 else NONE)
        row = [int(rng.choice(taken[node])) if node in taken and rng.random() < 0.8 else 99 for node in range(nodes)]
        parents.append(own)
        tokens.append(proposed)
        drawn.append(row)
        usable.append([True, *(rng.random(nodes - 1) < 0.9).tolist()])
    steps = 1 + max(max(depths_of(each)) for each in parents)
    accepted, path = walk(parents, tokens, drawn, usable, steps)
    wanted = [walked(*each) for each in zip(drawn, tokens, parents, usable, strict=True)]
    assert accepted.tolist() == [len(each) for each in wanted]
    assert max(accepted.tolist()) >= min(2, nodes - 1)
    for row, nodes_of in enumerate(wanted):
        assert path[row, 0] == 0
        assert path[row, 1 : len(nodes_of) + 1].tolist() == nodes_of
        assert path[row, len(nodes_of) + 1 :].tolist() == list(range(len(nodes_of) + 1, steps))


RIGHT = "proposed == found.gather(1, parents[:, 1:].long())"
LAST = "torch.zeros_like(found).scatter_reduce(1, parents[:, 1:].long(), nodes[1:].expand(len(found), -1), 'amax')"
WALKS = {
    "takes the last child": (RIGHT, f"nodes[1:] == {LAST}.gather(1, parents[:, 1:].long())"),
    "takes what is drawn after the node itself": (RIGHT, "proposed == found[:, 1:]"),
    "goes on below a wrong node": (
        "(ancestors & wrong[:, None]) == 0",
        "torch.nn.functional.pad(is_right, (1, 0), value=True)",
    ),
    "takes what has no cell": ("is_right = usable[:, 1:] & (", "is_right = ("),
}


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_that_takes_another_path_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "tree_walk", planted(reference_speculative, *WALKS[name]).tree_walk)
    with pytest.raises(AssertionError):
        test_the_right_path_is_what_a_walk_finds(9)


@pytest.mark.parametrize("width", [1, 3, 6])
def test_of_chains_all_is_as_the_table_of_kernels_has_it(width: int) -> None:
    """Includes requests with pages that end within the step, or ended before it."""
    generator = torch.Generator().manual_seed(width)
    slots = torch.randperm(ROWS, generator=generator).to(torch.int32) + 1

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    limits, lengths, last = drawn(8, 16, ROWS), drawn(6, 18, ROWS + 1), drawn(0, 9, ROWS + 1)
    proposals, tokens = drawn(-1, 2, ROWS + 1, 5), drawn(0, 2, ROWS * width)
    places = lengths[slots.long(), None] + torch.arange(width)
    owners = (slots[:, None] * (places < limits[:, None])).flatten()
    tables, runs = [each.clone() for each in (last, lengths, proposals)], torch.empty(4, ROWS, dtype=torch.int32)
    accept_proposals(tokens, owners, slots, limits, tables[0], tables[1], tables[2], runs)
    worker: Any = SimpleNamespace(
        _proposals=proposals,
        _lengths=lengths,
        _kernels=KernelTable(),
        _table=SimpleNamespace(last=last),
        _trees=TreeTables(ROWS + 1, 6, torch.device("cpu"), KernelTable()),
    )
    staged: Any = SimpleNamespace(req_pool_indices=owners)
    rows: Any = SimpleNamespace(slots=slots, limits=limits)
    sampled = SampledTokens(tokens, torch.zeros_like(tokens, dtype=torch.bool))
    found, path = TreeWorker._walk(worker, staged, rows, sampled, width)
    assert torch.equal(found, runs)
    assert torch.equal(torch.stack([last, lengths]), torch.stack(tables[:2]))
    assert torch.equal(path, torch.arange(width, dtype=torch.int32).expand(ROWS, width))


def test_all_that_is_told_of_a_draw_goes_along_its_path() -> None:
    numbers = torch.arange(6)
    top = torch.stack([numbers, -numbers], 1)
    drawn = SampledTokens(numbers.int(), numbers == 4, Logprobs(numbers.float(), numbers.int(), top.int(), top.float()))
    order = torch.tensor([0, 4, 1, 3])
    found = along(drawn, order)
    assert found.token_ids.tolist() == order.tolist()
    assert found.bad_rows.tolist() == [False, True, False, False]
    assert found.logprobs is not None
    assert found.logprobs.chosen.tolist() == found.logprobs.ranks.tolist() == order.tolist()
    assert found.logprobs.top_ids.tolist() == found.logprobs.top.tolist() == [[n, -n] for n in order.tolist()]


def by_python(scores: list[list[list[float]]], width: int, nodes: int) -> list[tuple[float, int, int, int]]:
    """Return (score, record of the parent, depth, record) of the records that plain sorting keeps.
    `scores`: for each depth, the scores of each beam's best tokens."""
    records = [(score, -1, 1) for score in scores[0][0]]
    beams = list(range(width))
    for depth, leaders in enumerate(scores[1:], 2):
        first = len(records)
        records += [
            (float(np.float32(records[beam][0]) + np.float32(score)), beam, depth)
            for beam, own in zip(beams, leaders, strict=True)
            for score in own
        ]
        beams = sorted(range(first, len(records)), key=lambda record: -records[record][0])[:width]
    kept = sorted(sorted(range(len(records)), key=lambda record: -records[record][0])[: nodes - 1])
    return [(*records[record], record) for record in kept]


@pytest.mark.parametrize("values", [(-3.0, -1.5, -0.5), (0.0,), (0.0, -torch.inf), (0.0, -1e-9)])
@pytest.mark.parametrize(("width", "depth", "nodes"), [(2, 1, 3), (3, 4, 8), (2, 5, 11), (4, 3, 32)])
def test_what_is_kept_of_beams_is_what_sorting_keeps(
    values: tuple[float, ...], width: int, depth: int, nodes: int
) -> None:
    """Includes equal scores, as a saturated softmax gives: no child may be kept without its
    parent."""
    rng = np.random.default_rng(depth)
    shape, scored = TreeShape(width, depth, nodes), [[] for _ in range(ROWS)]
    records = TreeRecords(ROWS, shape, depths_of_records(shape, "cpu"), KernelTable())
    for at in range(depth):
        count = width if at else 1
        scores = torch.tensor(-np.sort(-rng.choice(values, (ROWS, count, width)), axis=2), dtype=torch.float32)
        tokens = torch.arange(ROWS * count * width, dtype=torch.int32).view(ROWS, count, width) + 1000 * at
        for row in range(ROWS):
            scored[row].append(scores[row].tolist())
        records.expand(tokens.flatten(0, 1), scores.flatten(0, 1))
    found = records.build()
    for row in range(ROWS):
        wanted = by_python(scored[row], width, nodes)
        numbers = {record: number for number, (*_, record) in enumerate(wanted, 1)} | {-1: 0}
        assert found.parents[row].tolist() == [numbers[parent] for _, parent, *_ in wanted]
        assert found.depths[row].tolist() == [deep for *_, deep, _ in wanted]
        assert (found.tokens[row] == NONE).tolist() == [score == -torch.inf for score, *_ in wanted]


def test_scores_that_are_not_of_whole_paths_show(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = TreeRecords.expand

    def forgets(records: TreeRecords, tokens: Tensor, scores: Tensor) -> Any:
        if records._reached is not None:
            records._reached.zero_()
        return kept(records, tokens, scores)

    monkeypatch.setattr(TreeRecords, "expand", forgets)
    with pytest.raises((AssertionError, KeyError)):
        test_what_is_kept_of_beams_is_what_sorting_keeps((-3.0, -1.5, -0.5), 3, 4, 8)


@pytest.mark.parametrize("is_greedy", [(False,) * 6, (True,) * 6, (True, False) * 3])
def test_the_first_of_a_race_is_what_is_drawn(is_greedy: tuple[bool, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(6, 500, generator=generator)
    logits[:, ::7] = -torch.inf
    logits[5] = torch.nan
    greedy = torch.tensor(is_greedy)
    scale = torch.where(greedy, 1.0, torch.tensor([fixed_scale(t) for t in (1.0, 0.5, 1.5, 1.0, 2.0, 1.0)]))
    needs = SamplingNeeds(all_greedy=all(is_greedy), any_greedy=any(is_greedy))
    words = torch.randint(-(1 << 31), 1 << 31, (6, 2), generator=generator, dtype=torch.int64).to(torch.int32)
    state = SamplingState(needs, torch.arange(6, dtype=torch.int32), words, scale, greedy)
    sampler = Sampler(500, "cpu")
    tokens, likely = sampler.leaders(logits, state, 4)
    assert tokens[:5, 0].tolist() == sampler.sample(logits, state).token_ids[:5].tolist()
    assert (likely[5] == -torch.inf).all()
    assert (likely[:5].exp().sum(1) <= 1.0001).all()
    assert all(len(set(row)) == 4 for row in tokens[:5].tolist())


def chances_of(nats: np.ndarray, own: np.ndarray, count: int) -> tuple[list[int], np.ndarray]:
    """The `count` tokens with the highest race scores `nats` (float64[V]), and their log chances by
    `SPREAD` and `OWN` from the score gaps and the tokens' own log-probabilities."""
    first = np.argsort(-nats, kind="stable")[:CONTENDERS]
    marks = OWN * (own - np.log(np.exp(own).sum()))[first] - SPREAD * np.sqrt(nats[first[0]] - nats[first])
    return first[:count].tolist(), (marks - np.log(np.exp(marks).sum()))[:count]


def test_a_greedy_row_ranks_by_its_logits_alone() -> None:
    """The row's scale and the sampling of other rows in the batch do not matter."""
    generator = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(2, 50, generator=generator)
    row = logits[0].double().numpy()
    ids, wanted = chances_of(row, row, 5)
    for scale in (1.0, fixed_scale(1.0), fixed_scale(0.1)):
        needs = SamplingNeeds(all_greedy=False, any_greedy=True)
        scales = torch.tensor([scale, fixed_scale(1.0)])
        words = torch.ones(2, 2, dtype=torch.int32)
        state = SamplingState(needs, torch.arange(2, dtype=torch.int32), words, scales, torch.tensor([True, False]))
        tokens, likely = Sampler(50, "cpu").leaders(logits, state, 5)
        assert tokens[0].tolist() == ids
        np.testing.assert_allclose(likely[0].double().numpy(), wanted, atol=1e-3)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chances_of_a_drawn_row_are_of_its_race_and_of_its_own_probabilities(temperature: float) -> None:
    """By the integer reference, with the noise and the score gaps of the row."""
    logits = 2 * torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    scale, words, positions = fixed_scale(temperature), torch.tensor([[7, 9]], dtype=torch.int32), torch.tensor([4])
    needs, sampler = SamplingNeeds(all_greedy=False, any_greedy=False), Sampler(50, "cpu")
    positions = positions.to(torch.int32)
    state = SamplingState(needs, positions, words, torch.tensor([scale]), torch.tensor([False]))
    own = (logits[0].double() - logits[0].max()).numpy() / temperature
    noise = gumbel_noise(row_keys(words, positions), sampler.tables.hashed_ids, sampler.tables.gumbel)[0]
    ids, wanted = chances_of(own + noise.double().numpy() / ONE, own, 4)
    tokens, likely = sampler.leaders(logits, state, 4)
    assert tokens[0].tolist() == ids
    np.testing.assert_allclose(likely[0].double().numpy(), wanted, atol=1e-2)


def test_contenders_of_a_small_vocabulary_are_all_of_it() -> None:
    needs = SamplingNeeds(all_greedy=False, any_greedy=False)
    words = torch.ones(1, 2, dtype=torch.int32)
    scale = torch.tensor([fixed_scale(1.0)])
    state = SamplingState(needs, torch.zeros(1, dtype=torch.int32), words, scale, torch.tensor([False]))
    tokens, likely = Sampler(CONTENDERS - 3, "cpu").leaders(torch.zeros(1, CONTENDERS - 3), state, 2)
    assert tokens.shape == likely.shape == (1, 2)
    whole = Sampler(CONTENDERS - 3, "cpu").leaders(torch.zeros(1, CONTENDERS - 3), state, CONTENDERS - 3)[1]
    assert float(whole.exp().sum()) == pytest.approx(1.0)


def test_what_is_no_candidate_is_no_leader() -> None:
    logits = torch.full((1, 50), -torch.inf)
    logits[0, [3, 8]] = torch.tensor([1.0, 0.0])
    needs = SamplingNeeds(all_greedy=False, any_greedy=False)
    words = torch.ones(1, 2, dtype=torch.int32)
    positions, scale = torch.zeros(1, dtype=torch.int32), torch.tensor([fixed_scale(1.0)])
    state = SamplingState(needs, positions, words, scale, torch.tensor([False]))
    tokens, likely = Sampler(50, "cpu").leaders(logits, state, 4)
    assert set(tokens[0, :2].tolist()) == {3, 8}
    assert likely[0, :2].isfinite().all()
    assert (likely[0, 2:] == -torch.inf).all()


def test_trees_on_a_device_without_masks_of_trees_are_chains_and_the_ledger_says_so(tmp_path: Path) -> None:
    model: Any = SimpleNamespace(
        config=SimpleNamespace(is_encoder=False), state_layers=(), reads_history=False, attention_layers=()
    )
    draft = SimpleNamespace(model=SimpleNamespace(state_layers=(), attention_layers=()), aux_layers=(), heads=1)
    (tmp_path / "draft").mkdir()
    ledger = DecisionLedger()
    config = EngineConfig(speculative="mtp", draft_model=str(tmp_path / "draft"), draft_width=2)
    found = choose_speculation(config, model, tmp_path, ledger, lambda *_: draft, no_trees="nothing masks trees")
    assert found is not None
    assert found.tree is None
    assert found.lengths == (0, 1, 3, 4)
    (row,) = [row for row in ledger.rows if row.topic == "draft width"]
    assert (row.requested, row.effective, row.reason, row.downgrade) == ("2", "1", "nothing masks trees", True)


def chosen(tmp_path: Path, **settings: Any) -> Speculation:
    """The speculation chosen for a model and a draft that support any tree."""
    model: Any = SimpleNamespace(
        config=SimpleNamespace(is_encoder=False), state_layers=(), reads_history=False, attention_layers=()
    )
    draft = SimpleNamespace(
        model=SimpleNamespace(state_layers=(), attention_layers=(), feature_size=8), aux_layers=(), heads=1
    )
    (tmp_path / "draft").mkdir(exist_ok=True)
    config = EngineConfig(speculative="mtp", draft_model=str(tmp_path / "draft"), **settings)
    found = choose_speculation(config, model, tmp_path, DecisionLedger(), lambda *_: draft)
    assert found is not None
    return found


@pytest.mark.parametrize(("width", "depth", "tokens"), [(2, 1, 2), (2, 2, 6), (2, 4, 4), (8, 5, 31), (16, 3, 31)])
def test_the_largest_trees_are_served(tmp_path: Path, width: int, depth: int, tokens: int) -> None:
    """Trees that keep all records, trees that are one chain, and trees that use all bits of a
    word."""
    found = chosen(tmp_path, draft_width=width, draft_depth=depth, draft_tokens=tokens)
    assert found.tree == TreeShape(width, depth, tokens + 1)
    assert found.lengths == (tokens,)
    assert found.draft is not None
    assert set(found.shape_of(found.draft).widths) == {1, width, depth + 1}
    model: Any = SimpleNamespace()
    assert found.shape_of(model).widths == (tokens + 1,)


@pytest.mark.parametrize(
    ("width", "tokens", "depth"), [(2, None, 5), (3, 15, 5), (2, 3, 3), (2, 2, 2), (10, 31, 4), (16, 31, 3), (16, 2, 2)]
)
def test_a_tree_whose_depth_nobody_asks_for_is_as_deep_as_it_may_be(
    tmp_path: Path, width: int, tokens: int | None, depth: int
) -> None:
    asked = {} if tokens is None else {"draft_tokens": tokens}
    assert chosen(tmp_path, draft_width=width, **asked).tree == TreeShape(width, depth, 1 + (tokens or 7))


@pytest.mark.parametrize(("width", "depth", "tokens"), [(2, 1, 3), (2, 2, 7), (2, 4, 3), (11, 4, 31), (8, 4, 32)])
def test_larger_ones_are_refused(tmp_path: Path, width: int, depth: int, tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"draft_width is {width}, and "):
        chosen(tmp_path, draft_width=width, draft_depth=depth, draft_tokens=tokens)


def test_attention_that_hides_no_cells_is_named() -> None:
    package: Any = SimpleNamespace(name="odd", attention={"plain": "tests.runtime.speculation.test_trees:Plain"})
    assert (
        reason_against_trees(package, EngineConfig())
        == "plain: no attention backend of odd masks single KV slots of a row (tree_mask)"
    )


class Plain:
    """Attention that declares no features."""

    facts = SimpleNamespace(features=frozenset())
