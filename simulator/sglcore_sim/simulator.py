"""`install`, which gives this process's torch a simulated accelerator, and `Simulator`, the object
that tests use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import backend_registration

from sglcore_sim import collectives, host, lanes
from sglcore_sim.faults import Caught, Fault, FaultLog
from sglcore_sim.kinds import kind_of, resolve
from sglcore_sim.machine import lay_out
from sglcore_sim.native import native

if TYPE_CHECKING:
    from sglcore_sim.clocks import VirtualTime

Touched = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def pair_of(touched: Touched) -> tuple[torch.Tensor, torch.Tensor | None]:
    return touched if isinstance(touched, tuple) else (touched, None)


class Simulator:
    """The simulated accelerator of this process, made by `install`. `kind`: its `Kind` record;
    `devices`: their number; `memory`: bytes per device. `core`: the native module, for faces and
    libraries. `log`: makes and keeps faults. `timing`: the virtual clock, None outside of virtual
    time."""

    def __init__(self, core: ModuleType, kind: Any, devices: int, memory: int, log: FaultLog) -> None:
        self.kind = kind
        self.devices = devices
        self.memory = memory
        self.core = core
        self.log = log
        self.timing: VirtualTime | None = None
        self.parts: dict[tuple[int, int], int] = {}
        """Number of compute units of a stream, by (device index, stream id); streams that are not
        listed have all."""
        self.watch(lambda: None, lambda: None)

    def watch(self, unfinished: Callable[[], None], forget: Callable[[], None]) -> None:
        """Set the callbacks of a face with work that can wait for the host, in place of those
        before: `unfinished()` raises a fault if some work still waits, `forget()` drops such
        work."""
        self._unfinished, self._forget = unfinished, forget

    def unfinished(self) -> None:
        """Raise a fault (stuck_graph) if work still waits for the host; otherwise do nothing. It
        does not wait."""
        self._unfinished()

    @property
    def faults(self) -> list[Fault]:
        """The faults made since the last reset that no `expect` block caught, in order: the log's
        own list, so it grows. Exhausted memory is not in it."""
        return self.log.seen

    def device(self, index: int = 0) -> torch.device:
        """Return the torch device `index` of the kind's type, such as cuda:0. The index is not
        checked."""
        return torch.device(self.kind.torch_name, index)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager: make each hidden wait of the host for the device, on this thread, a
        fault (sync_forbidden). Waiting for an event stays allowed."""
        self.core.no_sync(1)
        try:
            yield
        finally:
            self.core.no_sync(-1)

    def expect(self, kind: str) -> AbstractContextManager[Caught]:
        """Return a context manager that catches one fault of `kind`, a key of KINDS, in its block,
        and yields a `Caught` that has it afterwards. Raises AssertionError if none was raised,
        ValueError for an unknown kind; a fault of another kind passes through."""
        return self.log.expect(kind, torch.OutOfMemoryError)

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Context manager: run a block of this thread without tracking. Its operations are not
        device work, and no accesses, graph nodes or syncs are recorded."""
        self.core.untracked(1)
        try:
            yield
        finally:
            self.core.untracked(-1)

    def launch(
        self, name: str, fn: Callable[[], object], reads: Sequence[Touched] = (), writes: Sequence[Touched] = ()
    ) -> None:
        """Run `fn` as one piece of work on the current stream, which reads and writes the given
        tensors in place.

        A pair (tensor, rows) means that only these rows of dimension 0 are touched; `rows` is an
        integer tensor that is read again at every replay. Inside a capture the launch becomes one
        node and `fn` runs again at every replay, so it must not keep state. Inside `fn` nothing is
        tracked.
        """
        touched = [(*pair_of(item), False) for item in reads] + [(*pair_of(item), True) for item in writes]
        self.core.launch(name, fn, touched)

    def call(self, name: str, fn: Callable[..., Any], *args: Any, writes: Sequence[torch.Tensor] = ()) -> Any:
        """Run `fn(*args)` as one operation of the device, such as the CPU reference of a vendor's
        kernel.

        `fn` gets CPU tensors over the bytes of the device tensors in `args`. It writes in place
        only to those in `writes`, and returns a tensor, a tuple of tensors or None; new tensors
        are returned on the device. Inside a capture it is one node, and `fn` runs again at every
        replay with the same Python values.
        """
        places = [place for place, value in enumerate(args) if isinstance(value, torch.Tensor)]
        shape: dict[str, bool] = {}

        def over_tensors(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            values = list(args)
            for place, tensor in zip(places, tensors, strict=True):
                values[place] = tensor
            result = fn(*values)
            shape["one"] = isinstance(result, torch.Tensor)
            return [result] if isinstance(result, torch.Tensor) else list(result or ())

        tensors = [args[place] for place in places]
        results = self.core.call(name, over_tensors, tensors, [any(t is w for w in writes) for t in tensors])
        if not results:
            return None
        return results[0] if shape["one"] else tuple(results)

    def busy(self, milliseconds: float) -> None:
        """Occupy the current stream for `milliseconds` of the host's clock. The call does not wait;
        work that is queued after it on the stream, or waits for the stream, does. Inside a capture
        it becomes a node, which occupies the stream at each replay. Outside of virtual time, other
        operations take no device time."""
        self.core.busy(milliseconds)

    def access(self, tensor: torch.Tensor, write: bool = False, op: str = "access") -> None:
        """Record a read or, with `write`, a write of the bytes of `tensor` by the current stream;
        the bytes stay as they are. `op` names the access in faults. Raises the fault that the
        access is, such as a race."""
        self.core.access(tensor, write, op)

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor over the same bytes, without waiting: for references that declared
        their accesses.

        For a pinned tensor with a pending copy it faults (pinned_read_early).
        """
        if tensor.device.type == "cpu":
            self.core.require_landed(tensor)
            return tensor
        return self.core.host_alias(tensor)

    def check_finite(self, tensor: torch.Tensor, name: str = "tensor") -> None:
        """Raise a fault (uninitialised) if `tensor` holds poison (the pattern of memory that
        nothing has written) or, in a floating-point tensor, values that are not finite. `name` is
        for the message. It does not wait for the stream."""
        poisoned = self.core.poisoned_elements(tensor)
        values = self.core.host_alias(tensor)
        bad = int((~torch.isfinite(values)).sum()) if values.is_floating_point() else 0
        if poisoned or bad:
            text = (
                f"{name} of shape {tuple(tensor.shape)} holds {poisoned} elements that nothing has written "
                f"and {bad} that are not finite"
            )
            raise self.log.make("uninitialised", text)

    def declare_writes(self, op: str, *arguments: str) -> None:
        """Declare the names of arguments that operator `op` ("namespace::name", with an overload as
        ".out") writes although its schema does not mark them. Call it before the operator's first
        use."""
        self.core.declare_writes(op, list(arguments))

    def stats(self) -> Mapping[str, int]:
        """Return numbers by name. Counted since the last reset: "host_syncs", "event_waits",
        "h2d_copies", "d2h_copies", "d2d_copies", "pageable_h2d", "captures", "replays", "ops", and
        further counters that are absent at 0. Now, over all devices, in bytes: "allocated",
        "reserved", and "peak" since the last reset; "pending": copies under way; "streams": how
        many exist."""
        return MappingProxyType(self.core.stats())

    def reset(self) -> None:
        """Drop all accesses, pending copies, counters and faults, as after a device synchronize;
        copies to the host still land. Captures are abandoned, and the default stream becomes the
        current one of every device. Memory stays allocated. Raises nothing."""
        self._forget()
        self.core.reset()
        for index in range(self.devices):
            self.core.set_stream(index, 0)  # a capture that failed leaves its stream current, as on hardware
        self.log.seen.clear()


_installed: list[Simulator] = []


def install(kind: Any, devices: int = 1, memory: int = 8 << 30, arch: str | None = None) -> Simulator:
    """Install a simulated accelerator in this process and return its `Simulator`. Call it once,
    before any use of a device; a second call raises RuntimeError. There is no way back. It also
    sets TRITON_INTERPRET=1, and SGLCORE_SYSTEM_ROOT to a folder with the machine's system files.
    The first call on a machine compiles the native core.

    `kind`: the name of an installed kind (`kinds.known`), with an optional chip after a colon, or a
    Kind record of a made-up device. `arch`: the chip, in place of one after the colon; without
    either, the kind's first. An unknown kind or chip raises ValueError. `memory`: bytes per device,
    any size; it is a limit, nothing is allocated.
    """
    if _installed:
        raise RuntimeError(
            f"found the simulated device {_installed[0].kind.name!r} in this process, wanted none: one kind per process"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    record = kind_of(kind, arch)
    core, log = native(), FaultLog()
    if not _is_torchs_own(record.torch_name):
        backend_registration.rename_privateuse1_backend(record.torch_name)
    here = Path(__file__).resolve().parent
    folders = [
        str(Path(torch.__file__).resolve().parent) + "/",
        str(here) + "/",
        os.path.dirname(os.__file__) + "/contextlib.py",
    ]
    core.install(record.torch_name, "neutral_graph" in record.capabilities, devices, memory, log.make, folders)
    sim = Simulator(core, record, devices, memory, log)
    _installed.append(sim)
    for plant in (*record.libraries, record.face):
        resolve(plant)(sim)
    host.plant(core, record.torch_name, log)
    lanes.patch()
    collectives.plant(sim)
    os.environ["SGLCORE_SYSTEM_ROOT"] = str(lay_out(record, devices))
    return sim


def _is_torchs_own(device_type: str) -> bool:
    try:
        return bool(torch.device(device_type))
    except RuntimeError:
        return False


def current() -> Simulator | None:
    """Return the simulated device of this process, or None if `install` was not called."""
    return _installed[0] if _installed else None
