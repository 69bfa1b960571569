"""What collectives cost by the links between ranks, as numbers: a start-up time and the time of a byte, on two levels.

The formulas are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
Seconds and bytes throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

from sglcore.device.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Link:
    """What one message costs: `alpha` seconds and `beta` seconds for each of its bytes."""

    alpha: float
    beta: float

    def all_reduce(self, n: int, m: float) -> float:
        """Of `m` bytes on each of `n` ranks: round a ring, or everybody reads everybody's, whichever is faster."""
        ring = 2 * (n - 1) * self.alpha + 2 * (n - 1) / n * m * self.beta
        one_shot = self.alpha + (n - 1) * m * self.beta
        return min(ring, one_shot)

    def all_gather(self, n: int, m: float) -> float:
        """To `m` bytes, which all have then; a reduce-scatter from `m` bytes costs the same."""
        return (n - 1) * self.alpha + (n - 1) / n * m * self.beta

    def all_to_all(self, n: int, m: float) -> float:
        """`m` bytes from each rank, an equal part of them for each, itself included."""
        return ceil(log2(n)) * self.alpha + (n - 1) / n * m * self.beta

    def broadcast(self, n: int, m: float) -> float:
        """`m` bytes from one to all, by a tree."""
        return ceil(log2(n)) * (self.alpha + m * self.beta)


@dataclass(frozen=True, slots=True)
class Links:
    """Between neighbours on one host, of which there are `per_host`, and between hosts, as one rank has it. A group wider than a
    host takes whole hosts, and only between equal places of two hosts does anything go from one to the other."""

    inside: Link
    between: Link
    per_host: int

    def levels(self, n: int) -> tuple[int, int]:
        """Ranks of a group on one host, and hosts. Raises ValueError for a group that begins on a host and fills a part of
        another."""
        local = min(n, self.per_host)
        hosts, rest = divmod(n, local)
        if rest:
            raise ValueError(f"{n} ranks do not fill hosts of {self.per_host}; wanted a multiple")
        return local, hosts

    def all_reduce(self, n: int, m: float) -> float:
        """See `Link`: parts are summed inside, each part between hosts, and put together inside."""
        local, hosts = self.levels(n)
        if hosts == 1:
            return self.inside.all_reduce(n, m)
        return 2 * self.inside.all_gather(local, m) + self.between.all_reduce(hosts, m / local)

    def all_gather(self, n: int, m: float) -> float:
        """See `Link`: what equal places of hosts have, then all of it inside."""
        local, hosts = self.levels(n)
        return self.between.all_gather(hosts, m / local) + self.inside.all_gather(local, m)

    def all_to_all(self, n: int, m: float, m_between: float | None = None) -> float:
        """See `Link`: to the equal place of the other host first, then on inside. `m_between` bytes go to hosts, where what several
        ranks of a host want goes there once; None: as many as to ranks."""
        local, hosts = self.levels(n)
        across = self.between.all_to_all(hosts, m if m_between is None else m_between)
        return across + self.inside.all_to_all(local, m)


def fitted(sizes: Sequence[float], seconds: Sequence[float], rounds: float, share: float) -> Link:
    """The link by which an operation that takes `rounds` messages, and moves `share` of its bytes, takes `seconds` for each of these
    sizes: least squares of the relative errors, so that small sizes count as much as large ones. Neither number is below zero.
    Raises ConfigError for fewer than two sizes."""
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
