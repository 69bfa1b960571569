"""The attention contract: `plan` runs outside the forward, `attend` inside.

A plan is all that passes between them. `plan` may allocate and read host data. `attend` runs inside
graphs and reads nothing on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast, final

from torch import Tensor

from sglcore.core.errors import ConfigError
from sglcore.runtime.forward_batch import ForwardBatch, StalePlanError
from sglcore.runtime.memory.kv_rows import ROWS
from sglcore.runtime.memory.pools import CELL_MAJOR

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.kernels.entry import Entry
    from sglcore.runtime.kernels.kernel_choice import Call
    from sglcore.runtime.kernels.table import KernelTable
    from sglcore.runtime.memory.pools import KVPool, ReqToTokenPool, TokenToKVPool
    from sglcore.step.hisparse_config import StepSwaps
    from sglcore.worker.schedule_batch import ScheduleBatch


class Unavailable(ImportError):
    """Raised by a backend's module on import if a library that it needs is missing.

    The text names the library and the remedy. Requirements on the device are checked by
    `AttentionBackend.unavailable`, because an import must not query a device.
    """


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What an attention backend can do. Each backend declares it, and selection reads it."""

    index_dtype: str | None = None
    """The type of KV slot indices. None: any."""
    page_sizes: tuple[int, ...] | None = None
    """Page sizes in tokens. None: any."""
    head_dims: tuple[int, ...] | None = None
    """Elements of a head. None: any."""
    dtypes: tuple[str, ...] | None = None
    """Element types. None: any."""
    padding_len: int = 1
    """The sequence length of padding rows."""
    features: frozenset[str] = frozenset()
    """Features beyond causal attention over pages."""
    takes_stored: bool = False
    """New keys and values are read from the KV pool only, so `k` and `v` may be None."""
    layouts: tuple[str, ...] | None = (CELL_MAJOR,)
    """Layouts of the pools that the backend reads. None: any, because it only calls
    `read_cells`."""
    library: str = ""
    """The vendor's library whose functions it calls: a start tries them with one token, and takes
    the next backend if they fail. Empty: it calls none."""
    needs_host_lengths: bool = False
    """Whether decode results depend on `seq_lens_cpu`, which must then be exact (see
    `masks_bounds`): with speculation each step waits for the tokens accepted by the one before. If
    False, `plan` takes upper bounds there, and `refresh` also a batch without `*_cpu` mirrors."""
    masks_bounds: bool = False
    """With `needs_host_lengths`: upper bounds suffice if `AttentionShape.has_bounds`, because the
    backend masks what lies between a row's length on the device and its bound. It may read these
    KV slots: they hold older keys and values, or zeros."""
    takes_bounds: bool = True
    """Whether rows with exact lengths on the host get right results although those of other rows
    are upper bounds. Steps that verify draft tokens have such rows: those that are not verified,
    and all of a draft. Without it the backend is refused for speculation."""

    @property
    def needs_exact_lengths(self) -> bool:
        """Whether upper bounds of lengths on the host give wrong results in decode steps."""
        return self.needs_host_lengths and not self.masks_bounds

    def takes_layout(self, layout: str) -> bool:
        """Return whether the backend reads a pool of this layout."""
        return self.layouts is None or layout in self.layouts


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention that a model needs from a backend.

    `num_heads` are the query heads of the layer that has most. `layers` has (kv_heads, head_dim) of
    each layer. `windows` and `softcaps` are the distinct values that occur (None: a layer without);
    `features` are those that the layers need. `is_encoder`: the model embeds and does not decode.
    `has_bounds`: in decode steps the lengths on the host may be upper bounds, as in steps with
    draft tokens.
    """

    num_heads: int
    layers: tuple[tuple[int, int], ...]
    windows: tuple[int | None, ...] = (None,)
    is_encoder: bool = False
    features: frozenset[str] = frozenset()
    softcaps: tuple[float | None, ...] = (None,)
    has_bounds: bool = False


@dataclass(frozen=True, slots=True)
class Bucket:
    """The padded size of a forward that a graph captures, for `AttentionBackend.capture_plan`: the
    requests (`batch_size`) and the tokens of all of them.
    """

    batch_size: int
    num_tokens: int


@dataclass(slots=True)
class AttentionPlan:
    """The base of all plans: what `AttentionBackend.plan` prepares for one batch and `attend`
    reads.

    `planner` is the backend that made it. `generation` is the pool's generation; the plan may hold
    addresses of its KV slots.
    """

    planner: AttentionBackend[Any]
    generation: int


Plan = TypeVar("Plan", bound=AttentionPlan)
HostUpdate = object
"""Values that a replay must patch into the graph. Only the vendor's graph backend reads them."""


class RowsOnHost(Protocol):
    """Brings rows of a pool in host memory to attention on the device.

    Backends with the feature `hisparse` pass what `plan` returns to `rows_read`
    (`sparse/host_rows.py`); this module does not know its type.
    """

    def plan(self, batch: ForwardBatch) -> Any:
        """Return the host rows of one forward, and start the first copies of a prefill."""
        ...

    def capture_plan(self, num_tokens: int) -> Any:
        """Return the plan of any decode step of `num_tokens` tokens."""
        ...

    def second(self) -> RowsOnHost:
        """Return what plans second micro-batches over the same rows."""
        ...

    def count(self, batch: ScheduleBatch, width: int | None = None) -> StepSwaps[Tensor]:
        """Return the swap statistics of the step that was just queued, with `width` rows per
        request if it verified draft tokens. Does not wait.
        """
        ...


class AttentionBackend(ABC, Generic[Plan]):
    """The base of attention backends: one object attends in every layer over the paged KV pool. It
    uses only what the constructor receives.

    A batch is planned first, by `plan`, or by `capture_plan` once and `refresh` before each replay;
    then each layer calls `forward`.
    """

    facts: AttentionFacts

    def __init__(
        self,
        shape: AttentionShape,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: KVPool,
        kernels: KernelTable,
        hisparse: Any = None,
    ) -> None:
        """`hisparse` is a `RowsOnHost` or None, for backends with that feature.

        Raises ConfigError if the facts do not name the layout of the pool.
        """
        layout = token_to_kv_pool.layout
        if not self.facts.takes_layout(layout):
            raise ConfigError(
                f"{type(self).__name__} was given keys and values laid out {layout}",
                wanted=f"one of {', '.join(self.facts.layouts or ())}",
                remedy="name the layout in its facts, or choose another --attention-backend",
            )
        # The table's store entries take these layouts only.
        self.takes_stored = self.facts.takes_stored and layout in (CELL_MAJOR, ROWS)
        self.shape = shape
        self.req_to_token_pool = req_to_token_pool
        # A backend knows the storage of each layout that its facts name.
        self.token_to_kv_pool: Any = token_to_kv_pool
        self.kernels = kernels
        self.hisparse: RowsOnHost | None = hisparse

    @property
    def parts(self) -> tuple[AttentionBackend[Any], ...]:
        """The backends that attend: this one, unless it is composed of others."""
        return (self,)

    @property
    def generation(self) -> int:
        """A number that changes when an address of keys or values changes."""
        return self.token_to_kv_pool.generation

    def cells_of(self, layer: Attention, batch: ForwardBatch) -> tuple[TokenToKVPool, Tensor | None]:
        """Return the pool of a layer, and the KV slots int[T] of this batch's tokens in it (None:
        the batch has no KV slots).
        """
        return self.token_to_kv_pool, batch.out_cache_loc

    def rows_of(self, batch: ForwardBatch) -> list[tuple[Tensor, Tensor]]:
        """Return tensors that a forward of this batch writes besides the keys and values at
        `cells_of`, each with the rows int[N] written. Empty unless a backend overrides it.
        """
        return []

    @classmethod
    def unavailable(cls) -> str:
        """Return why the backend cannot run on the current device, with the remedy; empty if it
        can.

        Selection calls it once. A missing library is reported by `Unavailable` when the module is
        imported.
        """
        return ""

    @classmethod
    def remark(cls) -> str:
        """Return what the ledger says of the backend once it is chosen, besides the reason; empty
        if there is nothing to say.
        """
        return ""

    @classmethod
    def calls(cls, layer: Attention, table: ReqToTokenPool) -> Iterable[tuple[Entry[Any], Call]]:
        """Return the kernel entries that a layer needs with this backend, with example arguments.

        That is `Attention.calls`, unless the backend calls an entry with other arguments than the
        layer says. `table` has the page size and the most tokens of a request.
        """
        return layer.calls(table.page_size)

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> Plan:
        """Return a new plan of a batch for `attend`; the caller records it with the batch's
        `mark_forward_metadata_ready`. Host work and allocation are allowed.
        """

    @abstractmethod
    def capture_plan(self, bucket: Bucket) -> Plan:
        """Return a plan for capture: its addresses never change, `refresh` writes its contents."""

    @abstractmethod
    def refresh(self, plan: Plan, batch: ForwardBatch) -> HostUpdate | None:
        """Update a captured plan in place for the batch of the next replay.

        Return values that the replay patches into the graph itself (`Segment.replay`), or None.
        """

    @abstractmethod
    def attend(self, q: Tensor, layer: Attention, batch: ForwardBatch, plan: Plan) -> Tensor:
        """Attend q [T, heads * head_dim] to the KV slots, including this step's keys and values.

        Return q's shape. Padding rows may hold anything and must not change other rows. No host
        reads.
        """

    def encode(self, q: Tensor, k: Tensor, v: Tensor, layer: Attention, plan: Plan) -> Tensor:
        """Attend q [T, heads * head_dim] to k and v [T, kv_heads * head_dim] of the same request in
        this step, for a layer without KV slots; return q's shape.

        Only for backends with the feature `encoder`; raises TypeError for others.
        """
        raise TypeError(
            f"{type(self).__name__} does not serve layers without KV slots, and its facts do not declare it"
        )

    @final
    def planned(self, batch: ForwardBatch | None) -> tuple[ForwardBatch, Plan]:
        """Return the batch, and the plan that this backend made for it.

        Raises StalePlanError if the batch is None or has no plan, or if another backend planned it
        or its numbers of requests or tokens have changed since.
        """
        if batch is None or batch.plan_record is None:
            raise StalePlanError("found a batch without a plan; run it with a runner, or plan and mark it first")
        record = batch.plan_record
        if record.planner is not self or (record.batch_size, record.num_tokens) != (batch.batch_size, batch.num_tokens):
            raise StalePlanError(f"attention of {batch.plan_drift(record, self)}; plan again before the forward")
        return batch, cast("Plan", record.plan)

    @final
    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Attention, batch: ForwardBatch | None
    ) -> Tensor:
        """Store k, v [T, kv_heads * head_dim] in the batch's KV slots and attend with q [T, heads *
        head_dim]; return q's shape. A layer without KV slots stores nothing: `encode`.

        k and v are None if the layer has stored them already, or has none. Raises StalePlanError as
        `planned` does.
        """
        batch, plan = self.planned(batch)
        if k is None or v is None:
            assert k is v and (self.takes_stored or layer.is_frozen)
        elif layer.cached:
            pool, cells = self.cells_of(layer, batch)
            assert cells is not None
            shape = (k.shape[0], layer.num_kv_heads, layer.head_dim)
            pool.store(layer.layer_id, k.view(shape), v.view(shape), cells)
        else:
            return self.encode(q, k, v, layer, plan)
        return self.attend(q, layer, batch, plan)
