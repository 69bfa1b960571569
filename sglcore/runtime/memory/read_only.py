"""A read-only view of another model's KV slots: writing raises."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from sglcore.runtime.memory.pools import TokenToKVPool


class ReadOnlyPoolError(RuntimeError):
    """A model tried to store keys and values in KV slots of another model."""


class ReadOnlyPool:
    """Another pool as one to read: `store` and `write_cells` raise ReadOnlyPoolError. It has no
    memory of its own; `kv` returns the other pool's own tensors.
    """

    __slots__ = ("_pool",)

    def __init__(self, pool: TokenToKVPool) -> None:
        self._pool = pool

    @property
    def generation(self) -> int:
        """The generation of the pool."""
        return self._pool.generation

    @property
    def page_size(self) -> int:
        """Tokens per page of the pool."""
        return self._pool.page_size

    @property
    def num_cells(self) -> int:
        """Number of KV slots of the pool."""
        return self._pool.num_cells

    @property
    def num_layers(self) -> int:
        """Number of layers of the pool."""
        return self._pool.num_layers

    @property
    def layout(self) -> str:
        """The layout of the pool."""
        return self._pool.layout

    def kv(self, layer_id: int) -> Any:
        """Return the layer's storage, for attention to read."""
        return self._pool.kv(layer_id)

    def read_cells(self, layer_id: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of KV slots, as the pool does."""
        return self._pool.read_cells(layer_id, cells)

    def store(self, layer_id: int, key: Tensor, value: Tensor, out_cache_loc: Tensor) -> NoReturn:
        """Raise ReadOnlyPoolError: this pool cannot be written."""
        self.refuse(layer_id)

    def write_cells(self, layer_id: int, cells: Tensor, keys: Tensor, values: Tensor) -> NoReturn:
        """Raise ReadOnlyPoolError: this pool cannot be written."""
        self.refuse(layer_id)

    def refuse(self, layer_id: int) -> NoReturn:
        """Raise ReadOnlyPoolError for a write to the layer's storage."""
        raise ReadOnlyPoolError(
            f"a model would store keys and values in KV slots of layer {layer_id} of another model; it may only "
            "read them"
        )
