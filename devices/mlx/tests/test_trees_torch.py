"""Tests that draft trees are grown, stored and walked as by the torch runtime's reference kernels,
and that its sampler's leaders lead here."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.sampling_rows import make_state
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch
from sglcore.step.tree_shapes import TreeShape
from sglcore_mlx.attention.gathered import is_visible
from sglcore_mlx.sampling.sampler import Sampler
from sglcore_mlx.speculative.trees import DraftTree, TreeRecords, chained, tables_of, walk, words_of
from sglcore_mlx.speculative.verify import Drafts, place

if find_spec("torch") is not None:
    import torch

    from sglcore.conformance.inputs.sampling_state import make_state as torch_state
    from sglcore.runtime.kernels.reference_speculative import tree_walk
    from sglcore.runtime.kernels.reference_trees import tree_place
    from sglcore.runtime.kernels.table import KernelTable
    from sglcore.runtime.speculative.tree import TreeRecords as TorchRecords
    from sglcore.runtime.speculative.tree import depths_of_records
    from sglcore.sampling.sampler import Sampler as TorchSampler

ROWS = 5
"""Requests."""
SHAPES = (TreeShape(2, 3, 5), TreeShape(3, 4, 9), TreeShape(4, 5, 32), TreeShape(8, 2, 20), TreeShape(1, 4, 5))
pytestmark = pytest.mark.needs("torch")


def candidates(shape: TreeShape, seed: int, hopeless: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return tokens and scores of each depth; with `hopeless` some have no chance."""
    rng, found = np.random.default_rng(seed), []
    for size in shape.records:
        rows = ROWS * size // shape.width
        tokens = np.argsort(rng.random((rows, 50)), axis=1)[:, : shape.width].astype(np.int32)
        scores = np.sort(rng.standard_normal(tokens.shape).astype(np.float32) * 3 - 4, axis=1)[:, ::-1].copy()
        if hopeless:
            scores[rng.random(scores.shape) < 0.3] = -np.inf
        found.append((tokens, scores))
    return found


def grown(shape: TreeShape, seed: int, hopeless: bool = False) -> tuple[DraftTree, Any]:
    """Return the trees made here and by torch."""
    mine, theirs = TreeRecords(shape), TorchRecords(ROWS, shape, depths_of_records(shape, "cpu"), KernelTable())
    for tokens, scores in candidates(shape, seed, hopeless):
        one = mine.expand(mx.array(tokens), mx.array(scores))
        other = theirs.expand(torch.from_numpy(tokens), torch.from_numpy(scores))
        if not hopeless:
            for part, wanted in zip(one, other, strict=True):
                assert np.array_equal(np.array(part), wanted.numpy())
    return mine.build(), theirs.build()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_beams_and_trees_are_torchs(shape: TreeShape, seed: int) -> None:
    for part, wanted in zip(*grown(shape, seed), strict=True):
        assert part.dtype == mx.int32 and np.array_equal(np.array(part), wanted.numpy())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tables_are_torchs(shape: TreeShape) -> None:
    tree, other = grown(shape, 7)
    held = torch.zeros(4, ROWS, shape.nodes, dtype=torch.int32)
    tree_place(
        other.tokens,
        other.parents,
        other.depths,
        torch.arange(ROWS),
        held,
        torch.zeros(ROWS, shape.nodes - 1, dtype=torch.int32),
    )
    found = np.array(tables_of(tree))
    held[1] += torch.arange(shape.nodes)  # torch keeps depth minus number
    assert np.array_equal(found, held.permute(1, 0, 2).numpy())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_accepted_path_is_torchs(shape: TreeShape, seed: int) -> None:
    tree, other = grown(shape, seed, hopeless=True)
    rng, width = np.random.default_rng(seed), shape.nodes
    slots, lengths = np.arange(1, ROWS + 1, dtype=np.int32), rng.integers(3, 9, ROWS + 1).astype(np.int32)
    limits = lengths[1:] + rng.integers(1, width + 3, ROWS).astype(np.int32)
    tables, held = tables_of(tree), torch.zeros(4, ROWS + 1, width, dtype=torch.int32)
    proposals = torch.full((ROWS + 1, width - 1), -1, dtype=torch.int32)
    tree_place(other.tokens, other.parents, other.depths, torch.from_numpy(slots).long(), held, proposals)
    drafts = Drafts(mx.array(lengths), mx.array(proposals.numpy()), None)
    placed = place(mx.zeros(ROWS + 1, mx.int32), drafts, mx.array(slots), mx.array(limits), None, width)
    drawn = right(np.array(tree.tokens), np.array(tree.parents), rng)
    runs, path = walk(mx.array(drawn), placed, tables, drafts, mx.array(slots), mx.array(limits), shape.steps)
    told, taken = torch.empty(4, ROWS, dtype=torch.int32), torch.empty(ROWS, shape.steps, dtype=torch.int32)
    last, ends = torch.zeros(ROWS + 1, dtype=torch.int32), torch.from_numpy(lengths.copy())
    owners = torch.from_numpy(np.array(placed.owners).reshape(-1))
    at, most = torch.from_numpy(slots).long(), torch.from_numpy(limits)
    tree_walk(torch.from_numpy(drawn).flatten(), owners, at, most, held, last, ends, proposals, taken, told)
    assert np.array_equal(np.array(path), taken.numpy()) and np.array_equal(np.array(runs.roots), last[1:].numpy())
    for mine, theirs in ((runs.accepted, told[0]), (runs.proposed, told[1]), (runs.lengths, told[3])):
        assert np.array_equal(np.array(mine), theirs.numpy())
    assert int(told[0].max()) > 0 or shape.width == 1


def right(tokens: np.ndarray, parents: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return tokens drawn after each node: mostly a child's, sometimes another."""
    drawn = np.full((len(tokens), tokens.shape[1] + 1), 77, np.int32)
    for row in range(len(tokens)):
        for node in rng.permutation(tokens.shape[1]):
            if tokens[row, node] >= 0 and rng.random() < 0.8:
                drawn[row, parents[row, node]] = tokens[row, node]
    return drawn


def test_a_chain_is_a_tree_in_which_each_node_sees_those_before_it() -> None:
    tree = chained(mx.array([[4, 5]]), 4)
    assert [each.tolist() for each in tree] == [[[4, 5, -1, -1]], [[0, 1, 2, 3]], [[1, 2, 3, 4]]]
    words = tables_of(tree)[0, 3]
    assert words.tolist() == [-1] * 5


def test_a_word_hides_the_slots_that_are_not_in_it_and_no_text() -> None:
    seen = mx.array([[0b00101, 0b01010]], mx.uint32)
    words = words_of(seen, 2)
    before = mx.arange(0, 40, dtype=mx.int32)[None, None]
    found = np.array(is_visible(words[:, :, None], before))[0]
    assert found[0, :3].tolist() == [True, False, True] and found[1, :4].tolist() == [True, False, True, False]
    assert found[0, 3:].all() and found[1, 4:].all()


PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.01),
)


@pytest.mark.parametrize("params", [PARAMS, PARAMS[:1], PARAMS[1:]], ids=["all", "greedy", "drawn"])
@pytest.mark.parametrize("count", [1, 3, 12])
def test_leaders_are_those_of_torchs_sampler(count: int, params: tuple[SamplingParams, ...]) -> None:
    host = SamplingBatch.from_params([(each, 11 + number) for number, each in enumerate(params)])
    logits = np.random.default_rng(count).normal(0.0, 3.0, (len(params), 90)).astype(np.float32)
    positions = np.arange(len(params), dtype=np.int32) + 4
    tokens, chances = Sampler(90).leaders(mx.array(logits), make_state(host, mx.array(positions)), count)
    state = torch_state(host, torch.from_numpy(positions), None, None)
    wanted, likely = TorchSampler(90, "cpu").leaders(torch.from_numpy(logits), state, count)
    # Tokens without a chance come in any order.
    has_chance = np.isfinite(likely.numpy())
    assert np.array_equal(np.isfinite(np.array(chances)), has_chance)
    assert np.array_equal(np.array(tokens)[has_chance], wanted.numpy()[has_chance])
    np.testing.assert_allclose(np.array(chances)[has_chance], likely.numpy()[has_chance], atol=1e-4)
