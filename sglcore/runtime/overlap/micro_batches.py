"""A batch as two micro-batches that are interleaved at collectives.

Each has its own plan, workspace and context.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend, AttentionPlan, Bucket
from sglcore.runtime.batch_split import filter_batch, refusal
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext, forward_context
from sglcore.runtime.overlap.interleave import take_turns
from sglcore.runtime.split_forward import Forward
from sglcore.step.micro_batch_cut import CutTerms
from sglcore.worker.step_plan import StepPlan


class Halves:
    """Implements `SplitForward`: runs batches as two micro-batches, with an attention backend for
    each.
    """

    def __init__(self, backends: tuple[AttentionBackend[Any], AttentionBackend[Any]], terms: CutTerms) -> None:
        """Raises ValueError if both backends are the same.

        The second micro-batch would overwrite the workspace of the first.
        """
        if backends[0] is backends[1]:
            raise ValueError(
                "both micro-batches were given one attention backend; wanted one for each, with its own workspace"
            )
        self.backends, self.terms = backends, terms

    def cut_of(self, batch: ForwardBatch) -> int | None:
        """Return the tokens of the first micro-batch, or None for a batch that runs whole.

        The result depends only on what every rank knows: the step plan if data-parallel shards
        agreed on one (an idle shard's micro-batches are empty), else the lengths.
        """
        if batch.step_plan is not None:
            return self._planned_cut(batch.step_plan)
        if refusal(batch):
            return None
        lengths = batch.extend_seq_lens_cpu
        if lengths is not None:
            return self.terms.of_prompts(lengths) or None
        width = batch.width or 1
        return self.terms.of_decode(batch.batch_size // width, width) or None

    def _planned_cut(self, plan: StepPlan) -> int | None:
        """Return the tokens of this shard's first micro-batch by the plan; None if the plan has no
        cuts, or if a shard with rows has too few of them.
        """
        least = self.terms.least_decode if plan.is_decode else self.terms.least
        if plan.cuts is None or any(0 < rows < least for rows in plan.global_num_tokens):
            return None
        return plan.cuts[plan.shard]

    def run(self, model: Forward, context: ForwardContext, batch: ForwardBatch, cut: int) -> Tensor:
        """Return hidden states [T, H] of a batch split after `cut` tokens.

        `context` is common to both micro-batches. Does not wait for the device. An exception in one
        micro-batch is raised after the other has been ended.
        """
        parts = self.parts(batch, cut)
        for part, backend in zip(parts, self.backends, strict=True):
            part.mark_forward_metadata_ready(backend.plan(part))
        return self.forward(model, context, parts)

    def captured(self, size: int) -> CapturedHalves | None:
        """Return the micro-batches of decodes with `size` rows, with plans for a capture.

        None if these run whole.
        """
        cut = self.terms.of_decode(size)
        if not cut:
            return None
        first, second = self.backends
        plans = first.capture_plan(Bucket(cut, cut)), second.capture_plan(Bucket(size - cut, size - cut))
        return CapturedHalves(self, cut, plans)

    def parts(self, batch: ForwardBatch, cut: int) -> tuple[ForwardBatch, ForwardBatch]:
        """Return the two micro-batches, with the tokens [0, cut) and the others, without attention
        plans; each has its half of the step plan of data-parallel shards, if there is one.
        """
        first, second = filter_batch(batch, 0, cut), filter_batch(batch, cut, batch.num_tokens)
        plan = batch.step_plan
        if plan is not None and plan.cuts is not None:
            first.step_plan, second.step_plan = plan.halves()
        return first, second

    def forward(self, model: Forward, context: ForwardContext, parts: tuple[ForwardBatch, ForwardBatch]) -> Tensor:
        """Run two planned micro-batches interleaved, and return the hidden states [T, H] of the
        first, then of the second.
        """
        contexts = [
            replace(context, attn_backend=backend, batch=part)
            for backend, part in zip(self.backends, parts, strict=True)
        ]
        plan = parts[0].step_plan
        is_decode = parts[0].forward_mode.is_decode if plan is None else plan.is_decode
        stagger = self.terms.staggers.decode if is_decode else self.terms.staggers.prompts
        first, second = (partial(_forward, model, each, part) for each, part in zip(contexts, parts, strict=True))
        return torch.cat(take_turns(first, second, stagger))


@dataclass(frozen=True, slots=True)
class CapturedHalves:
    """Implements `CapturedSplit`: where the batch of one bucket is split, and the plan of each
    micro-batch.
    """

    halves: Halves
    cut: int
    plans: tuple[AttentionPlan, AttentionPlan]

    def refresh(self, batch: ForwardBatch) -> None:
        """Update both plans for a captured batch before a replay.

        Raises TypeError for a backend with graph updates: a graph takes one.
        """
        parts = self.halves.parts(batch, self.cut)
        backend: Any
        for backend, plan, part in zip(self.halves.backends, self.plans, parts, strict=True):
            if backend.refresh(plan, part) is not None:
                raise TypeError(
                    f"{type(backend).__name__} updates captured graphs, which cannot hold two micro-batches"
                )

    def forward(self, model: Forward, context: ForwardContext, batch: ForwardBatch) -> Tensor:
        """Return hidden states [T, H] of the captured batch. Runs inside the capture.

        The number of real rows of each micro-batch is computed on the device.
        """
        parts = self.halves.parts(batch, self.cut)
        for part, plan in zip(parts, self.plans, strict=True):
            part.mark_forward_metadata_ready(plan)
        return self.halves.forward(model, context, parts)


def _forward(model: Forward, context: ForwardContext, part: ForwardBatch) -> Tensor:
    with forward_context(context):
        return model(part)
