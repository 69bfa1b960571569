"""The description of an attention layer: what selection, pools and backends read of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from sglcore.runtime.kernels.entry import Entry
    from sglcore.runtime.kernels.kernel_choice import Call
    from sglcore.runtime.memory.kv_rows import KeptRows


class Attention:
    """Scaled dot-product attention over the paged KV pool. Models build `BackendAttention`, which
    can be called.

    `scaling` is the factor of q . k (None: 1 / sqrt(head_dim)). `sliding_window` W: a query sees
    itself and the W - 1 tokens before it (None: all tokens before it). `cached=False`: nothing
    is stored, and a token sees only this step's tokens of its request; with `causal=False` also
    later ones, within W in both directions. `softcap` c maps a scaled score s to c * tanh(s / c).
    `sinks` [heads] are the scores of an extra key without a value that every query sees.
    `is_exact`: keys hold numbers that must not be rounded, so they are kept in the model's dtype.
    `is_frozen`: the layer has queries only and reads the keys and values of another model's layer
    of this id. `rows`: KV entries in other forms than keys and values per head; `top_k` of them are
    chosen for each token (0: it sees all).
    """

    rows: Mapping[str, KeptRows] = MappingProxyType({})
    top_k: int = 0
    __slots__ = (
        "cached",
        "causal",
        "head_dim",
        "is_exact",
        "is_frozen",
        "layer_id",
        "num_heads",
        "num_kv_heads",
        "scaling",
        "sinks",
        "sliding_window",
        "softcap",
    )

    def __init__(
        self,
        layer_id: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scaling: float | None = None,
        sliding_window: int | None = None,
        causal: bool = True,
        cached: bool = True,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        is_exact: bool = False,
        is_frozen: bool = False,
    ) -> None:
        self.layer_id = layer_id
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scaling = head_dim**-0.5 if scaling is None else scaling
        self.sliding_window = sliding_window
        self.causal = causal
        self.cached = cached
        self.softcap = softcap
        self.sinks = sinks
        self.is_exact = is_exact
        self.is_frozen = is_frozen

    @property
    def stores(self) -> bool:
        """True if the layer keeps keys and values in KV slots of its own."""
        return self.cached and not self.is_frozen

    @property
    def size_by_head(self) -> int:
        """Elements of a token's keys and values if each query head had its own."""
        return 2 * self.num_heads * self.head_dim

    @property
    def features(self) -> frozenset[str]:
        """The features that this layer needs from a backend: those of "sliding_window", "softcap",
        "sinks", "encoder" (not cached) and "frozen" that apply. Batches may need more.
        """
        asked = {
            "sliding_window": self.sliding_window is not None,
            "softcap": self.softcap is not None,
            "sinks": self.sinks is not None,
            "encoder": not self.cached,
            "frozen": self.is_frozen,
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)

    def calls(self, page_size: int) -> Iterable[tuple[Entry[Any], Call]]:
        """Return (kernel entry, example arguments) for each entry that only this layer needs; none
        unless a subclass overrides it.

        The arguments have the sizes and dtypes of real calls. Entries that every model uses are
        left out.
        """
        return ()
