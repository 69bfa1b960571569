"""Choose the next slice of a prompt's layers, and build the step that runs it.

Each slice is a step. The first carries the whole batch of the chunks, the others no rows; the last
returns the tokens. The pages are published when the last slice is collected, as for any chunk.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sglcore.schedule.layered_prefill.slice_pace import Fixed, Pace, layers_now
from sglcore.schedule.request import Request
from sglcore.schedule.running_requests import RunningRequests
from sglcore.schedule.sliced_prompt import SlicedPrompt
from sglcore.schedule.steps_in_flight import BatchRecord
from sglcore.worker.model_worker import Limits
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch, offsets_of

MOST_QUIET = 4
"""Most decode steps in a row that run alone to be measured while a prompt waits."""


class Slicing:
    """The `PrefillPolicy` with slices of layers. Their size is configured (`limits.slice_budget`),
    or chosen from measured times.
    """

    def __init__(self, limits: Limits) -> None:
        self.total, self._most = limits.sliced_layers, limits.max_batch_tokens
        self._runs_ahead, self._quiet, self._ended = limits.runs_ahead, 0, 0.0
        self._before: BatchRecord | None = None
        self._between: list[BatchRecord] = []
        self.pace = Fixed(limits.slice_budget) if limits.slice_budget else Pace()

    @property
    def is_on(self) -> bool:
        """Whether the worker runs prompts in slices."""
        return self.total > 0

    def room(self, running: RunningRequests) -> int:
        """Return the maximum number of tokens of the next step. While requests decode, a prompt
        chunk is limited so that one layer of it fits in a slice."""
        return self.pace.tokens(self._most) if self.is_on and running.rows.requests else self._most

    def begin(
        self, running: RunningRequests, record: BatchRecord, batch: ScheduleBatch, chunks: list[tuple[Request, int]]
    ) -> None:
        """Choose the layers of a planned step. If these are not all layers, sets them in `record`
        and `batch`, and makes the prompt `running.sliced`. A step without chunks runs all layers.
        """
        if not self.is_on or not chunks:
            return
        sliced = SlicedPrompt(chunks, record.requests, record.slots, record.spans, record.is_masked)
        self._advance(running, sliced, record)
        if record.is_partial:
            batch.layers, record.is_masked = np.array(record.layers, dtype=np.int32), False
            batch.decode_rows = len(running.rows.requests)
            running.sliced = sliced

    def go_on(self, running: RunningRequests, sliced: SlicedPrompt, step: int) -> tuple[BatchRecord, ScheduleBatch]:
        """Return the step that runs the next slice of the sliced prompt, and its record."""
        record = BatchRecord(step, sliced.requests, sliced.slots, sliced.spans)
        self._advance(running, sliced, record)
        return record, further_slice(record)

    def _advance(self, running: RunningRequests, sliced: SlicedPrompt, record: BatchRecord) -> None:
        """Choose the layers of the prompt's next slice and write them into `record`: as many as the
        pace's budget allows, or all that are left if no request decodes.
        """
        self._quiet = 0
        first, tokens, is_alone = sliced.done, sliced.tokens, not running.rows.requests
        sliced.done += (
            self.total - first if is_alone else layers_now(tokens, self.pace.budget(tokens), first, self.total)
        )
        record.layers, record.sliced_tokens = (first, sliced.done), tokens
        record.is_partial = sliced.done < self.total

    def takes_quiet(self) -> bool:
        """Return whether another decode step must run first, without a slice, to be measured. True
        at most MOST_QUIET times in a row.
        """
        self._quiet += 1
        return self.pace.wants_quiet and self._quiet <= MOST_QUIET

    def observe(self, record: BatchRecord, in_flight: Iterable[BatchRecord] = ()) -> None:
        """Learn from the time of a collected step; `in_flight` are the steps submitted after it.

        On a worker that runs ahead, a slice may overlap the decode steps before and after it. Its
        cost is then how much longer the period from one decode step's end to the next one's became.
        On other workers each step has its own time.
        """
        if record.seconds is None or not self.is_on:
            return
        is_decode, before = record.layers is None and not record.spans, self._before
        self._before = record
        if self._runs_ahead:
            self._observe_period(record, is_decode, any(each.layers is not None for each in in_flight))
        elif record.layers is not None:
            self.pace.saw_slice(record.sliced_tokens, record.layers[1] - record.layers[0], record.seconds)
        elif is_decode and (before is None or before.layers is None):
            self.pace.saw_decode(record.seconds)

    def _observe_period(self, record: BatchRecord, is_decode: bool, has_launched: bool) -> None:
        """Learn from the period between two decode steps. `has_launched`: a slice was submitted
        before this step was collected.
        """
        if not is_decode:
            self._between.append(record)
            return
        between, self._between, begun, self._ended = self._between, [], self._ended, record.ended
        if not begun:
            return
        if not between and not has_launched:
            self.pace.saw_decode(record.ended - begun)
        elif len(between) == 1 and (layers := between[0].layers) is not None and self.pace.decode_seconds:
            longer = record.ended - begun - self.pace.decode_seconds
            self.pace.saw_slice(between[0].sliced_tokens, layers[1] - layers[0], longer)


def further_slice(record: BatchRecord) -> ScheduleBatch:
    """Return the batch of a record that continues the sliced prompt; it has no rows."""
    none = np.zeros(0, dtype=np.int32)
    return ScheduleBatch(
        step=record.step,
        forward_mode=ForwardMode.EXTEND,
        slots=none,
        seq_lens=none,
        prefix_lens=none,
        token_offsets=offsets_of(none),
        input_ids=none,
        page_counts=none,
        new_page_offsets=offsets_of(none),
        new_pages=none,
        emits=np.zeros(0, dtype=bool),
        layers=np.array(record.layers, dtype=np.int32),
    )
