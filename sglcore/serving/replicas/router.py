"""Chooses the replica for a prompt: the one with the longest cached prefix of it, unless that
replica is too busy.

The frontend knows only what it sent, so it keeps, for each replica, the newest prompt blocks sent
there. A block is one page of tokens, identified by a hash of itself and all tokens before it. A
block counts from the moment its prompt is sent: prompts that arrive together then follow the first,
and the bound on the load spreads the excess to other replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Protocol, TypeVar

TOKEN_BYTES = 4
MOST_BLOCKS = 1 << 16
"""Blocks remembered for one replica, at about 100 bytes each; fewer if its device has fewer
pages."""
LOAD_RATIO, LOAD_SLACK = 1.5, 4
"""Bound on the load: a replica with more than LOAD_RATIO times the samples of the least busy one
plus LOAD_SLACK is not chosen for its cache. So no replica is idle for long while another has more
than the slack."""


class Target(Protocol):
    """The router's view of a replica."""

    @property
    def number(self) -> int:
        """Its number among the replicas."""
        ...

    @property
    def load(self) -> int:
        """Number of its samples that have not ended."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens of a page of its prefix cache."""
        ...

    @property
    def num_pages(self) -> int:
        """Number of pages that its prefix cache can have."""
        ...


Chosen = TypeVar("Chosen", bound=Target)


class Router:
    """Chooses among ready replicas, and remembers its choices. Not thread-safe."""

    def __init__(self, *, ratio: float = LOAD_RATIO, slack: int = LOAD_SLACK, most_blocks: int = MOST_BLOCKS) -> None:
        """`ratio` and `slack` (samples) bound the load; `most_blocks` bounds the memory of one
        replica."""
        self._ratio, self._slack, self._most_blocks = ratio, slack, most_blocks
        self._sent: dict[int, dict[int, None]] = {}
        """The hashes of each replica's blocks, least recently sent first."""
        self._chosen_at: dict[int, int] = {}
        self._tick = 0

    def choose(self, ready: Sequence[Chosen], prompt: bytes) -> Chosen:
        """Return the replica for a prompt (int32 bytes; empty: without cached blocks); `ready` is
        not empty. O(prompt).

        Among the replicas within `bound`, the one with the longest matching prefix; then the least
        busy one; then in turn.
        """
        bound = self.bound([target.load for target in ready])
        hashes = block_hashes(prompt, max(target.page_size for target in ready))
        chosen = min(
            (target for target in ready if target.load <= bound),
            key=lambda target: (
                -self.matched(target, hashes),
                target.load,
                self._chosen_at.get(target.number, -1),
                target.number,
            ),
        )
        self._tick += 1
        self._chosen_at[chosen.number] = self._tick
        self._remember(chosen, hashes)
        return chosen

    def bound(self, loads: Sequence[int]) -> float:
        """Return the load above which a replica is not chosen, whatever it has cached."""
        return self._ratio * min(loads) + self._slack

    def matched(self, target: Target, hashes: Sequence[int]) -> int:
        """Return how many blocks from the beginning of a prompt were sent to a replica before."""
        known = self._sent.get(target.number)
        if not known:
            return 0
        return next((count for count, block in enumerate(hashes) if block not in known), len(hashes))

    def remembered(self, number: int) -> int:
        """Return how many blocks are remembered for a replica."""
        return len(self._sent.get(number, ()))

    def forget(self, number: int) -> None:
        """Forget the blocks of a replica that has ended: its cache is gone."""
        self._sent.pop(number, None)
        self._chosen_at.pop(number, None)

    def _remember(self, target: Target, hashes: Sequence[int]) -> None:
        """Remember the blocks of a prompt. Its end is forgotten before its beginning, in the order
        in which pages are evicted."""
        known = self._sent.setdefault(target.number, {})
        for block in reversed(hashes):
            known.pop(block, None)
            known[block] = None
        for block in list(islice(known, max(0, len(known) - min(self._most_blocks, target.num_pages)))):
            del known[block]


def block_hashes(prompt: bytes, page_size: int) -> list[int]:
    """Return one hash for each whole page of a prompt; it depends on all tokens up to the page's
    end.

    The hashes differ between processes, so a client cannot make prompts that collide. A collision
    would cost a cached prefix.
    """
    width = page_size * TOKEN_BYTES
    hashes: list[int] = []
    last = 0
    for start in range(0, len(prompt) - width + 1, width):
        last = hash((last, prompt[start : start + width]))
        hashes.append(last)
    return hashes
