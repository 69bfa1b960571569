"""One model on one device: stages batches, plans attention, runs eagerly or by graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from numpy.typing import NDArray
from torch import Tensor

from sglcore.device.batch import ScheduleBatch
from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.buffer_registry import BufferRegistry, FillContext
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext, forward_context
from sglcore.runtime.graph_runner import GraphRunner
from sglcore.runtime.memory.pools import WindowTable
from sglcore.runtime.memory.states import StatePool
from sglcore.runtime.staging import PinnedRing, StagedArrays
from sglcore.runtime.streams import Streams
from sglcore.runtime.token_table import TokenTable
from sglcore.step.snapshot_copies import entering_slots
from sglcore.step.tables import new_history
from sglcore.step.verification_rows import most_lens

if TYPE_CHECKING:
    from sglcore.runtime.overlap.micro_batches import Halves
    from sglcore.runtime.parallel.rank_groups import Groups


class Model(Protocol):
    """What the runner needs from a model."""

    @property
    def attention_layers(self) -> tuple[Attention, ...]:
        """The attention layers, indexed by their id."""
        ...

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states [T, hidden] after the last norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [N, vocab] for hidden states [N, hidden]."""
        ...

    def embed_ids(self, ids: Tensor) -> Tensor:
        """Return the embeddings [T, hidden] of ids [T], in the form of `input_embeds`."""
        ...


class Entered(Protocol):
    """Keeps data by slot that is invalid once the slot belongs to another request."""

    def enter(self, slots: Tensor) -> None:
        """Reset slots int32 [N], which now belong to new requests. Does not wait."""
        ...


class ModelRunner:
    """Composes a model, an attention backend, registries and graphs. A process may have several."""

    def __init__(
        self,
        model: Model,
        attn_backend: AttentionBackend,
        decode_registry: BufferRegistry,
        prefill_registry: BufferRegistry,
        token_table: TokenTable,
        graphs: GraphRunner | None = None,
        *,
        poison: bool = False,
        eager_input_no_copy: bool = False,
        streams: Streams = Streams(),
        is_narrow: bool = False,
        needs_host_lengths: bool = False,
        state_pool: StatePool | None = None,
        window_table: WindowTable | None = None,
        reads_history: bool = False,
        entered: Sequence[Entered] = (),
        groups: Groups | None = None,
        halves: Halves | None = None,
    ) -> None:
        """Options of a runner; the defaults are those of one rank without graphs.

        `is_narrow`: no device tensor may hold 64-bit integers. `needs_host_lengths`: no forward
        runs without host mirrors of its lengths. `window_table`: page table of sliding-window
        pages. `entered` are notified of slots that go to new requests. `groups`: the communication
        groups of this rank. `halves`: runs batches that are split into two micro-batches.
        """
        self.model = model
        self.attn_backend = attn_backend
        self.decode_registry = decode_registry
        self.prefill_registry = prefill_registry
        self.token_table = token_table
        self.graphs = graphs
        self.streams = streams
        self.groups, self.halves = groups, halves
        self.is_narrow = is_narrow
        self.state_pool = state_pool
        self.window_table = window_table
        self.history = token_table.history if reads_history else None
        self._needs_host_lengths = needs_host_lengths
        block = prefill_registry.block
        self.staging_ring = PinnedRing(block.device, block.pinned and not block.shares_memory)
        self._poison, self._entered = poison, tuple(entered)
        self._no_copy = eager_input_no_copy
        self._layers = model.attention_layers

    def registry_for(self, batch: ForwardBatch | ScheduleBatch) -> BufferRegistry:
        """Return the registry with the buffers of this kind of step."""
        return self.decode_registry if batch.forward_mode.is_decode else self.prefill_registry

    def init_batch(self, batch: ScheduleBatch, arrays: StagedArrays | None = None) -> ForwardBatch:
        """Stage a host batch on the device and return it.

        Includes page-table changes, inputs, last tokens, states that enter slots, and `arrays`. One
        copy to the device, or two if `arrays` is large. Does not wait.
        """
        registry = self.registry_for(batch)
        if self._poison:
            registry.poison()
        pages, history = self.attn_backend.req_to_token_pool.changes(batch), new_history(batch)
        windows = None if self.window_table is None else self.window_table.changes(batch)
        if self._entered and len(slots := entering_slots(batch)):
            arrays = arrays or StagedArrays()
            arrays.add(entered_slots=slots)
        if pages is None and history is None and arrays is None and windows is None:
            staged = ForwardBatch.init_new(batch, registry)
        else:
            staged = self._init_with(batch, registry, arrays or StagedArrays(), pages, windows, history)
        if batch.forward_mode.is_decode:
            self.token_table.resolve_decode(staged.input_ids, staged.req_pool_indices)
        else:
            self.token_table.resolve_future(staged.input_ids)
        return staged

    def init_rows(self, batch: ScheduleBatch, width: int, arrays: StagedArrays) -> ForwardBatch:
        """Return a decode batch with `width` rows per request of a host batch.

        The caller computes ids, positions, lengths and slots on the device. Stages page-table
        changes and `arrays`. Does not wait.
        """
        registry, size = self.decode_registry, batch.batch_size * width
        if self._poison:
            registry.poison()
        registry.ensure(size, size)
        pages = self.attn_backend.req_to_token_pool.changes(batch)
        if pages is not None:
            arrays.add(page_entries=pages[0], new_pages=pages[1])
        if arrays:
            arrays.pack(registry.block, self.staging_ring)
            registry.commit()
            arrays.arrive(registry.block)
        if pages is not None:
            self.attn_backend.req_to_token_pool.write(arrays.arrived["page_entries"], arrays.arrived["new_pages"])
        rows = registry.view(size, size, extend=False)
        rows.forward_mode, rows.width, rows.seq_lens_cpu = batch.forward_mode, width, most_lens(batch, width)
        rows.step_plan = batch.step_plan
        return rows

    def _init_with(
        self,
        batch: ScheduleBatch,
        registry: BufferRegistry,
        arrays: StagedArrays,
        pages: tuple[NDArray, ...] | None,
        windows: tuple[NDArray, ...] | None,
        history: tuple[NDArray, ...] | None,
    ) -> ForwardBatch:
        if pages is not None:
            arrays.add(page_entries=pages[0], new_pages=pages[1])
        if windows is not None:
            arrays.add(window_entries=windows[0], window_pages=windows[1])
        if history is not None:
            arrays.add(history_slots=history[0], history_positions=history[1], history_ids=history[2])
        registry.ensure(batch.batch_size, batch.num_tokens)
        arrays.pack(registry.block, self.staging_ring)
        staged = ForwardBatch.init_new(batch, registry)
        arrays.arrive(registry.block)
        arrived = arrays.arrived
        if pages is not None:
            self.attn_backend.req_to_token_pool.write(arrived["page_entries"], arrived["new_pages"])
        if self.window_table is not None and windows is not None:
            self.window_table.write(arrived["window_entries"], arrived["window_pages"])
        if self.state_pool is not None:
            self.state_pool.copy_in(arrived)
        if "entered_slots" in arrived:
            for each in self._entered:
                each.enter(arrived["entered_slots"])
        if history is not None:
            self.token_table.admit_history(*(arrived[f"history_{name}"] for name in ("slots", "positions", "ids")))
        return staged

    def forward(self, batch: ForwardBatch) -> tuple[Tensor, str]:
        """Return hidden states [T, hidden] and the path that ran.

        The path is "eager", "eager:halves", or kind and bucket of the graph.
        """
        if self.graphs is not None and self.graphs.can_run(batch):
            return self.graphs.run(batch), self.graphs.path(batch)
        is_whole = self.halves is None or self.halves.cut_of(batch) is None
        return self.run_eager(batch), "eager" if is_whole else "eager:halves"

    def run_eager(self, batch: ForwardBatch) -> Tensor:
        """Run one forward of the batch eagerly, in the runner's own context, never in an outer one.

        Raises ValueError if the batch has no host lengths and the runner needs them.
        """
        if self._needs_host_lengths and batch.seq_lens_cpu is None:
            raise ValueError("found a batch without seq_lens_cpu; wanted its lengths on the host too, as the facts say")
        view = self.prepared(batch)
        cut = None if self.halves is None else self.halves.cut_of(view)
        if self.halves is not None and cut is not None:
            return self.halves.run(self.model, self.context(view), view, cut)
        if view.needs_forward_metadata_init(self.attn_backend):
            view.mark_forward_metadata_ready(self.attn_backend.plan(view))
        with forward_context(self.context(view)):
            return self.model(view)

    def context(self, batch: ForwardBatch | None, attention: AttentionBackend | None = None) -> ForwardContext:
        """Return the context of a batch.

        With None, the context in which future batches are captured. `attention`: another backend
        with the same pools.
        """
        backend = self.attn_backend if attention is None else attention
        return ForwardContext(backend, batch, self._layers, state_pool=self.state_pool, history=self.history)

    def prepared(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch as an eager forward reads it, computed inputs included.

        Does not wait.
        """
        ctx = FillContext(batch.batch_size, batch.batch_size, batch.num_tokens, batch.num_tokens)
        registry = self.registry_for(batch)
        if registry.owns(batch):
            registry.fill_from(batch, ctx)
            return batch
        if self._no_copy:
            return replace(batch)
        registry.ensure(batch.batch_size, batch.num_tokens)
        registry.fill_from(batch, ctx)
        return registry.extract_buffer(batch, batch.batch_size, batch.num_tokens)

    def logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Return float32 [N, vocab] of the tokens `rows` int32[N] (None: all)."""
        return self.model.logits(hidden if rows is None else hidden.index_select(0, rows))

    def close(self) -> None:
        """Free the graphs and leave the communication groups. Waits for the device."""
        if self.graphs is not None:
            self.graphs.close()
        if self.groups is not None:
            self.groups.close()
