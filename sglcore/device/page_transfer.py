"""The contract by which pages of one engine's KV cache come to another's: what a device gives of its pages, and what moves them.

A lease is one request's pages on the engine that takes them. Until its writer has let go, by its word or because nothing of it
can come any more, they belong to nobody else: a timeout proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sglcore.device.errors import SglcoreError

Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]


class PeerLost(SglcoreError):
    """The other engine is gone, or silent for too long; nothing of it can be written here any more."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Region:
    """Pages 0..`pages` - 1 of one tensor of a layer, each `bytes_per_page` bytes in a row from the address `base` on, which is on
    the device. `kind`: what it holds, such as "keys"."""

    layer: int
    kind: str
    base: int
    bytes_per_page: int
    pages: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Layout:
    """What a page means, as text: equal layouts, and no others, exchange pages byte for byte. `model` tells checkpoints apart,
    `cells` how keys and values lie, `regions` what each layer keeps."""

    model: str
    page_size: int
    cells: str
    regions: str

    def __str__(self) -> str:
        return f"model {self.model}, pages of {self.page_size} tokens, {self.cells}, {self.regions}"


class PageMemory(Protocol):
    """The pages of one worker. Used between its steps, in their thread."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """All that a page has, in the order of the layers."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        ...

    @property
    def cells(self) -> str:
        """How keys and values lie in a page."""
        ...

    def read(self, region: int, pages: Ints) -> Bytes:
        """uint8[N, bytes_per_page] of N pages, after all steps that were submitted; waits for them."""
        ...

    def write(self, region: int, pages: Ints, data: Bytes) -> None:
        """The inverse, before all steps that are submitted later. May wait."""
        ...


@runtime_checkable
class PageHolder(Protocol):
    """A worker whose pages others may have."""

    def page_memory(self) -> PageMemory | None:
        """Its pages; None: what its layers keep is more than keys and values by head, or in another form."""
        ...


def layout_of(memory: PageMemory, model: str) -> Layout:
    """The layout of a worker's pages; `model` names the checkpoint's contents."""
    layers: dict[int, list[str]] = {}
    for each in memory.regions:
        layers.setdefault(each.layer, []).append(f"{each.kind} of {each.bytes_per_page} bytes in {each.dtype}")
    alike = [(text, len(list(found))) for text, found in groupby(" and ".join(parts) for parts in layers.values())]
    return Layout(
        model, memory.page_size, memory.cells, ", ".join(f"{count} layers with {text}" for text, count in alike)
    )


class Progress(Enum):
    """How far a transfer is. DONE: the source's pages are read, and what was written comes before what is told later."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Transfer:
    """Pages on their way to a peer. Its transport sets `progress`; `reason` says why it FAILED."""

    progress: Progress = Progress.PENDING
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Told:
    """What came from a peer, in the order in which it was sent: a `body`; or its wish that nothing more is written to `cancelled`,
    one of its leases; or, as the last, that it is `lost`."""

    peer: int
    body: bytes = b""
    cancelled: int = 0
    lost: str = ""


class PageTransfer(Protocol):
    """Moves pages between the registered memory of two engines. One thread uses it, that of the worker's steps, and
    `connect` may run beside; what it does besides is its own. Leases and peers are numbers above 0, those of a lease on the side that offered it."""

    @property
    def peers(self) -> tuple[int, ...]:
        """Those that are connected."""
        ...

    @property
    def has_news(self) -> bool:
        """`receive` would return, or do, something."""
        ...

    def connect(self, address: str) -> int:
        """A peer at an address; waits. Raises PeerLost where there is none, ConfigError where its layout is another: both are
        printed."""
        ...

    def name(self, peer: int) -> str:
        """A peer's address, for people."""
        ...

    def tell(self, peer: int, body: bytes) -> None:
        """Send a message, behind the transfers that are DONE. Does not wait; what goes to a lost peer is lost."""
        ...

    def receive(self, seconds: float = 0.0) -> list[Told]:
        """Take in what has come, pages too; waits so long for the first."""
        ...

    def offer(self, peer: int, pages: Ints) -> int:
        """A lease: the peer may write to these pages until it is drained."""
        ...

    def cancel(self, lease: int) -> None:
        """Ask the writer to let go. It may still write until the lease is drained. Idempotent."""
        ...

    def end(self, lease: int) -> None:
        """The writer has said by itself that it is done. Idempotent."""
        ...

    def drained(self, lease: int) -> bool:
        """Nothing can be written by the lease any more, so its pages may be used again."""
        ...

    def write(
        self, peer: int, lease: int, source: Ints, target: Ints, layers: tuple[int, int] | None = None
    ) -> Transfer:
        """Write own pages `source` to the peer's pages `target`, of layers from..to - 1 (None: all). Does not wait for the peer.
        Not for a lease of which was told that it is `cancelled`: its other side hears that it is drained as soon as all that
        was written before has gone."""
        ...

    def fileno(self) -> int:
        """Readable while there is news, for who waits for other things too."""
        ...

    def close(self) -> None:
        """Part with all peers. Idempotent."""
        ...
