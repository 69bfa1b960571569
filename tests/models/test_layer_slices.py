"""A forward in slices of its layers: slices of any sizes, and two halves of a split batch by turns, give the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglcore.runtime.forward_batch import ForwardBatch
from tests.checkpoints import qwen3_moe, save
from tests.models.alone import batch_of, entered
from tests.models.steps import load

LAYERS = 4


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Four layers, every second with experts."""
    return load(save(qwen3_moe(num_hidden_layers=LAYERS, decoder_sparse_step=2), tmp_path_factory.mktemp("sparse")))


@given(edges=st.sets(st.integers(0, LAYERS)), tokens=st.integers(0, 6))
def test_slices_of_any_sizes_give_what_all_layers_give(sparse: Any, edges: set[int], tokens: int) -> None:
    batch, places = batch_of(tokens), sorted({0, LAYERS, *edges})
    with torch.inference_mode(), entered(sparse, batch):
        state = sparse.embed(batch)
        for first, last in zip(places, places[1:], strict=False):
            state = sparse.run_layers(state, first, last)
        assert torch.equal(sparse.finish(state), sparse(batch))


@pytest.mark.parametrize("delta", [0, 1, 2])
def test_two_halves_that_take_turns_give_what_the_whole_gives(sparse: Any, delta: int) -> None:
    whole = batch_of(7)
    assert whole.input_ids is not None and whole.positions is not None
    parts = zip(whole.input_ids.split([5, 2]), whole.positions.split([5, 2]), strict=True)
    halves = [ForwardBatch(input_ids=ids, positions=positions) for ids, positions in parts]
    with torch.inference_mode(), entered(sparse, whole):
        ahead, behind = (sparse.embed(half) for half in halves)
        for step in range(LAYERS + delta):
            ahead = sparse.run_layers(ahead, step, step + 1)
            if step >= delta:
                behind = sparse.run_layers(behind, step - delta, step - delta + 1)
        found = torch.cat([sparse.finish(ahead), sparse.finish(behind)])
        torch.testing.assert_close(found, sparse(whole), rtol=1e-5, atol=1e-5)
        for state, half in zip((ahead, behind), halves, strict=True):
            torch.testing.assert_close(sparse.finish(state), sparse(half), rtol=0, atol=0)
