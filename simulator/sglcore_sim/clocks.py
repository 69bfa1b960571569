"""Virtual time: what a program would take on a device of given speeds, whatever this machine takes
to compute it.

The host takes `launch` seconds to queue an operation, and waits where it waits for the device. An
operation begins when its stream and the events that it waits for have come so far, and takes as
long as its bytes or its arithmetic, whichever is longer, and `start` seconds. While other streams
work, what is queued on one has a share of the device: what those leave, half if none is set; they
are not slowed. A collective takes alpha and, for each of its bytes, beta, on the link of its group,
which takes nothing from the device. What runs in a captured graph is not timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sglcore_sim.simulator import Simulator

FREE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias"})
"""Operations that move nothing."""
BY_ROWS = frozenset(
    {"embedding", "index", "index_select", "gather", "index_put_", "index_copy_", "scatter_", "index_add_"}
)
"""Those that touch as much of their first tensor as they are given, or give."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of a device: arithmetic a second, bytes a second, seconds until an operation runs and seconds
    of the host to queue it; of the link between ranks: seconds of a collective, and of each of its
    bytes."""

    flops: float = 1e14
    bandwidth: float = 1e12
    start: float = 2e-6
    launch: float = 5e-6
    alpha: float = 20e-6
    beta: float = 1e-11

    def collective(self, size: int) -> float:
        """Seconds of one over `size` bytes."""
        return self.alpha + self.beta * size


class VirtualTime(TorchDispatchMode):
    """Gives each operation on the simulated device its time."""

    def __init__(self, sim: Simulator, speeds: Speeds) -> None:
        super().__init__()
        self._sim, self.speeds = sim, speeds

    @property
    def now(self) -> float:
        """Seconds of the host since the beginning."""
        return self._sim.core.pass_time(0.0) / 1e3

    def work(self, seconds: float) -> None:
        """Of the host, beside that of queueing."""
        self._sim.core.pass_time(seconds * 1e3)

    def share(self, stream: torch.Stream, share: float) -> None:
        """Of the device while other streams work too; 0: it takes nothing from them, and they take
        nothing from it."""
        with stream:
            self._sim.core.set_share(share)

    def collective(self, stream: torch.Stream, tensors: Iterable[torch.Tensor]) -> None:
        """One over these tensors, on a stream that is a link."""
        self.share(stream, 0.0)
        with stream:
            self._sim.busy(self.speeds.collective(sum(each.nbytes for each in tensors)) * 1e3)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run it, and give its time to the current stream."""
        given = kwargs or {}
        out = func(*args, **given)
        name = func.overloadpacket.__name__
        if func.is_view or name in FREE:
            return out
        kind = self._sim.kind.torch_name
        read, made = ([each for each in tree_leaves(part) if _is_of(each, kind)] for part in ((args, given), out))
        if read or made:
            counted = flop_registry.get(func.overloadpacket)
            flops = counted(*args, **given, out_val=out) if counted is not None else 0
            self._spend(flops, _bytes(name, read, made))
        return out

    def _spend(self, flops: float, moved: int) -> None:
        speeds = self.speeds
        self._sim.core.pass_time(speeds.launch * 1e3)
        self._sim.busy(1e3 * (speeds.start + max(flops / speeds.flops, moved / speeds.bandwidth)))


def _is_of(value: object, kind: str) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == kind


def _bytes(name: str, read: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> int:
    own = {id(each) for each in read}
    fresh = [each for each in made if id(each) not in own]
    if name in BY_ROWS:
        return sum(each.nbytes for each in read[1:]) + 2 * sum(each.nbytes for each in fresh)
    return sum(each.nbytes for each in (*read, *fresh))


@contextmanager
def virtual_time(sim: Simulator, speeds: Speeds = Speeds()) -> Iterator[VirtualTime]:
    """A region of this thread in which time is that of a device of these speeds, from 0 on."""
    sim.core.virtual_time(True)
    clock = sim.timing = VirtualTime(sim, speeds)
    try:
        with clock:
            yield clock
    finally:
        sim.timing = None
        sim.core.virtual_time(False)
