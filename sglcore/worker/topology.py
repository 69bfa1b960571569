"""The ranks that run one model, as plain data: their indices, their groups, the sizes that fit, and
how a device's ranks communicate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from sglcore.core.errors import ConfigError

GROUPS = ("world", "tp", "attn_tp", "attn_dp", "ep", "pp")
"""The groups of a topology: all ranks; one copy of the layers; ranks that share a request's heads;
ranks with the same index in different shards of requests; ranks that share experts; pipeline
stages.
"""


@dataclass(frozen=True, slots=True)
class Communication:
    """How the devices of one kind exchange tensors, which the device package declares: the names of
    its back ends, whether captured graphs may hold collectives, the network interface's variable,
    libraries that send tokens to experts, and whether ranks may share a device."""

    backend: str
    """The name of the back end in torch.distributed, or in the device's own library."""
    host_backend: str = "gloo"
    """The name of the back end for tensors on the host."""
    in_graphs: bool = False
    """Captured graphs may hold its collectives."""
    interface_variable: str = ""
    """The environment variable that tells the back end its network interface; empty: none does."""
    cluster_resource: str = ""
    """The resource as which a cluster's scheduler counts one device; empty: none."""
    dispatchers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Libraries of the device that send tokens to their experts, by name, the preferred one first:
    references to a `MakeDispatcher`."""
    shares_device: bool = False
    """The ranks of one machine share one device, so any number of them may run there."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the axes, outer to inner: pipeline stages, shards of requests, attention ranks. `tp`
    ranks hold the layers of one stage together; `dp` shards of requests and `ep` parts of the
    experts divide them.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        """Raise ConfigError for a size below 1, and for a dp or ep that does not divide tp."""
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}", wanted="1 or more")
        for name, value in (("dp", self.dp), ("ep", self.ep)):
            if self.tp % value:
                raise ConfigError(f"{name} is {value} and tp is {self.tp}", wanted=f"one of {widths_text(self.tp)}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.tp

    @property
    def attn_tp(self) -> int:
        """Number of ranks that share the heads of a request."""
        return self.tp // self.dp

    def rank_of(self, *, pp: int = 0, dp: int = 0, tr: int = 0) -> int:
        """Return the rank at given indices of the axes: stage `pp`, shard of requests `dp`, and
        `tr` among the `attn_tp` ranks of that shard. Raises ValueError outside of them.
        """
        for name, value, width in (("pp", pp, self.pp), ("dp", dp, self.dp), ("tr", tr, self.attn_tp)):
            if not 0 <= value < width:
                raise ValueError(f"{name} is {value}; wanted 0 to {width - 1}")
        return (pp * self.dp + dp) * self.attn_tp + tr

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every group of that name, one of GROUPS such as "tp" or "attn_dp",
        ascending; each rank is in exactly one. Raises ValueError for another name.
        """
        if name not in GROUPS:
            raise ValueError(f"{name!r} is not a group; wanted one of {', '.join(GROUPS)}")
        every = range(self.world)
        if name == "attn_dp":
            key = [rank // self.tp * self.attn_tp + rank % self.attn_tp for rank in every]
        elif name == "pp":
            key = [rank % self.tp for rank in every]
        else:
            width = {"world": self.world, "tp": self.tp, "attn_tp": self.attn_tp, "ep": self.ep}[name]
            key = [rank // width for rank in every]
        return tuple(tuple(rank for rank in every if key[rank] == each) for each in dict.fromkeys(key))

    def group_of(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the ranks, ascending, of the group of that name that contains `rank`. Raises
        ValueError for another name; `rank` must be below `world`."""
        return next(group for group in self.groups(name) if rank in group)


@dataclass(frozen=True, slots=True)
class Place:
    """The position of one rank, as given to its process: `rank` in the topology, `local` index
    among the `neighbours` ranks of its machine, and `meeting`, the URL where all ranks connect
    (torch.distributed's init method).
    """

    rank: int
    topology: Topology
    meeting: str
    local: int
    neighbours: int

    @property
    def decides(self) -> bool:
        """Whether this rank is the first of those that share a request's heads: it decides which
        tokens its shard of requests samples, and sends the results.
        """
        return self.rank % self.topology.attn_tp == 0

    def as_plain(self) -> dict[str, Any]:
        """Return plain values, for another process."""
        return asdict(self)

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> Place:
        """Return the place that `as_plain` wrote."""
        return Place(**{**values, "topology": Topology(**values["topology"])})


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def widths_text(number: int) -> str:
    """Return the sizes that divide a number, ascending, as text such as "1, 2, 4"."""
    return ", ".join(map(str, divisors(number)))
