"""`SizedGraphs`, the base of `DecodeGraphs` and `PromptGraphs`, and its checks: whether pools have
other addresses than at capture, and whether a batch has inputs that the graph lacks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Generic, TypeVar

from sglcore.runtime.buffer_registry import BufferRegistry, FillContext
from sglcore.runtime.forward_batch import ForwardBatch, StalePlanError
from sglcore.runtime.forward_context import ForwardContext, forward_context
from sglcore.runtime.graphs.graph_backend import Forward
from sglcore.step.batch_field import Axis, Split, specs
from sglcore.step.host_values import host_arrays
from sglcore.worker.schedule_batch import ForwardMode
from sglcore.worker.step_plan import bucket_for

Captured = TypeVar("Captured")
NORM_INPUTS = "return_hidden_states_before_norm"
"""The field of a batch that keeps it from the graphs: they have no output for it."""


def generation(context: ForwardContext) -> tuple[int, int]:
    """Return the generations of KV pool and states (0 without states); a graph depends on their
    addresses.
    """
    states = context.state_pool
    return context.attn_backend.generation, 0 if states is None else states.generation


def check_generation(what: str, captured: tuple[int, int], context: ForwardContext) -> None:
    """Raise StalePlanError if the KV pool or the states moved since `what` was captured."""
    for pool, before, now in zip(("the KV pool", "the states"), captured, generation(context), strict=True):
        if before != now:
            raise StalePlanError(
                f"the graph of bucket {what} was captured over generation {before} of {pool}, it is now {now}; "
                "capture again after replacing the pool: GraphRunner.recapture()"
            )


def absent_inputs(captured: ForwardBatch) -> tuple[str, ...]:
    """Return the names of the model inputs that are None in a captured batch; its graph does not
    read them.
    """
    inputs = [s for s in specs(type(captured)) if s.is_buffered or s.axis is Axis.TOKENS or s.split is Split.NESTED]
    return tuple(spec.name for spec in inputs if getattr(captured, spec.name) is None)


def carry_host_arrays(batch: ForwardBatch, captured: ForwardBatch) -> None:
    """Set the host arrays of a captured batch to those of `batch`, without a copy."""
    for spec in host_arrays(type(batch)):
        setattr(captured, spec.name, getattr(batch, spec.name))


def read_host_arrays(captured: ForwardBatch) -> None:
    """Set the host arrays of a captured batch to copies of the tensors that they mirror. Waits."""
    for spec in host_arrays(type(captured)):
        tensor = getattr(captured, spec.mirror) if spec.mirror else None
        if tensor is not None:
            setattr(captured, spec.name, tensor.cpu().numpy())


def real_view(registry: BufferRegistry, batch: ForwardBatch) -> ForwardBatch:
    """Return the batch's real rows as views of the registry's buffers; the batch itself if its
    tensors are these buffers.
    """
    return batch if registry.owns(batch) else registry.extract_buffer(batch, batch.batch_size, batch.num_tokens)


def planned(view: ForwardBatch, context: ForwardContext) -> forward_context:
    """Return a context manager in which `view` is the batch of the forward context; plan attention
    and record the plan on `view` first, unless it has one.

    Raises StalePlanError for a plan of another forward.
    """
    if view.needs_forward_metadata_init(context.attn_backend):
        view.mark_forward_metadata_ready(context.attn_backend.plan(view))
    return forward_context(replace(context, batch=view))


class SizedGraphs(ABC, Generic[Captured]):
    """Captures one graph for each size (requests of a decode, tokens of a prefill), and finds the
    graph for a batch. Subclasses implement capture and replay.

    Keeps alive what each graph reads.
    """

    def __init__(
        self, registry: BufferRegistry, context: ForwardContext, forward: Forward, sizes: Iterable[int], most: int
    ) -> None:
        """Freeze the registry; captures nothing yet. Sizes above `most` are left out."""
        self.registry = registry
        self.sizes = tuple(sorted(size for size in set(sizes) if 0 < size <= most))
        self._context = context
        self._forward = forward
        self._captured: dict[int, Captured] = {}
        self._absent: tuple[str, ...] = ()
        registry.freeze()

    def capture(self) -> Iterator[int]:
        """Capture every size, the largest first; yield each size when it is done. Nothing is
        captured before the result is iterated.
        """
        for size in reversed(self.sizes):
            self._captured[size] = self._capture(size)
            yield size

    def drop(self) -> None:
        """Drop the captured graphs; the mechanism frees them."""
        self._captured.clear()

    def bucket_for(self, size: int) -> int | None:
        """Return the smallest of `sizes` that is at least `size`; None if there is none, or if
        `size` is 0.
        """
        return bucket_for(size, self.sizes)

    @abstractmethod
    def _capture(self, size: int) -> Captured: ...

    def _static_batch(self, batch_size: int, num_tokens: int, mode: ForwardMode) -> ForwardBatch:
        """Return a batch of padding over the registry's buffers, for a capture; note which inputs
        it lacks, for `unread`.
        """
        template = self.registry.view(batch_size, num_tokens, extend=mode is ForwardMode.EXTEND)
        template.forward_mode = mode
        self.registry.fill_from(template, FillContext(0, batch_size, 0, num_tokens))
        batch = self.registry.extract_buffer(template, batch_size, num_tokens)
        self._absent = absent_inputs(batch)
        return batch

    def can_run(self, batch: ForwardBatch) -> bool:
        """Return whether a graph can run the batch: it fits one, and the graph reads all its
        inputs."""
        return self._fits(batch) and not self._unread(batch)

    def unread(self, batch: ForwardBatch) -> tuple[str, ...]:
        """Return the names of the inputs that keep the batch from a graph that it fits otherwise;
        empty if it fits none, or if a graph can run it.
        """
        return self._unread(batch) if self._fits(batch) else ()

    @abstractmethod
    def _fits(self, batch: ForwardBatch) -> bool:
        """Return whether there is a graph for the batch's kind of step and size."""

    def _unread(self, batch: ForwardBatch) -> tuple[str, ...]:
        found = tuple(name for name in self._absent if getattr(batch, name) is not None)
        return (*found, NORM_INPUTS) if batch.return_hidden_states_before_norm else found
