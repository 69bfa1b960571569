"""Chooses the replica for a prompt: the one that got the longest prefix of it before, unless that
replica is too busy.

The router knows only what it sent, so it keeps, for each replica, the newest prompt blocks sent
there. A block is one page of tokens, identified by a hash of itself and all tokens before it. A
block counts from the moment its prompt is sent: prompts that arrive together then follow the first,
and the bound on the load moves the excess to other replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Protocol, TypeVar

TOKEN_BYTES = 4
MOST_BLOCKS = 1 << 16
"""Maximum number of blocks remembered for one replica, at about 100 bytes each; fewer if its cache
has fewer pages."""
LOAD_RATIO, LOAD_SLACK = 1.5, 4
"""Bound on the load: a replica with more than LOAD_RATIO times the samples of the least busy one
plus LOAD_SLACK is not chosen. So no replica is idle for long while another has more samples than
the slack."""


class Target(Protocol):
    """A replica as the `Router` reads it; implemented by `Replica`."""

    @property
    def number(self) -> int:
        """The number of the replica."""
        ...

    @property
    def load(self) -> int:
        """Number of samples of the replica's requests that have not ended, and of its prompts to
        embed and orders, as `Replica.load`."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens of a page of the replica's prefix cache."""
        ...

    @property
    def num_pages(self) -> int:
        """Number of pages that the replica's prefix cache can have."""
        ...


Chosen = TypeVar("Chosen", bound=Target)


class Router:
    """Chooses among ready replicas, and remembers its choices: it knows only what it sent, not the
    replicas' caches. Not thread-safe."""

    def __init__(self, *, ratio: float = LOAD_RATIO, slack: int = LOAD_SLACK, most_blocks: int = MOST_BLOCKS) -> None:
        """`ratio` and `slack` (samples): the bound on the load, as LOAD_RATIO and LOAD_SLACK;
        `most_blocks`: maximum number of blocks remembered for one replica."""
        self._ratio, self._slack, self._most_blocks = ratio, slack, most_blocks
        self._sent: dict[int, dict[int, None]] = {}
        """The hashes of each replica's blocks, least recently sent first."""
        self._chosen_at: dict[int, int] = {}
        self._tick = 0

    def choose(self, ready: Sequence[Chosen], prompt: bytes) -> Chosen:
        """Return the replica of `ready`, which is not empty, for a prompt (token ids as int32
        bytes; empty: ignore the caches), and remember its blocks. O(prompt).

        Among the replicas whose load is within `bound`: the one with the longest matching prefix;
        then the least busy one; then the one chosen longest ago.
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
        """Return the load above which no replica is chosen: ratio times the smallest of `loads`,
        plus slack. `loads`: of all ready replicas, at least one."""
        return self._ratio * min(loads) + self._slack

    def matched(self, target: Target, hashes: Sequence[int]) -> int:
        """Return the number of leading blocks of a prompt that were sent to the replica before and
        are still remembered; 0 if none. `hashes`: from `block_hashes`."""
        known = self._sent.get(target.number)
        if not known:
            return 0
        return next((count for count, block in enumerate(hashes) if block not in known), len(hashes))

    def remembered(self, number: int) -> int:
        """Return the number of blocks that are remembered for replica `number`; 0 for an unknown
        one."""
        return len(self._sent.get(number, ()))

    def forget(self, number: int) -> None:
        """Forget the blocks of replica `number`, which has ended: its cache is gone. An unknown one
        is ignored."""
        self._sent.pop(number, None)
        self._chosen_at.pop(number, None)

    def _remember(self, target: Target, hashes: Sequence[int]) -> None:
        """Remember the blocks of a prompt for a replica, which has at most one block for each page
        of its cache. The end of a prompt is forgotten before its beginning, in the order in which
        pages are evicted."""
        known = self._sent.setdefault(target.number, {})
        for block in reversed(hashes):
            known.pop(block, None)
            known[block] = None
        for block in list(islice(known, max(0, len(known) - min(self._most_blocks, target.num_pages)))):
            del known[block]


def block_hashes(prompt: bytes, page_size: int) -> list[int]:
    """Return one hash for each whole page of a prompt (token ids as int32 bytes); it depends on all
    tokens up to the end of the page. `page_size`: in tokens. Empty for a prompt that is shorter
    than a page.

    The hashes differ between server processes, so a client cannot make prompts that collide. A
    collision would cost a cached prefix.
    """
    width = page_size * TOKEN_BYTES
    hashes: list[int] = []
    last = 0
    for start in range(0, len(prompt) - width + 1, width):
        last = hash((last, prompt[start : start + width]))
        hashes.append(last)
    return hashes
