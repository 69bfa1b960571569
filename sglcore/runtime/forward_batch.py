"""One forward's inputs on the device. Per-batch data only: no pools, no backend, no coordinator.

Every field is declared once (see step/forward_inputs.py); the registry's buffers, padded views, children, retention and
poison follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from sglcore.device.batch import ScheduleBatch
from sglcore.step.fields import Axis, Split, When, batch_field, batch_record
from sglcore.step.forward_inputs import ForwardInputs
from sglcore.step.host_values import make_batch

if TYPE_CHECKING:
    from sglcore.runtime.attention.contract import AttentionBackend, AttentionPlan
    from sglcore.runtime.buffer_registry import BufferRegistry


class StalePlanError(RuntimeError):
    """A batch was planned for another backend, shape or pool than the one it is about to run on."""


class Turn(NamedTuple):
    """Which of several forwards over one plan a batch is for: `epoch` stands for the lengths, `step` counts from 0."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """What was true when attention was planned for a batch. `mark_forward_metadata_ready` makes it."""

    plan: AttentionPlan
    """The plan."""
    planner: AttentionBackend
    """The attention backend that made it."""
    batch_size: int
    """Requests of the batch."""
    num_tokens: int
    """Tokens of the batch."""
    generation: int
    """The generation of the KV pool."""
    replan_equivalent: bool
    """If sizes have changed, planning again is right. False: it is an error."""
    epoch: int | None = None
    """The epoch of lengths for which it holds. None: for this batch alone."""
    steps: int = 1
    """Forwards over these lengths that may use the plan."""


@batch_record(ScheduleBatch)
class ForwardBatch(ForwardInputs[Tensor]):
    """The inputs as tensors, and the plan of attention that was made for them."""

    plan_record: PlanRecord | None = batch_field(
        axis=Axis.NONE, split=Split.FRESH, owner="attention", when=When.IF_GIVEN
    )
    turn: Turn | None = batch_field(axis=Axis.NONE, split=Split.FRESH, owner="drafter", when=When.IF_GIVEN)

    @staticmethod
    def init_new(batch: ScheduleBatch, registry: BufferRegistry) -> ForwardBatch:
        """Stage a host batch into the registry's buffers and return the view of them, unpadded. Waits for nothing.

        One-shot values are taken from `batch`, so a second call does not see them. Negative input ids are left for
        `resolve_future`, cache locations for `fill_from`.
        """
        fields = registry.stage_all(batch)
        registry.commit()
        return make_batch(registry.batch_type, fields)

    def mark_forward_metadata_ready(self, plan: AttentionPlan, replan_equivalent: bool = False, steps: int = 1) -> None:
        """Record that attention was planned for this batch as it is now.

        `replan_equivalent`: planning again on drifted sizes gives what the caller wants; otherwise drift is an error.
        `steps`: how many forwards over the lengths of the batch's epoch may take this plan.
        """
        sizes, epoch = (self.batch_size, self.num_tokens), None if self.turn is None else self.turn.epoch
        self.plan_record = PlanRecord(plan, plan.planner, *sizes, plan.generation, replan_equivalent, epoch, steps)

    def needs_forward_metadata_init(self, backend: AttentionBackend) -> bool:
        """True if `backend` must plan before it runs; raises StalePlanError on a plan that is not for this forward."""
        record = self.plan_record
        if record is None:
            return True
        drift = self.plan_drift(record, backend)
        if not drift:
            return False
        if record.replan_equivalent:
            return True
        raise StalePlanError(f"{drift}; plan again before the forward, or mark the plan replan_equivalent")

    def plan_drift(self, record: PlanRecord, backend: AttentionBackend) -> str:
        """What is not as the record says; empty if all is."""
        if record.planner is not backend:
            return f"planned by {record.planner!r}, about to run on {backend!r}"
        if (record.batch_size, record.num_tokens) != (self.batch_size, self.num_tokens):
            planned = f"{record.batch_size} requests and {record.num_tokens} tokens"
            return f"planned for {planned}, the batch now has {self.batch_size} and {self.num_tokens}"
        if record.generation != backend.generation:
            return f"planned over generation {record.generation} of the KV pool, it is now {backend.generation}"
        epoch, step = (None, 0) if self.turn is None else self.turn
        if record.epoch != epoch:
            return f"planned for the lengths of epoch {record.epoch}, the batch has those of {epoch}"
        if step >= record.steps:
            return f"planned for {record.steps} forwards, this is one more"
        return ""
