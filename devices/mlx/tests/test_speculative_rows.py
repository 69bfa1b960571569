"""Tests the placement of draft tokens, their acceptance, and the drafter, against simple
implementations in Python and the core's."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from devices.mlx.tests.running import running
from sglcore_mlx.forward import DecodeForward
from sglcore_mlx.speculative.drafter import StandaloneDrafter, VerifiedRows
from sglcore_mlx.speculative.ngram import propose
from sglcore_mlx.speculative.verify import NONE, Drafts, accept, place

WIDTHS = (1, 2, 5)
SLOTS, TOKENS, VOCAB = 9, 4, 5


def by_hand(text: list[int], tokens: int, least: int, most: int) -> list[int]:
    """Return the draft tokens: those after the latest occurrence of the longest matching suffix,
    repeated when they reach the end of the text."""
    for length in range(min(most, len(text) - 1), least - 1, -1):
        suffix = text[len(text) - length :]
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == suffix:
                found = text[end:]
                return [found[place % len(found)] for place in range(tokens)]
    return [NONE] * tokens


def texts(seed: int) -> tuple[list[list[int]], NDArray[np.int32], NDArray[np.int32], tuple[int, int, int]]:
    """Return five texts, a table with them as rows and a filler after their ends, their last
    positions, and (draft tokens, shortest suffix, longest suffix)."""
    rnd = random.Random(seed)
    found = [[rnd.randint(0, rnd.choice([1, 3, 9])) for _ in range(rnd.randint(1, 30))] for _ in range(5)]
    least = rnd.randint(1, 3)
    known = np.full((5, 31), 7, np.int32)
    for row, text in enumerate(found):
        known[row, : len(text)] = text
    counts = rnd.randint(1, 6), least, rnd.randint(least, 5)
    return found, known, np.array([len(text) - 1 for text in found], np.int32), counts


@pytest.mark.parametrize("seed", range(40))
def test_proposals_are_those_of_a_search_by_hand(seed: int) -> None:
    written, known, last, counts = texts(seed)
    found = propose(mx.array(known), mx.array(last), *counts)
    assert found.tolist() == [by_hand(text, *counts) for text in written]


@pytest.mark.needs("torch")
@pytest.mark.parametrize("seed", range(40))
def test_proposals_are_those_of_the_core(seed: int) -> None:
    import torch

    from sglcore.runtime.speculative import ngram_drafts

    _, known, last, counts = texts(seed)
    wanted = ngram_drafts.propose(torch.from_numpy(known), torch.from_numpy(last), *counts)
    assert propose(mx.array(known), mx.array(last), *counts).tolist() == wanted.tolist()


def tables(seed: int) -> dict[str, NDArray[np.int32]]:
    """Return tables of four requests with limits before the root, among the verified tokens, and
    after them."""
    rng = np.random.default_rng(seed)
    proposals = rng.integers(0, VOCAB, (SLOTS, TOKENS))
    proposals[np.arange(TOKENS) >= rng.integers(0, TOKENS + 1, (SLOTS, 1))] = NONE
    lengths = rng.integers(1, 20, SLOTS)
    slots = rng.permutation(np.arange(1, SLOTS))[:4]
    made = {
        "last": rng.integers(0, VOCAB, SLOTS),
        "lengths": lengths,
        "proposals": proposals,
        "slots": slots,
        "limits": lengths[slots] + rng.integers(-1, TOKENS + 3, 4),
        "nodes": rng.integers(1, TOKENS + 2, 4),
        "guess": rng.integers(0, VOCAB, (4, TOKENS + 1)),
    }
    return {name: each.astype(np.int32) for name, each in made.items()}


def drawn_of(given: dict[str, NDArray[np.int32]], width: int) -> NDArray[np.int32]:
    """Return drawn tokens that often equal the draft tokens."""
    drawn = given["guess"][:, :width].copy()
    proposed = np.maximum(given["proposals"][given["slots"]], 0)[:, : width - 1]
    is_right = np.random.default_rng(int(drawn.sum())).random(proposed.shape) < 0.8
    drawn[:, :-1] = np.where(is_right, proposed, drawn[:, :-1])
    return drawn


@pytest.mark.parametrize("with_nodes", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("seed", range(12))
def test_tokens_go_where_a_loop_puts_them_and_are_accepted_as_it_does(seed: int, width: int, with_nodes: bool) -> None:
    given = tables(seed)
    drafts = Drafts(mx.array(given["lengths"]), mx.array(given["proposals"]))
    slots, limits, drawn = mx.array(given["slots"]), mx.array(given["limits"]), drawn_of(given, width)
    nodes = mx.array(given["nodes"]) if with_nodes else None
    placed = place(mx.array(given["last"]), drafts, slots, limits, nodes, width)
    runs = accept(mx.array(drawn), placed, drafts, slots, limits)
    for row, slot in enumerate(given["slots"].tolist()):
        length, limit = int(given["lengths"][slot]), int(given["limits"][row])
        allowed = min(limit - length, int(given["nodes"][row]) if with_nodes else width)
        own = given["proposals"][slot].tolist()[: width - 1]
        assert placed.ids[row].tolist() == [
            root := int(given["last"][slot]),
            *(root if each < 0 else each for each in own),
        ]
        for node in range(width):
            where = (length + node, slot) if node < allowed else (0, 0)
            assert (placed.positions[row, node].item(), placed.owners[row, node].item()) == where
        right = 0
        while right < len(own) and right + 1 < allowed and drawn[row, right] == own[right]:
            right += 1
        counted = sum(each >= 0 for node, each in enumerate(own) if node + 1 < allowed)
        found = [int(np.array(each)[row]) for each in (runs.accepted, runs.proposed, runs.roots, runs.lengths)]
        assert found == [right, counted, int(drawn[row, right]), min(length + right + 1, max(limit, length))]


@pytest.mark.needs("torch")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("seed", range(12))
def test_places_and_runs_are_those_of_the_core(seed: int, width: int) -> None:
    import torch

    from sglcore.runtime.kernels.reference_speculative import accept_proposals, place_proposals

    given = tables(seed)
    drafts = Drafts(mx.array(given["lengths"]), mx.array(given["proposals"]))
    slots, limits, drawn = mx.array(given["slots"]), mx.array(given["limits"]), drawn_of(given, width)
    placed = place(mx.array(given["last"]), drafts, slots, limits, mx.array(given["nodes"]), width)
    runs = accept(mx.array(drawn), placed, drafts, slots, limits)
    known = {name: torch.from_numpy(each.copy()) for name, each in given.items()}
    state = known["last"], known["lengths"], known["proposals"]
    ids, positions, seq_lens, owners = (torch.empty(4 * width, dtype=torch.int32) for _ in range(4))
    place_proposals(*state, known["slots"], known["limits"], known["nodes"], ids, positions, seq_lens, owners)
    mine = placed.ids.reshape(-1), placed.positions.reshape(-1), placed.lengths, placed.owners.reshape(-1)
    proposed = given["proposals"][given["slots"]][:, : width - 1]
    # A missing draft token is never accepted.
    mine[0][:] = mx.array(np.where(np.pad(proposed, ((0, 0), (1, 0))) < 0, 0, np.array(placed.ids)).reshape(-1))
    for one, other in zip(mine, (ids, positions, seq_lens, owners), strict=True):
        assert one.tolist() == other.tolist()
    wanted = torch.empty(4, 4, dtype=torch.int32)
    accept_proposals(torch.from_numpy(drawn).reshape(-1), owners, known["slots"], known["limits"], *state, wanted)
    assert [runs.accepted.tolist(), runs.proposed.tolist()] == wanted[:2].tolist()
    assert runs.lengths.tolist() == wanted[3].tolist()
    assert runs.roots.tolist() == known["last"][known["slots"].long()].tolist()


def test_cells_of_tokens_that_are_not_verified_are_those_of_padding() -> None:
    drafts = Drafts(mx.array([0, 6, 3]), mx.array([[NONE] * 2, [8, 9], [5, NONE]]))
    placed = place(mx.array([0, 11, 12]), drafts, mx.array([2, 1]), mx.array([5, 20]), None, 3)
    page_table = mx.array([[3, 7, 0], [5, 1, 9]])
    assert placed.cells(page_table, 4).tolist() == [3 * 4 + 3, 7 * 4, 0, 1 * 4 + 2, 1 * 4 + 3, 9 * 4]
    assert placed.ids.tolist() == [[12, 5, 12], [11, 8, 9]]


def test_a_root_past_the_pages_of_its_request_has_no_cell() -> None:
    """The first request has a page for its root. The second has none, and its row of the table
    names a page of before there."""
    fields = {
        "input_ids": mx.array([5, 6, 7, 8]),
        "positions": mx.array([2, 3, 6, 7]),
        "req_pool_indices": mx.array([1, 1, 2, 2]),
    }
    numbers, roots, lengths = mx.zeros((2, 2), mx.int32), mx.array([11, 12]), mx.array([4, 8])
    page_table = mx.array([[3, 9, 0], [4, 5, 7]])
    rows = VerifiedRows(
        fields, page_table, mx.zeros((4, 3)), numbers, mx.array([1, 1]), roots, lengths, mx.array([8, 8]), []
    )
    parts: Any = SimpleNamespace(_parts=SimpleNamespace(page_size=4))
    found = StandaloneDrafter._with_roots(parts, rows)
    assert found["out_cache_loc"].tolist() == [3 * 4 + 2, 3 * 4 + 3, 9 * 4, 5 * 4 + 2, 5 * 4 + 3, 0]
    assert found["req_pool_indices"].tolist() == [1, 1, 1, 2, 2, 0]
    assert found["positions"].tolist() == [2, 3, 4, 6, 7, 0]
    assert found["input_ids"].tolist() == [5, 6, 11, 7, 8, 12]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_logits_of_several_tokens_of_a_request_are_those_of_one_after_the_other(dtype: str, threads: int) -> None:
    """Shows how strict the comparisons of output can be: on this machine every row has the same
    bits as alone; the test asserts a bound."""
    with running(dtype=dtype, threads=threads, graph="off", kv_cache_memory=32 << 20) as built:
        largest = built["stream_thread"].call(largest_difference, built, 3, 5)
    assert largest <= {"float32": 1e-4, "bfloat16": 0.1}[dtype], largest


def largest_difference(built: Any, requests: int, width: int) -> float:
    """Return the largest difference between the logits of `width` tokens after twenty others,
    computed in one step and one by one."""
    model, attention, first = built["model"], built["attention"], 20
    forward, page_size = DecodeForward(model, attention), built["sizes"].page_size
    ids = np.random.default_rng(0).integers(5, model.config.vocab_size, (requests, first + width)).astype(np.int32)
    pages = 1 + np.arange(requests * 2, dtype=np.int32).reshape(requests, 2)

    def step(cells: list[mx.array], rows: NDArray, positions: NDArray) -> tuple[NDArray, list[mx.array]]:
        fields = {
            "req_pool_indices": mx.array(rows),
            "seq_lens": mx.array(positions + 1),
            "positions": mx.array(positions),
            "input_ids": mx.array(ids[rows, positions]),
            "out_cache_loc": mx.array(pages[rows, positions // page_size] * page_size + positions % page_size),
        }
        (logits,), cells, _ = forward.rows(fields, mx.array(pages), cells, [])
        return np.array(logits), cells

    every, cells = np.arange(requests, dtype=np.int32), list(built["pools"].cells)
    for token in range(first):
        _, cells = step(cells, every, np.full(requests, token, np.int32))
    apart = [cells_ + 0 for cells_ in cells]
    mx.eval(apart)
    singles = []
    for token in range(first, first + width):
        found, cells = step(cells, every, np.full(requests, token, np.int32))
        singles.append(found)
    places = np.tile(np.arange(first, first + width, dtype=np.int32), requests)
    wide, _ = step(apart, np.repeat(every, width), places)
    return float(np.abs(wide.reshape(requests, width, -1) - np.stack(singles, axis=1)).max())
