"""A field that is declared in one line in each of the two batches reaches the batches that are
derived from others: of idle shards, and of sliding-window layers. Plans of drafts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from sglcore.runtime.attention.windowed import window_view
from sglcore.runtime.speculative.chain_drafts import FeatureDrafter
from sglcore.schedule.data_parallel.dp_loop import idle_batch
from sglcore.step.batch_field import Axis, When, batch_field, batch_record, specs, zero
from sglcore.worker.schedule_batch import ForwardMode
from sglcore.worker.step_plan import StepPlan
from tests.runtime.batches.test_declared_fields import ONE, facts_of_both, wider_site
from tests.runtime.tiny import ints
from tests.runtime.wider import WiderBatch, WiderSchedule


@facts_of_both
def test_a_step_without_rows_has_every_field_empty(facts: Any) -> None:
    plan = StepPlan((3, 0), shard=1)
    idle: Any = idle_batch(1, plan)
    made: Any = wider_site(facts)[0].runner.init_batch(idle)
    for spec in specs(WiderBatch):
        value = getattr(made, spec.name)
        assert spec.axis is Axis.NONE or spec.when is When.IF_GIVEN or value is None or value.shape[-1] == 0, spec.name
    assert (made.marks.shape, made.weights.shape, made.seq_lens_cpu.shape) == ((0,), (0,), (0,))
    assert (made.forward_mode, made.batch_size, made.num_tokens, made.step_plan) == (ForwardMode.IDLE, 0, 0, plan)


@batch_record(WiderSchedule)
class WindowedBatch(WiderBatch):
    """The device's batch with a field that sliding-window layers see in another form."""

    window_marks: Tensor = batch_field(axis=Axis.REQUESTS, dtype="int32", padding=zero(), read="marks")
    marks: Tensor = batch_field(
        axis=Axis.REQUESTS, dtype="int32", padding=zero(), read="marks", in_window="window_marks"
    )


def windowed_batch() -> Any:
    """A decode of two requests with every field of a window."""
    names = ("seq_lens", "positions", "window_seq_lens", "window_positions", "marks", "window_marks", "input_ids")
    tensors: dict[str, Any] = {name: torch.tensor([k, k + 9]) for k, name in enumerate(names, 10)}
    mirrors: dict[str, Any] = {"seq_lens_cpu": ints([10, 19]), "window_seq_lens_cpu": ints([12, 21])}
    weights = torch.tensor([0.5, 1.5])
    slots, cells = torch.tensor([1, 2]), {"out_cache_loc": ONE, "window_cache_loc": torch.tensor([70, 80])}
    rows: dict[str, Any] = {"batch_size": 2, "num_tokens": 2, "req_pool_indices": slots, "weights": weights, **cells}
    return WindowedBatch(forward_mode=ForwardMode.DECODE, width=1, **tensors, **mirrors, **rows)


def test_sliding_window_layers_see_every_field() -> None:
    batch = windowed_batch()
    batch.mark_forward_metadata_ready(cast("Any", SimpleNamespace(planner=None, generation=1)))
    view: Any = window_view(batch)
    replaced = {spec.name: spec.in_window for spec in specs(WindowedBatch) if spec.in_window}
    assert {"seq_lens": "window_seq_lens", "marks": "window_marks"}.items() <= replaced.items()
    for spec in specs(WindowedBatch):
        if spec.name == "plan_record" or spec.name in replaced.values():
            assert getattr(view, spec.name) is None, spec.name
        elif not callable(spec.in_window):
            assert getattr(view, spec.name) is getattr(batch, spec.in_window or spec.name), spec.name
    assert type(view) is WindowedBatch


@pytest.mark.parametrize(("sizes", "bucket"), [((), None), ((2,), 2), ((1, 8), 8)])
def test_a_draft_replays_its_own_graph_of_a_step_that_the_target_replays(
    sizes: tuple[int, ...], bucket: int | None
) -> None:
    """Or none, if it has captured none, as where its attention cannot be captured."""
    seen: list[Any] = []
    plan = StepPlan((2, 1), is_padded=True, bucket=4, is_decode=True, can_replay=True)

    def forward(batch: Any) -> tuple[Tensor, str]:
        seen.append(batch.step_plan)
        return torch.zeros(2, 3), ""

    runner = SimpleNamespace(state_pool=None, replayed=lambda plan: plan.replayed(sizes), forward=forward)
    ids, batch = torch.tensor([5, 6]), replace(windowed_batch(), step_plan=plan)
    rows = SimpleNamespace(batch=batch, ids=ids, select=ids - 5, features=torch.zeros(2, 3))
    FeatureDrafter(cast("Any", runner), 1, lambda features: features).take_in(cast("Any", rows))
    assert seen == [replace(plan, bucket=bucket)]
