"""Virtual time: how long a program would take on a device of given speeds, independent of the speed
of this machine.

The host takes `launch` seconds to queue an operation, and waits when it waits for the device. An
operation begins when its stream and the events that it waits for are done. It takes `start` seconds
plus the time of its bytes or of its arithmetic, whichever is longer. While other streams of the
device are busy, a new operation runs at its stream's share of the device's speed (0.5 unless set);
work that is already queued on the other streams is not slowed. A collective takes alpha seconds and
beta for each byte, on the link of its group, which takes nothing from the device. Captured graphs
are not timed.
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
"""Operations that move no bytes."""
BY_ROWS = frozenset(
    {"embedding", "index", "index_select", "gather", "index_put_", "index_copy_", "scatter_", "index_add_"}
)
"""Operations on some rows of their first tensor: they count the bytes of the other tensors, and
twice those of a new result, instead of the whole first tensor."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of a simulated device: `flops` (operations) and `bandwidth` (bytes) per second;
    `start`: seconds before an operation runs; `launch`: seconds of the host to queue it. Speeds of
    the link between ranks: `alpha` seconds per collective, `beta` seconds per byte."""

    flops: float = 1e14
    bandwidth: float = 1e12
    start: float = 2e-6
    launch: float = 5e-6
    alpha: float = 20e-6
    beta: float = 1e-11

    def collective(self, size: int) -> float:
        """Return the seconds of a collective over `size` bytes."""
        return self.alpha + self.beta * size


class VirtualTime(TorchDispatchMode):
    """A torch dispatch mode that adds the time of each operation on the simulated device to its
    stream. It is active within `virtual_time`, which makes it."""

    def __init__(self, sim: Simulator, speeds: Speeds) -> None:
        super().__init__()
        self._sim, self.speeds = sim, speeds

    @property
    def now(self) -> float:
        """The host's virtual time in seconds since the start of the region. Reading it takes no
        time."""
        return self._sim.core.pass_time(0.0) / 1e3

    def work(self, seconds: float) -> None:
        """Add `seconds` of host work to the virtual time, in addition to the queueing of
        operations. Does not sleep."""
        self._sim.core.pass_time(seconds * 1e3)

    def share(self, stream: torch.Stream, share: float) -> None:
        """Set the stream's share of the device's speed while other streams are busy; 0: the stream
        and the others do not slow each other."""
        with stream:
            self._sim.core.set_share(share)

    def collective(self, stream: torch.Stream, tensors: Iterable[torch.Tensor]) -> None:
        """Add the time of one collective over these tensors to `stream`, which stands for the link
        between ranks; their bytes are summed. The stream is not slowed by others and slows none
        from then on."""
        self.share(stream, 0.0)
        with stream:
            self._sim.busy(self.speeds.collective(sum(each.nbytes for each in tensors)) * 1e3)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a torch operation, add its time to the current stream if it touches the simulated
        device, and return its result."""
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
    """Context manager: run its block, on this thread, in virtual time, which starts at 0, for a
    device of these speeds; yields the clock. Restores real time at the end."""
    sim.core.virtual_time(True)
    clock = sim.timing = VirtualTime(sim, speeds)
    try:
        with clock:
            yield clock
    finally:
        sim.timing = None
        sim.core.virtual_time(False)
