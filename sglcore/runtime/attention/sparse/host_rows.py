"""What sparse attention knows of rows in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.memory.kv_rows import swapped_rows

HISPARSE = "hisparse"
"""The feature that layers with rows in host memory need from a backend."""
ALL = slice(None)


class HostRows(Protocol):
    """Where a forward finds rows in host memory."""

    @property
    def table(self) -> Tensor:
        """int32 [B, P]: with `owners`, how choices name the rows."""
        ...

    @property
    def owners(self) -> Tensor:
        """int32 [T]: the row of `table` of each token."""
        ...

    def choose(self, layer_id: int, chosen: Tensor, slots: Tensor) -> Tensor:
        """Return int32 [T, K]: the entries that an indexer chose, as rows of the tensor of `read`.

        `slots` int32 [T] has the request slot of each token.
        """
        ...

    def read(self, layer_id: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield parts of the tokens, each with the tensor of rows that it reads."""
        ...


def rows_read(host: HostRows | None, layer: Attention, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield parts of the tokens, each with the tensor of rows that it reads in a layer.

    That is `rows`, for all tokens, if the rows are on the device; otherwise the tensors of `host`.
    """
    if host is None or swapped_rows(layer.rows) is None:
        yield ALL, rows
    else:
        yield from host.read(layer.layer_id)


def names_of(host: HostRows | None) -> tuple[Tensor, Tensor] | None:
    """Return the `named` parameter of `choose_rows`."""
    return None if host is None else (host.table, host.owners)
