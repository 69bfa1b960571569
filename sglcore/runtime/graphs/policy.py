"""What both policies share: a generation that must hold, inputs that graphs do not read, the view of the real rows."""

from __future__ import annotations

from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.buffer_registry import BufferRegistry
from sglcore.runtime.forward_batch import ForwardBatch, StalePlanError
from sglcore.runtime.forward_context import ForwardContext, forward_context
from sglcore.step.fields import Axis, Split, specs
from sglcore.step.host_values import host_arrays


def check_generation(what: str, captured: int, backend: AttentionBackend) -> None:
    """Raise StalePlanError if the KV pool moved since `what` was captured."""
    now = backend.token_to_kv_pool.generation
    if captured != now:
        raise StalePlanError(
            f"the graph of bucket {what} was captured over generation {captured} of the KV pool, it is now {now}; "
            "capture again after replacing the pool: GraphRunner.recapture()"
        )


def absent_inputs(captured: ForwardBatch) -> tuple[str, ...]:
    """Inputs of a model that a captured batch does not have, so that its graph can not read them."""
    inputs = [s for s in specs(type(captured)) if s.is_buffered or s.axis is Axis.TOKENS or s.split is Split.NESTED]
    return tuple(spec.name for spec in inputs if getattr(captured, spec.name) is None)


def has_only(batch: ForwardBatch, absent: tuple[str, ...]) -> bool:
    """The batch brings none of the inputs that graphs do not read."""
    return all(getattr(batch, name) is None for name in absent)


def carry_host_arrays(batch: ForwardBatch, captured: ForwardBatch) -> None:
    """Give a captured batch what another one keeps on the host."""
    for spec in host_arrays(type(batch)):
        setattr(captured, spec.name, getattr(batch, spec.name))


def read_host_arrays(captured: ForwardBatch) -> None:
    """Mirror the tensors of a captured batch on the host, as they are now. Waits."""
    for spec in host_arrays(type(captured)):
        tensor = getattr(captured, spec.mirror) if spec.mirror else None
        if tensor is not None:
            setattr(captured, spec.name, tensor.cpu().numpy())


def real_view(registry: BufferRegistry, batch: ForwardBatch) -> ForwardBatch:
    """The batch's real rows over the registry's buffers."""
    return batch if registry.owns(batch) else registry.extract_buffer(batch, batch.batch_size, batch.num_tokens)


def planned(backend: AttentionBackend, view: ForwardBatch, context: ForwardContext) -> forward_context:
    """The scope of one forward of `view`, planned first if it is not. A plan for another forward raises StalePlanError."""
    if view.needs_forward_metadata_init(backend):
        view.mark_forward_metadata_ready(backend.plan(view))
    return forward_context(ForwardContext(backend, view, context.layers))


def cells_of(view: ForwardBatch) -> Tensor | None:
    """The KV cells that a forward of the view writes; None for a model without them."""
    return view.out_cache_loc
