"""Models traced by compilers: one graph, no host reads, no data-dependent shapes."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from sglcore.runtime.forward_batch import ForwardBatch
from tests.checkpoints import bert, llama, qwen3_moe, save
from tests.models.alone import batch_of, entered
from tests.models.steps import load

MAKERS = {"llama": llama, "qwen3-moe": qwen3_moe, "bert": bert}


@pytest.fixture(params=MAKERS)
def model(request: pytest.FixtureRequest, tmp_path):
    """One model of each kind of layer."""
    return load(save(MAKERS[request.param](), tmp_path))


def test_a_forward_compiles_into_one_graph(model) -> None:
    batch = batch_of(6)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.inference_mode(), entered(model, batch):
        assert torch.equal(compiled(batch), model(batch))


def test_one_trace_serves_every_number_of_tokens(model) -> None:
    batch = batch_of(6)
    with torch.no_grad(), entered(model, batch):

        def step(ids, positions):
            return model(ForwardBatch(input_ids=ids, positions=positions))

        traced = make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(batch.input_ids, batch.positions)
        for tokens in (2, 9):
            other = batch_of(tokens)
            assert torch.equal(traced(other.input_ids, other.positions), model(other))


def test_no_tokens_pass_through_every_layer(model) -> None:
    batch = batch_of(0)
    with torch.inference_mode(), entered(model, batch):
        assert model(batch).shape == (0, 48)
