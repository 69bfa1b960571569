"""Broken pools, in any layout: each defect is in the place where something is stored. A defect is a
function from a pool's class to a subclass; its docstring is the text of its `Mutant`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglcore.conformance.mutant import Mutant, become, in_runtime, words_of


def writes_the_next_page(base: Any) -> type:
    """`write_cells`, and nothing else, goes one page too far."""

    class WritesTheNextPage(base):
        def write_cells(self, layer_id: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
            super().write_cells(layer_id, (cells + self.page_size) % self.num_cells, keys, values)

    return WritesTheNextPage


def stores_in_another_layout(base: Any) -> type:
    """Keys and values are stored as if the heads of a KV slot had another order."""

    class StoresInAnotherLayout(base):
        def store(self, layer_id: int, key: Tensor, value: Tensor, out_cache_loc: Tensor) -> None:
            moved = (part.flatten(1).roll(1, 1).view_as(part) for part in (key, value))
            super().store(layer_id, *moved, out_cache_loc)

    return StoresInAnotherLayout


def stores_beside(base: Any) -> type:
    """The KV slot after the last one is written too."""

    class StoresBeside(base):
        def store(self, layer_id: int, key: Tensor, value: Tensor, out_cache_loc: Tensor) -> None:
            super().store(layer_id, key[-1:], value[-1:], (out_cache_loc[-1:] + 1) % self.num_cells)
            super().store(layer_id, key, value, out_cache_loc)

    return StoresBeside


def one_layer_for_all(base: Any) -> type:
    """Every layer is stored in the KV slots of the first."""

    class OneLayerForAll(base):
        def store(self, layer_id: int, key: Tensor, value: Tensor, out_cache_loc: Tensor) -> None:
            super().store(0, key, value, out_cache_loc)

        def write_cells(self, layer_id: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
            super().write_cells(0, cells, keys, values)

        def read_cells(self, layer_id: int, cells: Tensor) -> tuple[Tensor, Tensor]:
            return super().read_cells(0, cells)

    return OneLayerForAll


def loses_values(base: Any) -> type:
    """Keys are stored in place of values."""

    class LosesValues(base):
        def store(self, layer_id: int, key: Tensor, value: Tensor, out_cache_loc: Tensor) -> None:
            super().store(layer_id, key, key, out_cache_loc)

    return LosesValues


def _mutant(subclass: Callable[[Any], type]) -> Mutant:
    def change(pools: Any) -> Any:
        become(pools.token_to_kv, subclass)
        return pools

    return in_runtime(*words_of(subclass), pools=change)


STORES_IN_ANOTHER_LAYOUT = _mutant(stores_in_another_layout)
MUTANTS: tuple[Mutant, ...] = (
    _mutant(writes_the_next_page),
    STORES_IN_ANOTHER_LAYOUT,
    _mutant(stores_beside),
    _mutant(one_layer_for_all),
    _mutant(loses_values),
)
