"""Draft trees in torch, compared with results by hand."""

from __future__ import annotations

import pytest
import torch

from sglcore.runtime.kernels.table import KernelTable

TABLE = KernelTable()


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def empty(*sizes: int) -> torch.Tensor:
    return torch.full(sizes, -7, dtype=torch.int32)


@pytest.mark.parametrize(("scores", "best"), [((-1.0, -3.0), 0), ((-2.0, -2.0), 0), ((-3.0, -1.0), 1)])
def test_the_likeliest_of_a_depth_go_on_and_equal_ones_by_their_order(scores: tuple[float, float], best: int) -> None:
    """One beam with score -1 has two next tokens, which become records 2 and 3 of a tree with four
    records."""
    records, sums, beams, reached = empty(2, 1, 4), torch.zeros(1, 4), empty(3, 1, 2), torch.zeros(1, 2)
    tokens, made = ints([[5, 6]]), torch.tensor([scores])
    TABLE.tree_expand(tokens, made, ints([[1]]), torch.tensor([[-1.0]]), 2, records, sums, beams, reached)
    assert records[:, 0].tolist() == [[-7, -7, 5, 6], [-7, -7, 1, 1]]
    assert sums[0].tolist() == [0, 0, scores[0] - 1, scores[1] - 1]
    order = [best, 1 - best]
    assert beams[:, 0].tolist() == [[5 + at for at in order], [0, 0], [2 + at for at in order]]
    assert reached[0].tolist() == [scores[at] - 1 for at in order]


def test_beams_compete_for_what_goes_on() -> None:
    """Both tokens after the second beam score higher than those after the first. Nodes after the
    root have parent -1."""
    records, sums, beams, reached = empty(2, 1, 6), torch.zeros(1, 6), empty(3, 1, 2), torch.zeros(1, 2)
    TABLE.tree_expand(ints([[3, 4]]), torch.tensor([[-2.0, -1.0]]), None, None, 0, records, sums, beams, reached)
    assert beams[:, 0].tolist() == [[4, 3], [0, 0], [1, 0]] and records[1, 0, :2].tolist() == [-1, -1]
    tokens, scores, before = ints([[5, 6], [7, 8]]), torch.tensor([[-4.0, -5.0], [-0.5, -1.0]]), beams[2].clone()
    TABLE.tree_expand(tokens, scores, before, reached.clone(), 2, records, sums, beams, reached)
    assert beams[:, 0].tolist() == [[7, 8], [1, 1], [4, 5]] and reached[0].tolist() == [-2.5, -3.0]
    assert records[1, 0].tolist() == [-1, -1, 1, 1, 0, 0]


def test_a_tree_has_the_likeliest_records_in_their_order() -> None:
    """Keeps four or five of six records. A record with score -inf can not be accepted, and becomes
    token -1 if it is kept."""
    records = ints([[[1, 2, 3, 4, 5, 6]], [[-1, -1, 0, 0, 1, 1]]])
    sums, depths = torch.tensor([[-1.0, -2.0, -torch.inf, -torch.inf, -2.0, -3.0]]), ints([1, 1, 2, 2, 2, 2])
    for count, tokens, parents in ((4, [1, 2, 5, 6], [0, 0, 2, 2]), (5, [1, 2, -1, 5, 6], [0, 0, 1, 2, 2])):
        tree = empty(3, 1, count)
        TABLE.tree_build(records, sums, depths, tree)
        assert tree[:, 0].tolist() == [tokens, parents, [1, 1, *[2] * (count - 2)]]


def test_what_is_known_of_a_node_is_in_its_slot() -> None:
    """Two nodes follow the root, one follows the second of them, and one follows that. Other
    request slots stay unchanged."""
    trees, proposals = empty(4, 3, 5), empty(3, 4)
    TABLE.tree_place(ints([[7, 8, 9, -1]]), ints([[0, 0, 2, 3]]), ints([[1, 1, 2, 3]]), ints([1]), trees, proposals)
    assert trees[:3, 1].tolist() == [[0, 0, 0, 2, 3], [0, 0, -1, -1, -1], [1, 3, 5, 13, 29]]
    # The highest bit is the node's own; all bits for tokens before the root are set.
    words = [int(each) & 0xFFFFFFFF for each in trees[3, 1]]
    assert [word >> (31 - node) for node, word in enumerate(words)] == [1, 3, 5, 13, 29]
    assert all(word & ((1 << (31 - node)) - 1) == (1 << (31 - node)) - 1 for node, word in enumerate(words))
    assert proposals[1].tolist() == [7, 8, 9, -1]
    assert (trees[:, [0, 2]] == -7).all() and (proposals[[0, 2]] == -7).all()
