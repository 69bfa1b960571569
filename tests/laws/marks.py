"""Records every attention plan and every attention call by it, in all runners of a process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend, AttentionPlan, Bucket
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import ModelRunner
from tests.laws.proposers import InFlight


@dataclass(frozen=True)
class Made:
    """The state when a plan was made: the forward, the sizes, and the lengths (empty for a captured
    size)."""

    plan: AttentionPlan
    forward: int
    size: tuple[int, int]
    lengths: list[int] = field(default_factory=list)


@dataclass
class Marks:
    """Checks every attention plan and call of all runners of a process. `attended` lists each call:
    the backend, the plan, the draft step (`batch.turn`), and the number of steps in flight."""

    made: dict[int, Made] = field(default_factory=dict)
    attended: list[tuple[AttentionBackend[Any], Made, Any, int]] = field(default_factory=list)
    forwards: int = 0
    watched: InFlight | None = None

    def note(self, plan: AttentionPlan, size: tuple[int, int], lengths: list[int]) -> None:
        """Record a new plan."""
        self.made[id(plan)] = Made(plan, self.forwards, size, lengths)

    def look(self, backend: AttentionBackend[Any], batch: ForwardBatch | None) -> None:
        """Check that a layer attends by a plan of this backend, size, lengths and forward."""
        assert batch is not None
        record = batch.plan_record
        assert record is not None
        made = self.made[id(record.plan)]
        assert record.planner is made.plan.planner is backend
        assert made.size == (batch.batch_size, batch.num_tokens), "a plan of another size"
        if made.lengths:
            assert made.lengths == batch.seq_lens.tolist(), "a plan for other lengths"
            most = batch.seq_lens_cpu
            assert most is not None and (most >= batch.seq_lens.numpy()).all(), "more tokens than the host was told"
            if batch.forward_mode.is_decode:
                nobodys = batch.seq_lens[batch.req_pool_indices == 0]
                assert (nobodys == 1).all(), "a row that is nobody's sees more than itself"
            assert batch.turn is not None or made.forward == self.forwards, "a plan of a step before"
        self.attended.append((backend, made, batch.turn, 0 if self.watched is None else self.watched.now))

    def plans_of(self, runner: ModelRunner) -> list[int]:
        """Return the forwards in which the plans used by a runner's attention were made."""
        return sorted({made.forward for backend, made, *_ in self.attended if backend is runner.attn_backend})


def watched_marks(kind: Any, patch: pytest.MonkeyPatch) -> Marks:
    """Watch all runners with backends of a kind from now on."""
    found = Marks()
    plan, capture_plan, attend, run = kind.plan, kind.capture_plan, AttentionBackend.forward, ModelRunner.forward

    def planning(backend: Any, batch: ForwardBatch) -> AttentionPlan:
        made = plan(backend, batch)
        found.note(made, (batch.batch_size, batch.num_tokens), batch.seq_lens.tolist())
        return made

    def planning_a_capture(backend: Any, bucket: Bucket) -> AttentionPlan:
        made = capture_plan(backend, bucket)
        found.note(made, (bucket.batch_size, bucket.num_tokens), [])
        return made

    def attending(backend: Any, q: Tensor, k: Any, v: Any, layer: Any, batch: ForwardBatch | None) -> Tensor:
        hidden = attend(backend, q, k, v, layer, batch)
        found.look(backend, batch)
        return hidden

    def running(runner: ModelRunner, batch: ForwardBatch) -> tuple[Tensor, str]:
        found.forwards += 1
        return run(runner, batch)

    patch.setattr(kind, "plan", planning)
    patch.setattr(kind, "capture_plan", planning_a_capture)
    patch.setattr(AttentionBackend, "forward", attending)
    patch.setattr(ModelRunner, "forward", running)
    return found
