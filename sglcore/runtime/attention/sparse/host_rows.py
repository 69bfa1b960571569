"""How sparse attention reads KV rows that may be in host memory: `rows_read` yields the rows of a
layer wherever they are, and `HostRows` is one forward's access to those in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.memory.kv_rows import swapped_rows

if TYPE_CHECKING:
    from sglcore.runtime.attention.sparse.token_queries import TokenRows

HISPARSE = "hisparse"
"""The feature that layers with rows in host memory need from a backend."""
ALL = slice(None)


class HostRows(Protocol):
    """One forward's access to KV rows in host memory: finds the rows that an indexer chose, and
    yields tensors of rows to attend to. `RowsOnHost.plan` makes it.
    """

    @property
    def table(self) -> Tensor:
        """int32 [B, P]: the page table by which `choose_rows` names the rows that an indexer
        chooses.
        """
        ...

    @property
    def owners(self) -> Tensor:
        """int32 [T]: the row of `table` for each token."""
        ...

    def before_store(self, layer_id: int) -> None:
        """Order what a layer stores after the copies that read among those rows.

        Call before the layer stores its rows. The stream may wait, the host does not.
        """
        ...

    def choose(self, layer_id: int, chosen: Tensor, tokens: TokenRows, places: Tensor | None) -> Tensor:
        """Return int32 [T, K]: the rows `chosen` by an indexer, numbered as in the tensors of
        `read`.

        `chosen` int32 [T, K] is named by `table`, -1 for none. `places` int [T] is the row of the
        pool that each token stores in this step (None: tokens do not store one row each).
        """
        ...

    def read(self, layer_id: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice of the tokens, tensor of the rows that they read); the slices cover all
        tokens, in order.
        """
        ...


def rows_read(host: HostRows | None, layer: Attention, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice of the tokens, tensor of the rows that they read in a layer).

    That is `rows`, once for all tokens, if the layer's rows are on the device; otherwise the
    tensors of `host`.
    """
    if host is None or swapped_rows(layer.rows) is None:
        yield ALL, rows
    else:
        yield from host.read(layer.layer_id)


def names_of(host: HostRows | None) -> tuple[Tensor, Tensor] | None:
    """Return the `named` parameter of `choose_rows`: (table, owners) of `host`; None without it, as
    the rows are on the device.
    """
    return None if host is None else (host.table, host.owners)
