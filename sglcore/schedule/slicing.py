"""Which slice of a prompt's layers is next, and the step that runs it.

A slice is a step of its own. The first carries the whole batch of the chunks, the others no rows; the last brings the
tokens. Pages become visible to other requests when the last one is collected, as those of any chunk.
"""

from __future__ import annotations

import numpy as np

from sglcore.device.batch import ForwardMode, ScheduleBatch, offsets_of
from sglcore.device.worker import Limits
from sglcore.schedule.lanes import Fixed, Pace, layers_now
from sglcore.schedule.overlap import BatchRecord
from sglcore.schedule.request import Request
from sglcore.schedule.running_requests import RunningRequests
from sglcore.schedule.sliced import SlicedPrompt


class Slicing:
    """How large the next slice is, by what is asked for or by what steps take."""

    def __init__(self, limits: Limits) -> None:
        self.total, self._most = limits.sliced_layers, limits.max_batch_tokens
        self._is_quiet = False
        self.pace = Fixed(limits.slice_budget) if limits.slice_budget else Pace()

    @property
    def is_on(self) -> bool:
        """The worker takes prompts by slices."""
        return self.total > 0

    def room(self, running: RunningRequests) -> int:
        """Tokens of the next step: of a prompt beside decode rows, those of which a layer is not too long for them."""
        return self.pace.tokens(self._most) if self.is_on and running.rows.requests else self._most

    def begin(
        self, running: RunningRequests, record: BatchRecord, batch: ScheduleBatch, chunks: list[tuple[Request, int]]
    ) -> None:
        """Of a step of chunks alone, what it runs of the layers; the prompt is open if that is not all."""
        if not self.is_on or not chunks:
            return
        sliced = SlicedPrompt(chunks, record.requests, record.slots, record.spans, record.is_masked)
        self._advance(running, sliced, record)
        if record.is_partial:
            batch.layers, record.is_masked = np.array(record.layers, dtype=np.int32), False
            running.sliced = sliced

    def go_on(self, running: RunningRequests, sliced: SlicedPrompt, step: int) -> BatchRecord:
        """The step that runs the next slice of the open prompt."""
        record = BatchRecord(step, sliced.requests, sliced.slots, sliced.spans)
        self._advance(running, sliced, record)
        return record

    def _advance(self, running: RunningRequests, sliced: SlicedPrompt, record: BatchRecord) -> None:
        """All layers that are left where nothing decodes beside."""
        first, tokens, is_alone = sliced.done, sliced.tokens, not running.rows.requests
        sliced.done += (
            self.total - first if is_alone else layers_now(tokens, self.pace.budget(tokens), first, self.total)
        )
        record.layers, record.sliced_tokens = (first, sliced.done), tokens
        record.is_partial = sliced.done < self.total

    def observe(self, record: BatchRecord) -> None:
        """Learn from how long a step took."""
        if record.seconds is None:
            return
        if record.layers is not None:
            first, last = record.layers
            self.pace.saw_slice(record.sliced_tokens, last - first, record.seconds)
        elif not record.spans:
            self.pace.saw_decode(record.seconds, self._is_quiet)
        self._is_quiet = record.layers is None and not record.spans


def further_slice(record: BatchRecord) -> ScheduleBatch:
    """The step of a record without rows, which takes the open prompt on."""
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
