"""Collectives of the simulated device: gloo between processes, with the stream order of a vendor's
library.

A collective reads and writes its tensors on the current stream as one piece of work, so a stream
that touches the tensors without waiting for it is a race. With `async_op=True` the collective runs
on a stream of the group, which waits for the current stream. `wait()` on its work makes the stream
that is current then wait for it; before that, nothing may write its inputs or touch its outputs.
The work keeps the outputs alive; the caller must keep the inputs alive, because not every library
does. In a capture a collective is a node, which meets the other ranks at each replay, if the
vendor's library can be captured (`Kind.has_captured_collectives`); otherwise it is a fault.
"""

# The type stubs of torch.distributed lack the methods that its Python subclasses override.
# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false, reportPrivateImportUsage=false
# pyright: reportAssignmentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


class Done(dist._Work):
    """The work of a collective that has been run, perhaps on another stream than the caller's;
    `result()` returns its outputs. It is always complete for the host."""

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
        """Make the current stream wait for the collective, if it ran on another stream, and return
        True; the host does not wait. `timeout` is not used."""
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
    """One process group over gloo, for tensors of the simulated device. Each collective returns a
    `Done`; with `opts.asyncOp` it runs on the group's own stream, otherwise on the current one. In
    a capture of a kind without captured collectives it raises a fault (wrong_capture)."""

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
        if self._sim.core.is_capturing() and not self._sim.kind.has_captured_collectives:
            text = f"{name} at {self._sim.core.site()} in a capture: {self._sim.kind.collectives} cannot be captured"
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
        if self._is_timed():
            self._sim.timing.collective(own, writes)
        return Done(result, own)

    def _at_once(self, launch: Callable[[], None], writes: Sequence[Any], result: list[Any]) -> Done:
        launch()
        if self._is_timed() and writes:
            device = writes[0].device
            own = self._stream(device)
            self.behind(own, device)
            self._sim.timing.collective(own, writes)
            torch.accelerator.current_stream(device).wait_stream(own)
        return Done(result)

    def _is_timed(self) -> bool:
        """Whether this call takes virtual time; captured graphs are not timed."""
        return self._sim.timing is not None and not self._sim.core.is_capturing()

    def _stream(self, device: torch.device) -> torch.Stream:
        """Return the group's own stream on the device, made at the first call."""
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]

    def behind(self, own: torch.Stream, device: torch.device) -> None:
        """Make the group's stream `own` wait for the work queued on the current stream of the
        device; the host does not wait."""
        own.wait_stream(torch.accelerator.current_stream(device))

    def allreduce(self, tensors: Any, opts: Any = None) -> Done:
        """Replace every tensor of the list by the reduction (`opts.reduceOp`, sum by default) over
        all ranks."""
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
        """Replace every tensor of the list by that of the root, rank `opts.rootRank` (0 by
        default)."""
        options = opts or dist.BroadcastOptions()
        root = options.rootRank == self.rank()
        touched = (tensors, ()) if root else ((), tensors)
        return self._run(
            "broadcast", lambda over: self._gloo.broadcast([over(t) for t in tensors], options), *touched, tensors, opts
        )

    def reduce(self, tensors: Any, opts: Any) -> Done:
        """Replace the tensors of the root, rank `opts.rootRank`, by the reduction over all ranks;
        those of other ranks have no defined content afterwards."""
        return self._run(
            "reduce", lambda over: self._gloo.reduce([over(t) for t in tensors], opts), tensors, tensors, tensors, opts
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """Write every rank's tensor, by rank, to the tensors of `outputs[0]`; `inputs` is a list of
        this rank's one tensor."""
        flat = [t for row in outputs for t in row]

        def gather(over: Any) -> Any:
            return self._gloo.allgather([[over(t) for t in row] for row in outputs], [over(t) for t in inputs])

        return self._run("all_gather", gather, inputs, flat, outputs, opts)

    def _allgather_base(self, output: Any, given: Any, opts: Any = None) -> Done:
        """Write the tensor `given` of every rank to one tensor, by rank: `output` has size() times
        its elements."""

        def gather(over: Any) -> Any:
            parts = list(over(output).view(self.size(), *given.shape).unbind(0))
            return self._gloo.allgather([parts], [over(given)])

        return self._run("all_gather_into_tensor", gather, [given], [output], [output], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """Write this rank's part of the reduction of lists of parts: outputs[i] becomes the
        reduction over ranks of inputs[i][rank]."""
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
        """Write this rank's part of the reduction of `given`, which has size() parts of output's
        shape, to `output`."""
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
        """Exchange rows of dimension 0 with every rank: rows of `given` go out, `output` gets what
        comes in, both by rank. `input_sizes` and `output_sizes` are the numbers of rows per rank;
        empty: equal shares."""

        def exchange(over: Any) -> Any:
            return self._gloo.alltoall_base(
                over(output), over(given), output_sizes, input_sizes, opts or dist.AllToAllOptions()
            )

        return self._run("all_to_all_single", exchange, [given], [output], [output], opts)

    all_gather_single = allgather_into_tensor = _allgather_base
    reduce_scatter_single = reduce_scatter_tensor = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Done:
        """Send tensors to the rank `destination`, which must call `recv` with the same tag."""
        return self._run(
            "send", lambda over: self._gloo.send([over(t) for t in tensors], destination, tag), tensors, (), tensors
        )

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Done:
        """Receive tensors from the rank `source` into `tensors`."""
        return self._run(
            "recv", lambda over: self._gloo.recv([over(t) for t in tensors], source, tag), (), tensors, tensors
        )

    def barrier(self, opts: Any = None) -> Done:
        """Wait on the host until every rank has called it. It does not wait for the device."""
        self._gloo.barrier(opts or dist.BarrierOptions()).wait()
        return Done([])


def plant(sim: Any) -> None:
    """Register the kind's collectives as a backend of torch.distributed for its device type. For a
    backend name that torch itself knows, such as "nccl", plant the class that torch constructs,
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
            """Do nothing: gloo has its own counter."""

    InTreeGroup.Options = Options  # pyright: ignore[reportAttributeAccessIssue]
    names = {f"ProcessGroup{name.upper()}": InTreeGroup, f"_{name.upper()}_AVAILABLE": True}
    for attribute, value in names.items():
        setattr(distributed_c10d, attribute, value)  # foreign: as in a torch build with it
