"""The token budget of a prefill step, and which layers it runs (layered prefill).

`RunningRequests.plan_chunks` picks the chunks of chunked prefill.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from sglcore.schedule.request import Request
from sglcore.schedule.running_requests import RunningRequests
from sglcore.schedule.sliced_prompt import SlicedPrompt
from sglcore.schedule.steps_in_flight import BatchRecord
from sglcore.worker.model_worker import Limits
from sglcore.worker.schedule_batch import ScheduleBatch


class PrefillPolicy(Protocol):
    """Decides how many tokens, and which layers, of a prompt a step computes. `WholePrompts` and
    `layered_prefill.slice_choice.Slicing` implement it.
    """

    @property
    def is_on(self) -> bool:
        """Whether prompts may run in slices of layers."""
        ...

    def room(self, running: RunningRequests) -> int:
        """Return the maximum number of tokens of the next step, decode rows included."""
        ...

    def begin(
        self, running: RunningRequests, record: BatchRecord, batch: ScheduleBatch, chunks: list[tuple[Request, int]]
    ) -> None:
        """Choose the layers of a planned step. If these are not all layers, set them in `record`
        and `batch`, and set `running.sliced`.
        """
        ...

    def go_on(self, running: RunningRequests, sliced: SlicedPrompt, step: int) -> tuple[BatchRecord, ScheduleBatch]:
        """Return the step that runs the next layers of the sliced prompt, and its record. `step` is
        the number of the step.
        """
        ...

    def takes_quiet(self) -> bool:
        """Return whether a decode step must run before the next slice, to be measured."""
        ...

    def observe(self, record: BatchRecord, in_flight: Iterable[BatchRecord] = ()) -> None:
        """Learn from the time of a collected step; `in_flight` are the steps submitted after it."""
        ...


class WholePrompts:
    """The `PrefillPolicy` without slices: each step runs all layers."""

    is_on = False

    def __init__(self, limits: Limits) -> None:
        self._most = limits.max_batch_tokens

    def room(self, running: RunningRequests) -> int:
        """Return `max_batch_tokens`, the maximum tokens of a step."""
        return self._most

    def begin(
        self, running: RunningRequests, record: BatchRecord, batch: ScheduleBatch, chunks: list[tuple[Request, int]]
    ) -> None:
        """Do nothing: all layers run."""

    def go_on(self, running: RunningRequests, sliced: SlicedPrompt, step: int) -> tuple[BatchRecord, ScheduleBatch]:
        """Raise AssertionError: no prompt runs in slices."""
        raise AssertionError("a prompt is open, but the scheduler was made without slices")

    def takes_quiet(self) -> bool:
        """Return False: no decode step is measured."""
        return False

    def observe(self, record: BatchRecord, in_flight: Iterable[BatchRecord] = ()) -> None:
        """Do nothing: no choice depends on times."""
