"""Models as programs: which stages they have, and other drivers that walk the same list."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglcore.layers.program import Program, run_layers, stagger
from tests.checkpoints import llama, qwen3_moe, save
from tests.models.alone import batch_of, entered
from tests.models.steps import load


@pytest.fixture
def sparse(tmp_path) -> Any:
    """Four layers, every second with experts."""
    return load(save(qwen3_moe(num_hidden_layers=4, decoder_sparse_step=2), tmp_path))


def outline(program: Program) -> list[str]:
    """`stage: operation, operation` for each stage."""
    return [f"{stage.name}: {', '.join(op.name for op in stage.operations)}" for stage in program.stages]


def test_a_dense_layer_has_two_stages(tmp_path) -> None:
    model = load(save(llama(), tmp_path))
    dense = ["attention: input_norm, qkv, attention, attention_output", "mlp: post_attention_norm, mlp"]
    assert [outline(program) for program in model.programs] == [dense, dense]


def test_a_sparse_layer_waits_around_its_experts(sparse) -> None:
    assert outline(sparse.programs[1]) == [
        "attention: input_norm, qkv, attention, attention_output, post_attention_norm, gate, dispatch",
        "experts: experts, combine",
        "output: output",
    ]


def test_slices_of_layers_give_what_all_layers_give(sparse) -> None:
    batch = batch_of(5)
    with torch.inference_mode(), entered(sparse, batch):
        state = sparse.begin(batch)
        for first in range(4):
            run_layers(sparse.programs, state, first, first + 1)
        assert torch.equal(sparse.finish(state), sparse(batch))


@pytest.mark.parametrize("delta", [0, 1, 2])
def test_two_staggered_batches_give_what_each_gives_alone(sparse, delta: int) -> None:
    batches = batch_of(5), batch_of(2)
    with torch.inference_mode(), entered(sparse, batches[0]):
        states = sparse.begin(batches[0]), sparse.begin(batches[1])
        stagger(sparse.programs, states, delta)
        for state, batch in zip(states, batches, strict=True):
            assert torch.equal(sparse.finish(state), sparse(batch))
