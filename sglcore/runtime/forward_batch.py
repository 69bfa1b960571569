"""The inputs of one forward, on the device.

Per-batch data only: no pools, no backend, no coordinator. Every field is declared once (see
step/forward_inputs.py). The buffers of the registry, padded views, splitting, retention and
poisoning are derived from the declarations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from sglcore.step.batch_field import Axis, Split, When, batch_field, batch_record
from sglcore.step.forward_inputs import ForwardInputs
from sglcore.step.host_values import make_batch
from sglcore.worker.schedule_batch import ScheduleBatch


class StalePlanError(RuntimeError):
    """A batch has no plan, or its plan is for another backend, size, KV pool or other lengths; or a
    graph was captured over another pool than the present one.
    """


class Turn(NamedTuple):
    """Identifies one of several forwards that share an attention plan; the value of
    `ForwardBatch.turn`.

    `epoch` identifies the lengths that were planned; `step` counts the forwards from 0.
    """

    epoch: int
    step: int


class Planner(Protocol):
    """The part of `AttentionBackend` that a batch uses."""

    @property
    def generation(self) -> int:
        """A number that changes when an address of keys or values changes."""
        ...


class Plan(Protocol):
    """The part of `AttentionPlan` that a batch uses."""

    @property
    def planner(self) -> Planner:
        """The attention backend that made the plan."""
        ...

    @property
    def generation(self) -> int:
        """The generation of the KV pool that the plan was made for."""
        ...


class StagingBuffers(Protocol):
    """The part of `BufferRegistry` that copies a host batch to the device."""

    @property
    def batch_type(self) -> type[ForwardBatch]:
        """The class of the batches."""
        ...

    def stage_all(self, batch: ScheduleBatch) -> dict[str, Any]:
        """Write every value of a host batch to the buffers' host side; return the fields of the
        device batch by name, tensors as views of the buffers.
        """
        ...

    def commit(self) -> None:
        """Queue the copy of the staged values to the device."""
        ...


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A batch's state when attention was planned for it. `mark_forward_metadata_ready` makes it."""

    plan: Plan
    """The attention plan."""
    planner: Planner
    """The attention backend that made the plan."""
    batch_size: int
    """Number of requests in the batch."""
    num_tokens: int
    """Number of tokens in the batch."""
    generation: int
    """Generation of the KV pool."""
    replan_equivalent: bool
    """If the batch no longer fits the plan (`ForwardBatch.plan_drift`: other backend, sizes, KV
    pool or lengths), plan again. False: StalePlanError.
    """
    epoch: int | None = None
    """Epoch of the lengths for which the plan is valid. None: it is valid for this batch only."""
    steps: int = 1
    """Number of forwards over these lengths that may use the plan."""


@batch_record(ScheduleBatch)
class ForwardBatch(ForwardInputs[Tensor]):
    """The inputs as tensors, with the attention plan that was made for them."""

    plan_record: PlanRecord | None = batch_field(
        axis=Axis.NONE, split=Split.FRESH, owner="attention", when=When.IF_GIVEN
    )
    turn: Turn | None = batch_field(axis=Axis.NONE, split=Split.FRESH, owner="drafter", when=When.IF_GIVEN)

    @staticmethod
    def init_new(batch: ScheduleBatch, registry: StagingBuffers) -> ForwardBatch:
        """Stage a host batch in the registry's buffers and return the unpadded view of them.

        Queues the copy (`HostBlock.commit`). One-shot values are removed from `batch`, so a second
        call does not see them. `resolve_future` fills in negative input ids, `fill_from` the cache
        locations.
        """
        fields = registry.stage_all(batch)
        registry.commit()
        return make_batch(registry.batch_type, fields)

    def mark_forward_metadata_ready(self, plan: Plan, replan_equivalent: bool = False, steps: int = 1) -> None:
        """Record that attention was planned for this batch with its present sizes.

        `replan_equivalent`: if the batch no longer fits the plan (`plan_drift`), plan again;
        otherwise that is a StalePlanError. `steps`: number of forwards over the lengths of the
        batch's epoch that may use this plan.
        """
        sizes, epoch = (self.batch_size, self.num_tokens), None if self.turn is None else self.turn.epoch
        self.plan_record = PlanRecord(plan, plan.planner, *sizes, plan.generation, replan_equivalent, epoch, steps)

    def needs_forward_metadata_init(self, backend: Planner) -> bool:
        """Return True if `backend` must plan before it runs: there is no plan, or it is for another
        forward and may be replaced (`replan_equivalent`).

        Raises StalePlanError if the plan is for another forward and may not be replaced.
        """
        record = self.plan_record
        if record is None:
            return True
        drift = self.plan_drift(record, backend)
        if not drift:
            return False
        if record.replan_equivalent:
            return True
        raise StalePlanError(f"{drift}; plan again before the forward, or mark the plan replan_equivalent")

    def plan_drift(self, record: PlanRecord, backend: Planner) -> str:
        """Return how the batch, which is to run on `backend`, differs from the record of its plan:
        another backend, other sizes, KV pool or lengths; empty if it does not.
        """
        if record.planner is not backend:
            return f"planned by {record.planner!r}, about to run on {backend!r}"
        if (record.batch_size, record.num_tokens) != (self.batch_size, self.num_tokens):
            planned = f"{record.batch_size} requests and {record.num_tokens} tokens"
            return f"planned for {planned}, the batch now has {self.batch_size} and {self.num_tokens}"
        if record.generation != backend.generation:
            return f"planned over generation {record.generation} of the KV pool, it is now {backend.generation}"
        epoch, step = (None, 0) if self.turn is None else self.turn
        if record.epoch != epoch:
            return f"planned for the lengths of epoch {record.epoch}, the batch has the lengths of {epoch}"
        if step >= record.steps:
            return f"planned for {record.steps} forwards, this is one more"
        return ""
