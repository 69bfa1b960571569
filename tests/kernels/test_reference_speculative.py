"""Verification of draft tokens in torch, compared with a walk by hand over every request."""

from __future__ import annotations

import random

import pytest
import torch

from sglcore.runtime.kernels.table import KernelTable

TABLE = KernelTable()


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("seed", range(30))
def test_proposals_are_placed_and_accepted_as_a_walk_by_hand_has_it(seed: int) -> None:
    rnd = random.Random(seed)
    slots, width, most = rnd.sample(range(1, 9), rnd.randint(1, 5)), rnd.randint(1, 5), 5
    last, lengths = ([rnd.randint(0, 9) for _ in range(9)] for _ in range(2))
    proposals = [[rnd.randint(-1, 2) for _ in range(most)] for _ in range(9)]
    limits = [lengths[slot] + rnd.randint(-1, width + 1) for slot in slots]
    nodes = [rnd.randint(1, width) for _ in slots] if rnd.random() < 0.5 else None
    drawn = [rnd.randint(0, 2) for _ in range(len(slots) * width)]
    tables, inputs = (ints(last), ints(lengths), ints(proposals)), [ints([-7] * len(drawn)) for _ in range(4)]
    TABLE.place_proposals(*tables, ints(slots), ints(limits), None if nodes is None else ints(nodes), *inputs)
    runs = torch.full((4, len(slots)), -7, dtype=torch.int32)
    TABLE.accept_proposals(ints(drawn), inputs[3], ints(slots), ints(limits), *tables, runs)
    for row, slot in enumerate(slots):
        known = nodes[row] if nodes is not None else width
        usable = [lengths[slot] + node < limits[row] and node < known for node in range(width)]
        places = [lengths[slot] + node if usable[node] else 0 for node in range(width)]
        part = slice(row * width, (row + 1) * width)
        assert inputs[0][part].tolist() == [last[slot], *(max(0, each) for each in proposals[slot][: width - 1])]
        assert inputs[1][part].tolist() == places
        assert inputs[2][part].tolist() == [place + 1 for place in places]
        assert inputs[3][part].tolist() == [slot if each else 0 for each in usable]
        accepted = 0
        while accepted < width - 1 and usable[accepted + 1] and drawn[part][accepted] == proposals[slot][accepted]:
            accepted += 1
        proposed = sum(usable[node] and proposals[slot][node - 1] >= 0 for node in range(1, width))
        length = min(lengths[slot] + accepted + 1, max(limits[row], lengths[slot]))
        assert runs[:, row].tolist() == [accepted, proposed, row * width + accepted, length]
        assert tables[0][slot] == drawn[part][accepted] and tables[1][slot] == length
    others = [slot for slot in range(9) if slot not in slots]
    assert tables[0][others].tolist() == [last[slot] for slot in others]
    assert tables[1][others].tolist() == [lengths[slot] for slot in others]


def test_the_right_path_of_a_tree_goes_by_what_is_drawn_after_each_node() -> None:
    """Two nodes follow the root; the second is accepted, and so is the node after it. A second
    request has only its root in the batch."""
    trees = torch.zeros(4, 3, 4, dtype=torch.int32)
    trees[0, 1:], trees[1, 1:], trees[2, 1:] = ints([0, 0, 0, 2]), ints([0, 0, -1, -1]), ints([1, 3, 5, 13])
    last, lengths, proposals = ints([0, 1, 1]), ints([0, 10, 10]), torch.zeros(3, 3, dtype=torch.int32)
    proposals[1:] = ints([5, 6, 7])
    drawn, owners = ints([6, 8, 7, 9, 6, 8, 7, 9]), ints([1, 1, 1, 1, 2, 0, 0, 0])
    path, runs = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    TABLE.tree_walk(drawn, owners, ints([1, 2]), ints([20, 11]), trees, last, lengths, proposals, path, runs)
    assert path[0].tolist() == [0, 2, 3] and path[1, 0] == 0
    assert runs.tolist() == [[2, 0], [3, 0], [2, 3], [13, 11]]
    assert last.tolist() == [0, 9, 6] and lengths.tolist() == [0, 13, 11]
