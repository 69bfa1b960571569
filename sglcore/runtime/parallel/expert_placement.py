"""Expert placement tables: which rank holds which experts.

Each place of a rank holds one expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglcore.core.errors import ConfigError

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """The placement of one layer's experts.

    `held` int32[P] is the expert at each of P places. Each rank has the same number of consecutive
    places. Every expert has at least one place.
    """

    held: Ints
    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        """Raise ConfigError for a table that misses an expert, names an unknown one, or cannot be
        divided equally among the ranks.
        """
        found = set(self.held.tolist())
        lost = sorted(set(range(self.num_experts)) - found)
        if lost or not found <= set(range(self.num_experts)):
            unknown = sorted(found - set(range(self.num_experts)))
            raise ConfigError(
                f"a table of experts has no place for {lost} and places for {unknown}",
                wanted=f"each of {self.num_experts} experts at one place or more",
            )
        if len(self.held) % self.num_ranks:
            raise ConfigError(
                f"a table of experts has {len(self.held)} places", wanted=f"a multiple of {self.num_ranks} ranks"
            )

    @property
    def each(self) -> int:
        """Places per rank."""
        return len(self.held) // self.num_ranks

    def of_rank(self, rank: int) -> Ints:
        """Return int32[each]: the experts of a rank, in the order of their places."""
        return self.held[rank * self.each : (rank + 1) * self.each]

    def places_for(self, rank: int) -> Ints:
        """Return int32[E]: the place to which a rank sends tokens for each expert.

        The rank's own place if it holds the expert, else the first one on the ranks after it, so
        that not all ranks choose the same.
        """
        every = np.arange(len(self.held))
        after = (every // self.each - rank) % self.num_ranks
        found = np.zeros(self.num_experts, np.int32)
        for expert in range(self.num_experts):
            own = every[self.held == expert]
            found[expert] = own[np.argmin(after[own])]
        return found


def in_order(num_experts: int, num_ranks: int) -> Placement:
    """Place every expert once, in order.

    Raises ConfigError if the ranks do not divide the experts.
    """
    return Placement(np.arange(num_experts, dtype=np.int32), num_experts, num_ranks)
