"""A forward in layer slices of any sizes, and two alternating halves of a split batch, equal the
whole forward."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglcore.runtime.batch_split import filter_batch
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext, forward_context
from tests.checkpoints import qwen3_moe, save
from tests.models.alone import batch_of, entered
from tests.models.steps import Steps, load

LAYERS = 4


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Four layers; every second one has experts."""
    return load(save(qwen3_moe(num_hidden_layers=LAYERS, decoder_sparse_step=2), tmp_path_factory.mktemp("sparse")))


@given(edges=st.sets(st.integers(0, LAYERS)), tokens=st.integers(0, 6))
def test_slices_of_any_sizes_give_what_all_layers_give(sparse: Any, edges: set[int], tokens: int) -> None:
    batch, places = batch_of(tokens), sorted({0, LAYERS, *edges})
    with torch.inference_mode(), entered(sparse, batch):
        state = sparse.embed(batch)
        for first, last in pairwise(places):
            state = sparse.run_layers(state, first, last)
        assert torch.equal(sparse.finish(state), sparse(batch))


def planned(steps: Steps, part: ForwardBatch) -> forward_context:
    """A forward context for one half, with its attention plan."""
    backend = steps.runner.attn_backend
    part.mark_forward_metadata_ready(backend.plan(part))
    return forward_context(ForwardContext(backend, part, steps.model.attention_layers))


@pytest.mark.parametrize("cut", [0, 3, 5, 6, 7])
@pytest.mark.parametrize("delta", [0, 1, 2])
def test_two_halves_that_take_turns_give_what_the_whole_gives(sparse: Any, delta: int, cut: int) -> None:
    tokens = {1: [3, 9, 4, 4, 11], 2: [8, 2]}
    wanted, steps = Steps(sparse).hidden(tokens), Steps(sparse)
    whole = steps.runner.prepared(steps.staged(tokens))
    halves = filter_batch(whole, 0, cut), filter_batch(whole, cut, 7)
    scopes = [planned(steps, half) for half in halves]

    def take_turn(number: int, state: Any, layer: int) -> Any:
        with scopes[number]:
            return sparse.run_layers(state, layer, layer + 1)

    with torch.inference_mode():
        ahead, behind = map(sparse.embed, halves)
        for layer in range(LAYERS + delta):
            ahead = take_turn(0, ahead, layer)
            if layer >= delta:
                behind = take_turn(1, behind, layer - delta)
        found = torch.cat([sparse.finish(ahead), sparse.finish(behind)])
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
