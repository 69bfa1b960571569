"""Task groups of NPU graphs: captured calls with host arguments that are rewritten while the graph
waits for an external event.

The simulator runs a replay when it is queued. A graph that waits for ExternalEvents is held back
until the host has recorded all of them, which is when it would continue on hardware. Work that is
queued in between would run too early here, so it is a fault (stuck_graph). A wait for work that can
not finish is a fault too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(slots=True)
class Call:
    """One operator of a captured group, with the arguments that its next replay uses."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> None:
        """Run the operator on the current contents of its tensors."""
        self.func(*self.args, **self.kwargs)


@dataclass(slots=True)
class Handle:
    """What the driver's handle of a captured group stands for: `calls`, its operators in order.
    `marker`, on the device, stands for the driver's memory of their arguments, so that unordered
    updates are noticed as races."""

    marker: torch.Tensor
    calls: list[Call] = field(default_factory=list)


@dataclass(slots=True)
class Waiting:
    """A replay that waits for external events: its graph, its stream, and the count of operations
    when it was queued. If the count is another when the events are recorded, other work was queued
    in between, which would wait for ever on hardware (`stuck_graph`); the driver's own work is
    added to it."""

    graph: Any
    stream: torch.Stream
    queued: int


class Recording(TorchDispatchMode):
    """A torch dispatch mode that captures the vendor's operators as nodes of the group `handle`,
    which read their arguments at every replay."""

    def __init__(self, sim: Any, handle: Handle) -> None:
        super().__init__()
        self._sim = sim
        self.handle = handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Capture an operator of the vendor and return its `out`; torch's own operators are
        captured as usual. Raises NotImplementedError for an operator without `out`."""
        if func.namespace != "npu":
            return func(*args, **(kwargs or {}))
        call = Call(func, args, dict(kwargs or {}))
        out = call.kwargs.get("out")
        if out is None:
            raise NotImplementedError(
                f"{func} in a task group: only variants over buffers of the caller (.out) are simulated"
            )
        writes = [out] if isinstance(out, torch.Tensor) else list(out)
        given = [*args, *(value for name, value in call.kwargs.items() if name != "out")]
        reads = [value for value in given if isinstance(value, torch.Tensor)]
        self.handle.calls.append(call)
        self._sim.launch(str(func), call.run, reads=[*reads, self.handle.marker], writes=writes)
        return out


class Rewriting(TorchDispatchMode):
    """A torch dispatch mode that stores the arguments of the vendor's operators as the new
    arguments of the group `handle`, in order, without running the operators."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self.handle = handle
        self.taken = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take the arguments for the group's next operator and return its `out`; torch's own
        operators run as usual. Raises RuntimeError for an operator that is not the group's next."""
        if func.namespace != "npu":
            return func(*args, **(kwargs or {}))
        if self.taken >= len(self.handle.calls) or self.handle.calls[self.taken].func is not func:
            place, self.taken = self.taken, -1
            wanted = [str(call.func) for call in self.handle.calls[place:]]
            raise RuntimeError(f"found {func} in the update of a task group, wanted {wanted or 'no more'}")
        call = self.handle.calls[self.taken]
        call.args, call.kwargs = args, dict(kwargs or {})
        self.taken += 1
        return call.kwargs.get("out")


class Tasks:
    """The task groups that are being captured or rewritten, and the replays that wait for the host
    (`waiting`). `capturing`: the graph that is being captured, or None."""

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        self._recording: list[Recording] = []
        self._rewriting: list[Rewriting] = []
        self.waiting: list[Waiting] = []
        self.capturing: Any = None

    def begin_group(self, stream: torch.Stream) -> None:
        """Start a group: the vendor's operators that follow on this thread belong to it. Raises
        RuntimeError unless a stream is being captured."""
        if not self._sim.core.is_capturing():
            raise RuntimeError("graph_task_group_begin wants a stream that is being captured")
        # On another stream than the captured one, so that the marker is not in the graph's pool,
        # which other graphs write too.
        with torch.Stream(stream.device):
            marker = torch.empty(1, dtype=torch.uint8, device=stream.device)
        recording = Recording(self._sim, Handle(marker))
        recording.__enter__()
        self._recording.append(recording)

    def end_group(self, stream: torch.Stream) -> Handle:
        """End the group that was started last and return its handle. Raises RuntimeError if there
        is none."""
        if not self._recording:
            raise RuntimeError("graph_task_group_end without graph_task_group_begin")
        recording = self._recording.pop()
        recording.__exit__(None, None, None)
        return recording.handle

    def begin_update(self, stream: torch.Stream, handle: Handle) -> None:
        """Start an update of a group: the vendor's operators that follow on this thread are not
        run, but give the group's operators new arguments, in order."""
        rewriting = Rewriting(handle)
        rewriting.__enter__()
        self._rewriting.append(rewriting)

    def end_update(self, stream: torch.Stream) -> None:
        """End the update and queue it on the stream. The program must order it after the previous
        replay and before the next one (a race otherwise). Raises RuntimeError if it did not name
        all operators of the group, or if no update was begun."""
        if not self._rewriting:
            raise RuntimeError("graph_task_update_end without graph_task_update_begin")
        rewriting = self._rewriting.pop()
        rewriting.__exit__(None, None, None)
        if rewriting.taken not in (len(rewriting.handle.calls), -1):
            raise RuntimeError(
                f"found {rewriting.taken} of {len(rewriting.handle.calls)} operators of the task group in its update"
            )
        with stream, self._uncounted():
            self._sim.access(rewriting.handle.marker, write=True, op="graph_task_update")

    def abandon(self) -> None:
        """Leave the groups that are still open when a capture ends, without a handle."""
        while self._recording:
            self._recording.pop().__exit__(None, None, None)
        self.capturing = None

    def forget(self) -> None:
        """Drop all waiting replays, open groups and updates."""
        self.waiting.clear()
        self.abandon()
        while self._rewriting:
            self._rewriting.pop().__exit__(None, None, None)

    def replay(self, graph: Any, run: Callable[[], None]) -> None:
        """Call `run`, which runs the graph, now if the host has recorded all events that the graph
        waits for; otherwise hold it back until it has. Raises the fault stuck_graph if another
        replay is held back."""
        self.refuse("another replay is queued")
        if all(event.is_set for event in graph.waits):
            run()
            return
        self.waiting.append(Waiting(graph, torch.accelerator.current_stream(), self._count()))

    def recorded(self) -> None:
        """Run the replays that no longer wait; called after an external event was recorded. Raises
        the fault stuck_graph if other work was queued in the meantime."""
        for waiting in [w for w in self.waiting if all(event.is_set for event in w.graph.waits)]:
            self.waiting.remove(waiting)
            if self._count() != waiting.queued:
                raise self._stuck("work was queued between a replay and the update that it waits for")
            with waiting.stream:
                waiting.graph.run()

    def recorded_twice(self) -> Exception:
        """Return, without raising it, the fault (race) of an event that is recorded again before a
        graph has waited for it: the graph would continue after the first record, before the work
        between both records, and the second record would let a later graph pass that should
        wait."""
        text = f"an ExternalEvent is recorded at {self._sim.core.site()}, and no graph has waited for its last record"
        return self._sim.log.make("race", text)

    def refuse(self, what: str) -> None:
        """Raise the fault stuck_graph if a replay still waits for the host; `what` says what
        happened instead. Without a waiting replay it does nothing."""
        if self.waiting:
            self.waiting.clear()
            raise self._stuck(what)

    def _stuck(self, what: str) -> Exception:
        text = (
            f"{what} at {self._sim.core.site()}, while a graph still waits for an ExternalEvent "
            "that the host has not recorded"
        )
        return self._sim.log.make("stuck_graph", text)

    def _count(self) -> int:
        return int(self._sim.stats()["ops"])

    def _uncounted(self) -> Any:
        return _Uncounted(self)


class _Uncounted:
    """A context for the driver's own work: operations inside do not count as queued by the program
    while a replay waits, so they are no fault."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._before = 0

    def __enter__(self) -> None:
        self._before = self._tasks._count()

    def __exit__(self, *args: object) -> None:
        for waiting in self._tasks.waiting:
            waiting.queued += self._tasks._count() - self._before
