"""Attention calls inside a graph: the host rewrites their lengths at every replay.

The operator takes the lengths of keys as a host list, which a capture makes constant. A captured
call is therefore a task group that can be rewritten. The graph waits for the call's event, which is
recorded when the task group has its new lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch


def npu() -> Any:
    """Return torch's module for the device, `torch.npu`. Raises RuntimeError before torch_npu is
    imported."""
    return torch.get_device_module("npu")


@dataclass(frozen=True, slots=True)
class Task:
    """One captured call: the driver's handle, the event that it waits for, and all arguments except
    the lengths."""

    handle: Any
    event: Any
    call: dict[str, Any]


@dataclass(frozen=True, slots=True)
class HostLengths:
    """The update for a replay: `lengths`, the number of keys of every request, for all `tasks` of
    the graph, in order."""

    tasks: Sequence[Task]
    lengths: list[int]

    def apply(self, stream: Any) -> None:
        """Rewrite every task on `stream`, a stream of the extension, with the new lengths; returns
        when the last is queued, without waiting for the device.

        If a task fails, the events of the rewritten tasks are reset, so that no run of the graph
        passes them, and the exception is raised.
        """
        with npu().stream(stream):
            for place, task in enumerate(self.tasks):
                try:
                    npu().graph_task_update_begin(stream, task.handle)
                    run(task.call, self.lengths)
                    npu().graph_task_update_end(stream)
                except BaseException:
                    with suppress(RuntimeError):
                        npu().graph_task_update_end(stream)
                    for rewritten in self.tasks[:place]:
                        rewritten.event.reset(stream)
                    raise
                task.event.record(stream)


def record(call: dict[str, Any], lengths: list[int]) -> Task:
    """Queue a call on the current stream, which must be capturing, as a task with rewritable
    lengths, and return the task. `call`: arguments of the attention operator's `.out` variant
    without lengths; `lengths`: the number of keys of each request, for the capture only."""
    stream = npu().current_stream()
    event = npu().ExternalEvent()
    event.wait(stream)
    event.reset(stream)
    npu().graph_task_group_begin(stream)
    try:
        run(call, lengths)
    finally:
        handle = npu().graph_task_group_end(stream)
    return Task(handle, event, call)


def run(call: dict[str, Any], lengths: list[int]) -> None:
    """Run the attention operator's `.out` variant; `out` in `call` receives the result. `lengths`:
    the number of keys of each request."""
    torch.ops.npu.npu_fused_infer_attention_score.out(**call, actual_seq_lengths_kv=lengths)
