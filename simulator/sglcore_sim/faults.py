"""Faults: the errors that the simulated device raises where hardware would silently corrupt data,
by kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType

KINDS = MappingProxyType(
    {
        "race": "two streams touch the same bytes with no ordering between them, and one of them writes",
        "use_after_free": "memory is reused on its stream without ordering after another stream's work on it",
        "pinned_source_changed": "the host refilled a pinned buffer that a copy could still be reading",
        "pinned_written": "the host wrote to a pinned buffer that a copy had yet to fill",
        "pinned_read_early": "the host read a pinned buffer before it waited for the copy into it",
        "pinned_freed": "pinned memory was freed while a kernel could still use it; torch does not keep it for kernels",
        "sync_in_capture": "the host waits for the device during a capture",
        "sync_forbidden": "the host waits for the device inside a no_sync region",
        "pageable_in_capture": "a copy through pageable host memory, or a blocking one, during a capture",
        "wrong_capture": "a capture on the default stream, nested, unjoined, empty, or mixed with events from outside",
        "stale_graph": "a replay uses memory that was freed since the capture",
        "stuck_graph": "work is queued after a graph that still waits for the host, or the host waits for such a graph",
        "data_dependent": "a shape depends on device data",
        "pool_mate": "a graph's output was overwritten by another graph of the same pool",
        "uninitialised": "memory is read before anything has written it",
        "device_mismatch": "one operation mixes devices",
        "host_access": "the host reaches into device memory",
        "out_of_memory": "the capacity is exhausted (raised as torch.OutOfMemoryError)",
        "wrong_arithmetic": "a kernel uses an operation that Triton's interpreter silently computes wrongly",
        "out_of_bounds": "an index or a kernel lane leaves its tensor",
    }
)


class Fault(RuntimeError):
    """A violation of the device's contract by the simulated program. `kind` is a key of KINDS; the
    text names the code that caused it, of both sides for a race."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"[{kind}] {text}")
        self.kind = kind
        self.text = text

    def __reduce__(self) -> tuple[type[Fault], tuple[str, str]]:
        return (type(self), (self.kind, self.text))  # it is sent between processes


class HostAccess(Fault, TypeError):
    """The fault of kind host_access, which is also a TypeError, because torch raises that for such
    an access."""


class Caught:
    """The fault that an `expect` block caught; `fault` is None until the block ends."""

    def __init__(self) -> None:
        self.fault: BaseException | None = None

    @property
    def text(self) -> str:
        """The fault's message; empty if none was caught."""
        return str(self.fault or "")


class FaultLog:
    """Makes faults for the native core and keeps those that no `expect` block caught in `seen`, in
    order."""

    def __init__(self) -> None:
        self.seen: list[Fault] = []

    def make(self, kind: str, text: str) -> Fault:
        """Return a new fault of `kind`, and keep it in `seen`. The caller, such as the native core,
        raises it. Raises ValueError for an unknown kind."""
        if kind not in KINDS:
            raise ValueError(f"found fault kind {kind!r}, wanted one of {', '.join(KINDS)}")
        fault = (HostAccess if kind == "host_access" else Fault)(kind, text)
        self.seen.append(fault)
        return fault

    def forget(self, fault: BaseException | None) -> None:
        """Remove an expected fault, and the faults in its chain of `__context__`, from `seen`. None
        removes nothing."""
        while fault is not None:
            self.seen[:] = [other for other in self.seen if other is not fault]
            fault = fault.__context__

    @contextmanager
    def expect(self, kind: str, out_of_memory: type[BaseException]) -> Iterator[Caught]:
        """Context manager: catch one fault of `kind` raised in the block, and remove it from
        `seen`; raises AssertionError if none was raised, ValueError for an unknown kind. A fault of
        another kind passes. `out_of_memory`: the exception class that torch raises for an exhausted
        capacity."""
        if kind not in KINDS:
            raise ValueError(f"found fault kind {kind!r}, wanted one of {', '.join(KINDS)}")
        caught = Caught()
        try:
            yield caught
        except Fault as fault:
            if fault.kind != kind:
                raise
            caught.fault = fault
            self.forget(fault)
        except out_of_memory as error:
            if kind != "out_of_memory":
                raise
            caught.fault = error
        if caught.fault is None:
            raise AssertionError(f"found no fault, wanted {kind}: {KINDS[kind]}")
