"""The attention contract: plan outside, forward inside, nothing between them but a value.

`plan` may allocate and look at host data; `forward` runs inside graphs and reads nothing on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from torch import Tensor

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.forward_batch import ForwardBatch
    from sglcore.runtime.kernels.table import KernelTable
    from sglcore.runtime.memory.pools import ReqToTokenPool, TokenToKVPool


class Unavailable(ImportError):
    """A backend's module raises it while it is imported where it can not run: its library is missing, or the device lacks
    what it needs. The text says which, with the remedy."""


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What a backend can do, read by selection. None means any; `padding_len` is the
    sequence length that a padding row must show; `features` name what it serves beyond causal attention over pages.

    `takes_stored`: it reads new keys and values from their cells alone, so `forward` works where k and v are None.
    """

    index_dtype: str | None = None
    page_sizes: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    padding_len: int = 1
    features: frozenset[str] = frozenset()
    takes_stored: bool = False


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The model's side: query heads, (kv_heads, head_dim) of each layer, and the sliding windows that occur."""

    num_heads: int
    layers: tuple[tuple[int, int], ...]
    windows: tuple[int | None, ...] = (None,)
    is_encoder: bool = False


@dataclass(frozen=True, slots=True)
class Bucket:
    """The size of a captured forward."""

    batch_size: int
    num_tokens: int


@dataclass(slots=True)
class AttentionPlan:
    """What a backend prepared for one batch. `generation` is that of the KV pool whose addresses it may hold."""

    planner: AttentionBackend
    generation: int


HostUpdate = object
"""What only this vendor's graph understands: values that its replay must patch in."""


class AttentionBackend(ABC):
    """Attention of every layer over the paged pool. Everything it uses, its constructor received."""

    facts: ClassVar[AttentionFacts]

    def __init__(
        self,
        shape: AttentionShape,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
        kernels: KernelTable,
        hisparse: object | None = None,
    ) -> None:
        self.shape = shape
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = token_to_kv_pool
        self.kernels = kernels
        self.hisparse = hisparse

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> AttentionPlan:
        """Prepare a batch for `forward`. Host work and allocation are allowed."""

    @abstractmethod
    def capture_plan(self, bucket: Bucket) -> AttentionPlan:
        """A plan for capture: its addresses never change, its contents come with `refresh`."""

    @abstractmethod
    def refresh(self, plan: AttentionPlan, batch: ForwardBatch) -> HostUpdate | None:
        """Bring a captured plan up to date in place before replay; returns what the graph itself must be told."""

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Attention, batch: ForwardBatch | None
    ) -> Tensor:
        """`store` k, v [T, kv_heads * head_dim] and attend q [T, heads * head_dim]; returns q's shape. Padding rows may
        hold anything and change nothing. No host reads."""

    @final
    def store(self, k: Tensor | None, v: Tensor | None, layer: Attention, batch: ForwardBatch) -> None:
        """Store k, v [T, kv_heads * head_dim] at the batch's cells; both are None where the layer has done so."""
        if k is None or v is None:
            assert k is v and self.facts.takes_stored
            return
        assert batch.out_cache_loc is not None
        shape = (k.shape[0], layer.num_kv_heads, layer.head_dim)
        k_cache, v_cache = self.token_to_kv_pool.kv(layer.layer_id)
        self.kernels.store_kv(k.view(shape), v.view(shape), k_cache, v_cache, batch.out_cache_loc)
