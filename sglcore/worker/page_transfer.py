"""The contract for moving KV pages between engines (disaggregation): what a device exposes of its
pages, and what transfers them.

A lease is one request's pages on the receiving engine. The pages stay reserved until the writer has
released them: it says so, or no write of it can arrive any more. A timeout proves neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sglcore.core.errors import SglcoreError

Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]


class PeerLost(SglcoreError):
    """The other engine has ended or does not answer; it cannot write here any more."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Region:
    """Pages 0..`pages` - 1 of one tensor of a layer, `bytes_per_page` contiguous bytes each, from
    the device address `base` on. `kind`: the content, such as "keys".
    """

    layer: int
    kind: str
    base: int
    bytes_per_page: int
    pages: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Layout:
    """The meaning of a page, as text: two engines exchange pages byte for byte only if their
    layouts are equal.

    `model` identifies the checkpoint, `cells` the arrangement of keys and values, `regions` the
    content of each layer.
    """

    model: str
    page_size: int
    cells: str
    regions: str

    def __str__(self) -> str:
        return f"model {self.model}, pages of {self.page_size} tokens, {self.cells}, {self.regions}"


class PageMemory(Protocol):
    """The pages of one worker. Use it between the worker's steps, in their thread."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """All regions, in the order of the layers. A page has the same index in each of them."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    @property
    def cells(self) -> str:
        """The arrangement of keys and values in a page, as text such as "cell_major"."""
        ...

    def read(self, region: int, pages: Ints) -> Bytes:
        """Return uint8[N, bytes_per_page] of N pages of a region, an index into `regions`, after
        all submitted steps; waits for them.
        """
        ...

    def write(self, region: int, pages: Ints, data: Bytes) -> None:
        """Write uint8[N, bytes_per_page] to N pages of a region, an index into `regions`, before
        all steps that are submitted later. May wait.
        """
        ...


@runtime_checkable
class PageHolder(Protocol):
    """A worker that can share its pages with other engines."""

    def page_memory(self) -> PageMemory | None:
        """Return the memory of the worker's pages. None: its layers keep more than keys and values
        by head, or keep them in another form, so its pages cannot be exchanged.
        """
        ...


def layout_of(memory: PageMemory, model: str) -> Layout:
    """Return the layout of a worker's pages; `model` identifies the content of the checkpoint."""
    layers: dict[int, list[str]] = {}
    for each in memory.regions:
        layers.setdefault(each.layer, []).append(f"{each.kind} of {each.bytes_per_page} bytes in {each.dtype}")
    alike = [(text, len(list(found))) for text, found in groupby(" and ".join(parts) for parts in layers.values())]
    return Layout(
        model, memory.page_size, memory.cells, ", ".join(f"{count} layers with {text}" for text, count in alike)
    )


class Progress(Enum):
    """State of a transfer. DONE: the source pages were read, and the data arrives before any
    message that is sent later.
    """

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Transfer:
    """Pages on their way to a peer. The transport sets `progress`; `reason` says why it FAILED."""

    progress: Progress = Progress.PENDING
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Told:
    """One event from a peer, in the order of sending. Exactly one of three: a message `body`;
    `cancelled`, a lease of the peer, to which the peer asks this engine to write no more; or, as
    the last event, the reason why the peer is `lost`.
    """

    peer: int
    body: bytes = b""
    cancelled: int = 0
    lost: str = ""


class PageTransfer(Protocol):
    """Moves pages between the registered memory of two engines.

    One thread uses it, the one that runs the worker's steps; only `connect`, `peers` and `name` may
    run concurrently.
    An implementation may use further threads internally. A lease (one request's pages on the
    receiving engine) is drained when no write to it can arrive any more. Leases and peers are
    numbers above 0; a lease has the number that the receiving engine gave it.
    """

    @property
    def peers(self) -> tuple[int, ...]:
        """The numbers of the connected peers."""
        ...

    @property
    def has_news(self) -> bool:
        """Whether `receive` has something to return or to do."""
        ...

    def connect(self, address: str) -> int:
        """Connect to a peer at an address HOST:PORT and return its number; waits. Raises PeerLost
        if there is none, and ConfigError, which prints both layouts, if its layout differs.
        """
        ...

    def name(self, peer: int) -> str:
        """Return a peer's address, as it was given to `connect`; "peer N" after the peer is
        lost.
        """
        ...

    def tell(self, peer: int, body: bytes) -> None:
        """Send a message after the transfers that are DONE. Does not wait; a message to a lost peer
        is dropped.
        """
        ...

    def receive(self, seconds: float = 0.0) -> list[Told]:
        """Return the events that have arrived, in order, after placing pages that have arrived.
        Waits up to `seconds` for the first event; an empty list if none came."""
        ...

    def offer(self, peer: int, pages: Ints) -> int:
        """Return a new lease for pages of this engine: the peer may write to them until the lease
        is drained.
        """
        ...

    def cancel(self, lease: int) -> None:
        """Ask the writer to release `lease`, which this engine offered. The writer may still write
        until the lease is drained. Idempotent.
        """
        ...

    def end(self, lease: int) -> None:
        """Note that the writer's message has released `lease`, which this engine offered.
        Idempotent.
        """
        ...

    def drained(self, lease: int) -> bool:
        """Return whether no write to `lease`, which this engine offered, can arrive any more, so
        that its pages may be reused.
        """
        ...

    def write(
        self, peer: int, lease: int, source: Ints, target: Ints, layers: tuple[int, int] | None = None
    ) -> Transfer:
        """Start to write own pages `source` to the peer's pages `target`, in pairs, under a `lease`
        that the peer offered: `layers` (from, to) are layers from..to - 1, None all. Does not wait
        for the peer.

        Do not write to a lease after it was reported as `cancelled`. The receiver learns that the
        lease is drained as soon as all earlier writes have been sent.
        """
        ...

    def fileno(self) -> int:
        """Return a file descriptor that is readable while there is news, for callers that wait for
        other events too.
        """
        ...

    def close(self) -> None:
        """Disconnect from all peers. Idempotent."""
        ...
