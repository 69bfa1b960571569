"""Collectives of the simulated device: gloo between processes, with the order of streams that the
vendor's library has.

A collective reads and writes its tensors on the stream that is current when it is called, as one
piece of work there, so tensors of another stream race with it unless it waits. With `async_op=True`
it runs on a stream of the group's own, which waits for the current one; `wait()` on its work has
the stream that is current then wait for it, and until that was called nothing may write what it
reads, or touch what it writes. The work holds what comes of it; what is read, the caller has to
hold, as not every library does. Nothing runs in a capture: that is a fault.
"""

# The type stubs of torch.distributed lack what its Python subclasses override.
# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false, reportPrivateImportUsage=false
# pyright: reportAssignmentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


class Done(dist._Work):
    """A collective that has happened, perhaps on a stream that is not the caller's; `result` is
    what it gave."""

    def __init__(self, tensors: list[Any], stream: torch.Stream | None = None) -> None:
        super().__init__()
        self._tensors = tensors
        self._device, self._end = None if stream is None else stream.device, None
        if stream is not None:
            self._end = torch.Event(stream.device)
            self._end.record(stream)
        self._future: Any = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        """The current stream waits for it; the host does not."""
        if self._end is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[Any]:
        return self._tensors

    def get_future(self) -> Any:
        return self._future


class Group(dist.ProcessGroup):
    """One process group over gloo, for tensors of the simulated device."""

    def __init__(self, sim: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._sim = sim
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("simulated", store), rank, size, timeout)
        self._streams: dict[torch.device, torch.Stream] = {}

    def getBackendName(self) -> str:
        return self._sim.kind.collectives

    def _run(
        self,
        name: str,
        fn: Callable[[Any], Any],
        reads: Sequence[Any],
        writes: Sequence[Any],
        result: list[Any],
        opts: Any = None,
    ) -> Done:
        if self._sim.core.is_capturing():
            text = f"{name} at {self._sim.core.site()} in a capture: collectives of processes are not simulated there"
            raise self._sim.log.make("wrong_capture", text)
        over = self._sim.host_view

        def launch() -> None:
            self._sim.launch(name, lambda: fn(over).wait(), reads=list(reads), writes=list(writes))

        if opts is None or not opts.asyncOp:
            return self._at_once(launch, writes, result)
        device = (*reads, *writes)[0].device
        own = self._stream(device)
        self.behind(own, device)
        with own:
            launch()
        if self._sim.timing is not None:
            self._sim.timing.collective(own, writes)
        return Done(result, own)

    def _at_once(self, launch: Callable[[], None], writes: Sequence[Any], result: list[Any]) -> Done:
        launch()
        if self._sim.timing is not None and writes:
            device = writes[0].device
            own = self._stream(device)
            self.behind(own, device)
            self._sim.timing.collective(own, writes)
            torch.accelerator.current_stream(device).wait_stream(own)
        return Done(result)

    def _stream(self, device: torch.device) -> torch.Stream:
        """The group's own."""
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]

    def behind(self, own: torch.Stream, device: torch.device) -> None:
        """The group's stream waits for what was queued on the current one."""
        own.wait_stream(torch.accelerator.current_stream(device))

    def allreduce(self, tensors: Any, opts: Any = None) -> Done:
        """Every tensor becomes the reduction over all ranks."""
        options = opts or dist.AllreduceOptions()
        return self._run(
            "all_reduce",
            lambda over: self._gloo.allreduce([over(t) for t in tensors], options),
            tensors,
            tensors,
            tensors,
            opts,
        )

    def broadcast(self, tensors: Any, opts: Any = None) -> Done:
        """Every tensor becomes that of the root."""
        options = opts or dist.BroadcastOptions()
        root = options.rootRank == self.rank()
        touched = (tensors, ()) if root else ((), tensors)
        return self._run(
            "broadcast", lambda over: self._gloo.broadcast([over(t) for t in tensors], options), *touched, tensors, opts
        )

    def reduce(self, tensors: Any, opts: Any) -> Done:
        """The root's tensor becomes the reduction."""
        return self._run(
            "reduce", lambda over: self._gloo.reduce([over(t) for t in tensors], opts), tensors, tensors, tensors, opts
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """Lists of every rank's tensor."""
        flat = [t for row in outputs for t in row]

        def gather(over: Any) -> Any:
            return self._gloo.allgather([[over(t) for t in row] for row in outputs], [over(t) for t in inputs])

        return self._run("all_gather", gather, inputs, flat, outputs, opts)

    def _allgather_base(self, output: Any, given: Any, opts: Any = None) -> Done:
        """One tensor that holds every rank's, by rank."""

        def gather(over: Any) -> Any:
            parts = list(over(output).view(self.size(), *given.shape).unbind(0))
            return self._gloo.allgather([parts], [over(given)])

        return self._run("all_gather_into_tensor", gather, [given], [output], [output], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """This rank's part of the reduction, of lists of parts."""
        options = dist.AllreduceOptions()
        options.reduceOp = (opts or dist.ReduceScatterOptions()).reduceOp

        def scatter(over: Any) -> Any:
            for output, parts in zip(outputs, inputs, strict=True):
                whole = torch.stack([over(part) for part in parts])
                work = self._gloo.allreduce([whole], options)
                work.wait()
                over(output).copy_(whole[self.rank()])
            return work

        return self._run(
            "reduce_scatter", scatter, [part for parts in inputs for part in parts], outputs, outputs, opts
        )

    def _reduce_scatter_base(self, output: Any, given: Any, opts: Any = None) -> Done:
        """This rank's part of the reduction."""
        options = dist.AllreduceOptions()
        options.reduceOp = (opts or dist.ReduceScatterOptions()).reduceOp

        def scatter(over: Any) -> Any:
            whole = over(given).clone()
            work = self._gloo.allreduce([whole], options)
            work.wait()
            over(output).copy_(whole.view(self.size(), *output.shape)[self.rank()])
            return work

        return self._run("reduce_scatter_tensor", scatter, [given], [output], [output], opts)

    def alltoall_base(self, output: Any, given: Any, output_sizes: Any, input_sizes: Any, opts: Any = None) -> Done:
        """Rows to and from every rank."""

        def exchange(over: Any) -> Any:
            return self._gloo.alltoall_base(
                over(output), over(given), output_sizes, input_sizes, opts or dist.AllToAllOptions()
            )

        return self._run("all_to_all_single", exchange, [given], [output], [output], opts)

    all_gather_single = allgather_into_tensor = _allgather_base
    reduce_scatter_single = reduce_scatter_tensor = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Done:
        """To one rank."""
        return self._run(
            "send", lambda over: self._gloo.send([over(t) for t in tensors], destination, tag), tensors, (), tensors
        )

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Done:
        """From one rank."""
        return self._run(
            "recv", lambda over: self._gloo.recv([over(t) for t in tensors], source, tag), (), tensors, tensors
        )

    def barrier(self, opts: Any = None) -> Done:
        """Every rank has come this far."""
        self._gloo.barrier(opts or dist.BarrierOptions()).wait()
        return Done([])


def plant(sim: Any) -> None:
    """Register the kind's name for its device. Those that torch has itself it makes by a class,
    which CPU builds lack."""
    name = sim.kind.collectives
    if name in dist.Backend.backend_list:
        _plant_class(sim, name)
        return

    def create(store: Any, rank: int, size: int, timeout: Any) -> Group:
        return Group(sim, store, rank, size, timeout)

    dist.Backend.register_backend(name, create, devices=[sim.kind.torch_name])


def _plant_class(sim: Any, name: str) -> None:
    class Options:
        _timeout: Any = None
        is_high_priority_stream = False

    class InTreeGroup(Group):
        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            super().__init__(sim, store, rank, size, options._timeout)

        def _set_sequence_number_for_group(self) -> None:
            """Gloo counts its own."""

    InTreeGroup.Options = Options  # pyright: ignore[reportAttributeAccessIssue]
    names = {f"ProcessGroup{name.upper()}": InTreeGroup, f"_{name.upper()}_AVAILABLE": True}
    for attribute, value in names.items():
        setattr(distributed_c10d, attribute, value)  # foreign: what torch's build with this library has
