"""A captured decode in two micro-batches gives the tokens of each request alone; values that must
not be baked into the graph are caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext, get_forward_context
from sglcore.runtime.graph_runner import GraphRunner
from sglcore.runtime.graphs.full import FullGraphs
from sglcore.runtime.overlap.interleave import pause
from sglcore.runtime.overlap.micro_batches import CapturedHalves, Halves
from sglcore.step.micro_batch_cut import CutTerms, Staggers
from tests.runtime.graphs.test_graph_full import PlannedLengths, differs
from tests.runtime.recording import GraphSite, RecordingCapture, make_graph_site
from tests.runtime.tiny import TinyModel

SIZES = (6, 1, 5, 2, 4, 3, 6, 1)


class Pausing(TinyModel):
    """Yields to the other micro-batch before each layer, and overwrites the rows after its real
    ones with NaN."""

    def __call__(self, batch: ForwardBatch) -> Tensor:
        self.seen.append(batch)
        hidden = self.embedding[batch.input_ids] + self.places[batch.positions]
        for layer, qkv, out in zip(self.attention_layers, self.qkv, self.out, strict=True):
            assert get_forward_context().batch is batch
            pause()
            hidden = hidden + layer(*self._split(hidden @ qkv)) @ out
        is_real = torch.arange(len(hidden)) < batch.num_token_non_padded
        return torch.where(is_real[:, None], hidden, torch.nan)


def halved(stagger: int = 1, least: int = 2) -> GraphSite:
    """A site that captures decodes of `least` rows or more as two micro-batches."""
    made = make_graph_site(model=Pausing(), attention=PlannedLengths)
    attention, runner = made.site.attention, made.site.runner
    pools = attention.req_to_token_pool, attention.token_to_kv_pool, attention.kernels
    halves = Halves(
        (attention, type(attention)(attention.shape, *pools)),
        CutTerms(least=1 << 20, least_decode=least, staggers=Staggers(0, stagger)),
    )
    made.site.model.seen.clear()
    capture = RecordingCapture()
    context = ForwardContext(attention, None, made.site.model.attention_layers)
    backend = FullGraphs(capture, made.streams)
    options: dict[str, Any] = {"streams": made.streams, "halves": halves}
    made.graphs = GraphRunner(backend, runner.decode_registry, context, made.site.model, (1, 2, 4, 6), **options)
    made.capture, runner.graphs, runner.halves = capture, made.graphs, halves
    return made


@pytest.mark.parametrize("stagger", [0, 1, 2])
def test_a_replay_of_two_halves_gives_what_each_request_gives_alone(stagger: int) -> None:
    made = halved(stagger)
    assert made.graphs.decode.in_halves == (2, 4, 6)
    assert not differs(made, SIZES)


def test_small_buckets_are_captured_whole() -> None:
    made = halved(least=4)
    assert made.graphs.decode.in_halves == (4, 6)
    assert not differs(made, SIZES)


def test_each_half_of_a_bucket_is_a_part_of_it() -> None:
    assert {batch.num_tokens for batch in halved().site.model.seen} == {3, 2, 1}


def counts_baked_in(patch: pytest.MonkeyPatch) -> None:
    """The number of real rows in a micro-batch stays that of the capture."""
    own = Halves.parts

    def parts(self: Halves, batch: ForwardBatch, cut: int) -> tuple[ForwardBatch, ForwardBatch]:
        found = own(self, batch, cut)
        for part in found:
            part.num_token_non_padded = torch.zeros(1, dtype=torch.int32)
        return found

    patch.setattr(Halves, "parts", parts)


def second_plan_stale(patch: pytest.MonkeyPatch) -> None:
    """Only the plan of the first micro-batch is updated."""

    def refresh(self: CapturedHalves, batch: ForwardBatch) -> None:
        self.halves.backends[0].refresh(self.plans[0], self.halves.parts(batch, self.cut)[0])

    patch.setattr(CapturedHalves, "refresh", refresh)


def one_workspace_for_both(patch: pytest.MonkeyPatch) -> None:
    """The plans of both micro-batches keep their lengths in one buffer."""
    own = Halves.captured

    def captured(halves: Halves, size: int) -> CapturedHalves | None:
        found: Any = own(halves, size)
        if found is not None and found.plans[0].lengths.shape == found.plans[1].lengths.shape:
            found.plans[1].lengths = found.plans[0].lengths
        return found

    patch.setattr(Halves, "captured", captured)


@pytest.mark.parametrize("plant", [counts_baked_in, second_plan_stale, one_workspace_for_both])
def test_what_is_baked_in_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert differs(halved(), SIZES)


class Updating(PlannedLengths):
    """A backend with captured graphs that need host updates."""

    def refresh(self, plan: Any, batch: ForwardBatch) -> Any:
        super().refresh(plan, batch)
        return "lengths"


def test_a_backend_that_updates_graphs_is_refused() -> None:
    made = make_graph_site(model=Pausing())
    attention = made.site.attention
    pools = attention.req_to_token_pool, attention.token_to_kv_pool, attention.kernels
    pair = Updating(attention.shape, *pools), Updating(attention.shape, *pools)
    found = Halves(pair, CutTerms()).captured(4)
    assert found is not None
    view = made.site.runner.decode_registry.view(4, 4, extend=False)
    with pytest.raises(TypeError, match="Updating updates captured graphs, which cannot hold two micro-batches"):
        found.refresh(view)
