"""One model on one device: stages batches, plans attention, runs eagerly or by graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.buffer_registry import BufferRegistry, FillContext
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext, forward_context
from sglcore.runtime.graph_runner import GraphRunner
from sglcore.runtime.memory.pools import WindowTable
from sglcore.runtime.memory.states import StatePool
from sglcore.runtime.slot_tables import Entered, EnteringSlots, SlotTable
from sglcore.runtime.split_forward import Forward, SplitForward
from sglcore.runtime.staging import PinnedRing, StagedArrays
from sglcore.runtime.streams import Streams
from sglcore.runtime.token_table import TokenTable
from sglcore.sampling.sampler import Sampler
from sglcore.step.verification_rows import most_lens
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore.worker.step_plan import StepPlan


class Model(Protocol):
    """A model as the runner calls it: a callable from a batch to hidden states, with the output
    layer and the embedding of ids.
    """

    @property
    def attention_layers(self) -> tuple[Attention, ...]:
        """The attention layers, indexed by their id."""
        ...

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states [T, hidden] after the last norm."""
        ...

    def with_norm_inputs(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return hidden states as a call does, and the inputs [T, hidden] of the last norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [N, vocab] for hidden states [N, hidden]."""
        ...

    def embed_ids(self, ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden] of ids [T], in the form of `input_embeds`."""
        ...


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How a runner stages its batches. The defaults are those of an ordinary device."""

    poison: bool = False
    """Fill the buffers with invalid values before each step, so that a missing write shows."""
    eager_input_no_copy: bool = False
    """An eager forward reads the tensors of a batch outside the buffers in place, without copying
    them to the buffers.
    """
    is_narrow: bool = False
    """No device tensor may hold 64-bit integers."""
    needs_host_lengths: bool = False
    """No forward runs without lengths on the host, because graphs or attention need them."""
    needs_exact_lengths: bool = False
    """These lengths must be exact: upper bounds do not suffice."""


class Ranks(Protocol):
    """The part of `Groups`, the communication groups of a rank, that a runner uses."""

    @property
    def has_shards(self) -> bool:
        """Whether some ranks serve other requests than this one."""
        ...

    def make_sampler(self, *given: Any, **named: Any) -> Sampler:
        """Return the sampler of this rank; the parameters are those of `Sampler`."""
        ...

    def reason_against_graphs(self, kind: str) -> str:
        """Return why the ranks cannot replay steps as this kind of graph; empty if they can."""
        ...

    def plan_of_bucket(self, rows: int) -> StepPlan | None:
        """Return the plan under which decode graphs of `rows` rows are captured; None if this rank
        has the requests of all.
        """
        ...

    def check_same(self, what: str, value: object) -> None:
        """Raise CollectiveError unless all ranks call this with an equal `value`, for which `what`
        is the name. Waits for all ranks.
        """
        ...

    def close(self) -> None:
        """Leave the communication groups. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Extensions:
    """What optional features add to a runner."""

    state_pool: StatePool | None = None
    """The states of recurrent layers."""
    window_table: WindowTable | None = None
    """The page table of sliding-window pages."""
    entered: tuple[Entered, ...] = ()
    """Their `enter` is called with the slots that go to new requests."""
    tables: tuple[SlotTable, ...] = ()
    """Tables by slot of optional features."""
    halves: SplitForward | None = None
    """Runs batches that are split into two micro-batches."""
    ranks: Ranks | None = None
    """The ranks that share the model. None: this is the only one."""


class ModelRunner:
    """Runs the forwards of one model on one device: `init_batch` stages a host batch, `forward`
    plans attention and runs it eagerly or by graph. A process may have several.
    """

    def __init__(
        self,
        model: Model,
        attn_backend: AttentionBackend,
        decode_registry: BufferRegistry,
        prefill_registry: BufferRegistry,
        token_table: TokenTable,
        options: RunnerOptions = RunnerOptions(),
        extensions: Extensions = Extensions(),
        streams: Streams = Streams(),
    ) -> None:
        self.model = model
        self.attn_backend = attn_backend
        self.decode_registry = decode_registry
        self.prefill_registry = prefill_registry
        self.token_table = token_table
        self.graphs: GraphRunner | None = None
        """Set once they are captured."""
        self.options, self.extensions, self.streams = options, extensions, streams
        self.is_narrow = options.is_narrow
        self.halves, self.state_pool = extensions.halves, extensions.state_pool
        block = prefill_registry.block
        self.staging_ring = PinnedRing(block.device, block.pinned and not block.shares_memory)
        entering = EnteringSlots(extensions.entered) if extensions.entered else None
        tables: tuple[SlotTable | None, ...] = (
            attn_backend.req_to_token_pool,
            extensions.window_table,
            extensions.state_pool,
            entering,
            token_table,
            *extensions.tables,
        )
        self._tables = tuple(table for table in tables if table is not None)
        self._layers = model.attention_layers

    def registry_for(self, batch: ForwardBatch | ScheduleBatch) -> BufferRegistry:
        """Return the registry with the buffers of this kind of step."""
        return self.decode_registry if batch.forward_mode.is_decode else self.prefill_registry

    def init_batch(self, batch: ScheduleBatch, arrays: StagedArrays | None = None, width: int = 0) -> ForwardBatch:
        """Stage a host batch on the device and return it.

        Includes changes of the tables by slot, and `arrays`. One copy to the device, or two if
        `arrays` is large. Input ids that the host does not know are read from the token table.
        With `width`, a decode batch with that many rows per request is returned instead; the caller
        computes its ids, positions, lengths and slots on the device. Does not wait.
        """
        registry = self.registry_for(batch)
        if self.options.poison:
            registry.poison()
        changes: dict[str, NDArray] = {}
        for table in self._tables:
            changes.update(table.changes(batch))
        if changes:
            arrays = StagedArrays() if arrays is None else arrays
            arrays.add(**changes)
        size = batch.batch_size * width
        if arrays or width:
            registry.ensure(size or batch.batch_size, size or batch.num_tokens)
        if arrays:
            arrays.pack(registry.block, self.staging_ring)
        if width:
            staged, has_values = registry.stage_wide(batch, width)
            staged.width, staged.seq_lens_cpu = width, most_lens(batch, width)
            if arrays or has_values:
                registry.commit()
        else:
            staged = ForwardBatch.init_new(batch, registry)
        if arrays:
            arrays.arrive(registry.block)
            for table in self._tables:
                table.apply(arrays.arrived)
        if width:
            return staged
        if batch.forward_mode.is_decode:
            self.token_table.resolve_decode(staged.input_ids, staged.req_pool_indices)
        else:
            self.token_table.resolve_future(staged.input_ids)
        return staged

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, str]:
        """Return hidden states [T, hidden] and the path that ran: kind and bucket of the graph,
        such as "full:8", or "eager". The latter is followed by ":halves" if two micro-batches were
        interleaved, and by ":" and the name of each input of the batch that its graph does not
        read. Hidden states of a graph are overwritten by its next replay. Does not wait.

        Raises RuntimeError if data-parallel shards agreed on a replay that this rank cannot run:
        the other ranks would wait for an eager forward.
        """
        if self.graphs is not None and self.graphs.can_run(batch):
            return self.graphs.run(batch), self.graphs.path(batch)
        if batch.step_plan is not None and batch.step_plan.bucket is not None:
            raise self._cannot_replay(batch, batch.step_plan.bucket)
        return self.run_eager(batch), self._eager_path(batch)

    def forward_both(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None, str]:
        """Return hidden states and path as `forward`, and between them the inputs [T, H] of the
        last norm if the batch has `return_hidden_states_before_norm`, else None.

        No graph has these, so such a batch runs eagerly; where graphs are captured, the path names
        the field.
        """
        if not batch.return_hidden_states_before_norm:
            hidden, path = self.forward(batch)
            return hidden, None, path
        if batch.step_plan is not None and batch.step_plan.bucket is not None:
            raise self._cannot_replay(batch, batch.step_plan.bucket)
        model = _Joined(self.model)
        both = self.run_eager(batch, model)
        hidden, before = both.split([both.shape[-1] - model.size, model.size], -1)
        return hidden.contiguous(), before, self._eager_path(batch)

    def _eager_path(self, batch: ForwardBatch) -> str:
        is_whole = self.halves is None or self.halves.cut_of(batch) is None
        unread = () if self.graphs is None else self.graphs.unread(batch)
        return ":".join(("eager", *(() if is_whole else ("halves",)), *unread))

    def replayed(self, plan: StepPlan) -> StepPlan:
        """Return the plan of a forward of this runner in which every data-parallel shard has decode
        rows or none, with the graph that all of them replay, if there is one (`StepPlan.replayed`).
        All ranks captured the same sizes, so each returns the same.
        """
        return plan.replayed(() if self.graphs is None else self.graphs.buckets)

    def _cannot_replay(self, batch: ForwardBatch, bucket: int) -> RuntimeError:
        sizes = () if self.graphs is None else self.graphs.buckets
        unread = () if self.graphs is None else self.graphs.unread(batch)
        has = f"{batch.num_tokens} rows" + (f" with {', '.join(unread)}, which graphs do not read" if unread else "")
        captured = ", ".join(map(str, sizes)) or "none"
        return RuntimeError(
            f"the shards agreed to replay the graph of {bucket} rows, and this rank has {has}; captured: {captured}"
        )

    def run_eager(self, batch: ForwardBatch, model: Forward | None = None) -> Tensor:
        """Run one forward of the batch eagerly, in the runner's own context, never in an outer one.

        `model`: called in place of the runner's model (None: that one). Raises ValueError if the
        batch has no host lengths and the runner needs them.
        """
        if self.options.needs_host_lengths and batch.seq_lens_cpu is None:
            raise ValueError("found a batch without seq_lens_cpu; wanted its lengths on the host too, as the facts say")
        view, model = self.prepared(batch), self.model if model is None else model
        cut = None if self.halves is None else self.halves.cut_of(view)
        if self.halves is not None and cut is not None:
            return self.halves.run(model, self.context(view), view, cut)
        if view.needs_forward_metadata_init(self.attn_backend):
            view.mark_forward_metadata_ready(self.attn_backend.plan(view))
        with forward_context(self.context(view)):
            return model(view)

    def context(self, batch: ForwardBatch | None, attention: AttentionBackend | None = None) -> ForwardContext:
        """Return the context of a batch.

        With None, the context in which future batches are captured. `attention`: another backend
        with the same pools.
        """
        backend = self.attn_backend if attention is None else attention
        return ForwardContext(backend, batch, self._layers, state_pool=self.state_pool)

    def prepared(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch as an eager forward reads it, computed inputs included. Does not wait.

        A batch that is not in the registry's buffers is copied into them; with
        `eager_input_no_copy` it is returned as it is, in a new object, without computing inputs.
        """
        ctx = FillContext(batch.batch_size, batch.batch_size, batch.num_tokens, batch.num_tokens)
        registry = self.registry_for(batch)
        if registry.owns(batch):
            registry.fill_from(batch, ctx)
            return batch
        if self.options.eager_input_no_copy:
            return replace(batch)
        registry.ensure(batch.batch_size, batch.num_tokens)
        registry.fill_from(batch, ctx)
        return registry.extract_buffer(batch, batch.batch_size, batch.num_tokens)

    def logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Return logits float32 [N, vocab] of the rows `rows` int32[N] of hidden [T, H] (None:
        all).
        """
        return self.model.logits(hidden if rows is None else hidden.index_select(0, rows))

    def close(self) -> None:
        """Free the graphs and leave the communication groups. Waits for the device."""
        if self.graphs is not None:
            self.graphs.close()
        if self.extensions.ranks is not None:
            self.extensions.ranks.close()


class _Joined:
    """Calls a model that also returns the inputs of its last norm, and joins both results to
    [T, H + size]: a batch may run in two micro-batches, which are joined by rows."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.size = 0
        """Elements of a norm input, after the call."""

    def __call__(self, batch: ForwardBatch) -> Tensor:
        hidden, before = self._model.with_norm_inputs(batch)
        self.size = before.shape[-1]
        return torch.cat([hidden, before], -1)
