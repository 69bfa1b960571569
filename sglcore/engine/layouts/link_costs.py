"""Cost model of collectives on the links between ranks: latency and time per byte, on two levels.

The formulas are from Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005). Units are seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

from sglcore.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Link:
    """Cost of one message: `alpha` seconds, and `beta` seconds for each of its bytes."""

    alpha: float
    beta: float

    def all_reduce(self, n: int, m: float) -> float:
        """Return the seconds to sum arrays of `m` bytes, one on each of `n` ranks, so that every
        rank has the sum: by a ring, or with each rank reading from all others, whichever is faster.
        """
        ring = 2 * (n - 1) * self.alpha + 2 * (n - 1) / n * m * self.beta
        one_shot = self.alpha + (n - 1) * m * self.beta
        return min(ring, one_shot)

    def all_gather(self, n: int, m: float) -> float:
        """Return the seconds until each of `n` ranks has all `m` bytes; before, each has m / n. A
        reduce-scatter of arrays of `m` bytes costs the same."""
        return (n - 1) * self.alpha + (n - 1) / n * m * self.beta

    def all_to_all(self, n: int, m: float) -> float:
        """Return the seconds for each of `n` ranks to send `m` bytes in equal parts, one part to
        each rank including itself."""
        return ceil(log2(n)) * self.alpha + (n - 1) / n * m * self.beta

    def broadcast(self, n: int, m: float) -> float:
        """Return the seconds to send `m` bytes from one rank to `n` - 1 others, by a tree."""
        return ceil(log2(n)) * (self.alpha + m * self.beta)


@dataclass(frozen=True, slots=True)
class Links:
    """Links of one rank: `inside` a host, with `per_host` ranks, and `between` hosts. A group
    larger than a host has whole hosts, and data crosses hosts only between ranks with the same
    local index.
    """

    inside: Link
    between: Link
    per_host: int

    def levels(self, n: int) -> tuple[int, int]:
        """Return the ranks on one host and the number of hosts of a group of `n` ranks. Raises
        ValueError for a group that fills its last host only in part."""
        local = min(n, self.per_host)
        hosts, rest = divmod(n, local)
        if rest:
            raise ValueError(f"{n} ranks do not fill hosts of {self.per_host}; wanted a multiple")
        return local, hosts

    def all_reduce(self, n: int, m: float) -> float:
        """Return the seconds to sum arrays of `m` bytes, one on each of `n` ranks: reduce-scatter
        inside hosts, all-reduce of each part between hosts, all-gather inside. Raises ValueError if
        the ranks fill the last host only in part."""
        local, hosts = self.levels(n)
        if hosts == 1:
            return self.inside.all_reduce(n, m)
        return 2 * self.inside.all_gather(local, m) + self.between.all_reduce(hosts, m / local)

    def all_gather(self, n: int, m: float) -> float:
        """Return the seconds until each of `n` ranks has all `m` bytes; before, each has m / n.
        Data is exchanged between ranks with the same local index first, then inside hosts. Raises
        ValueError if the ranks fill the last host only in part."""
        local, hosts = self.levels(n)
        return self.between.all_gather(hosts, m / local) + self.inside.all_gather(local, m)

    def all_to_all(self, n: int, m: float, m_between: float | None = None) -> float:
        """Return the seconds for each of `n` ranks to send `m` bytes in equal parts to all ranks:
        to the same local index on the other hosts first, then inside hosts. `m_between`: bytes that
        each rank sends in the first part, if data for several ranks of a host is sent once; None:
        `m`. Raises ValueError if the ranks fill the last host only in part."""
        local, hosts = self.levels(n)
        across = self.between.all_to_all(hosts, m if m_between is None else m_between)
        return across + self.inside.all_to_all(local, m)


def fitted(sizes: Sequence[float], seconds: Sequence[float], rounds: float, share: float) -> Link:
    """Return the link that explains the measured `seconds` of an operation for each of `sizes`
    bytes: time = rounds * alpha + share * size * beta.

    Least squares of the relative errors, so that small sizes count as much as large ones. Neither
    `alpha` nor `beta` is negative. Raises ConfigError for fewer than two different sizes.
    """
    if len(set(sizes)) < 2:
        raise ConfigError(f"{len(set(sizes))} sizes were measured", wanted="two or more", remedy="give more sizes")
    one = [rounds / time for time in seconds]
    two = [share * size / time for size, time in zip(sizes, seconds, strict=True)]
    aa, bb = sum(x * x for x in one), sum(x * x for x in two)
    ab, a, b = sum(x * y for x, y in zip(one, two, strict=True)), sum(one), sum(two)
    determinant = aa * bb - ab * ab
    alpha, beta = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if alpha < 0:
        return Link(0.0, b / bb)
    return Link(alpha, beta) if beta >= 0 else Link(a / aa, 0.0)
