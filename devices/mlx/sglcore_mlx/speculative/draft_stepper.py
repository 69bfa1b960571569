"""The stepper with a draft model: after each forward of the target, the draft takes in its tokens
and makes the draft tokens of the next step, in the same lazy graph."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from sglcore.step.step_output import StepOutput
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore_mlx.forward import resolve_ids
from sglcore_mlx.inputs import bucket, row_bucket
from sglcore_mlx.speculative.drafter import Begun, Draw, ModelDrafter, Pages, PromptRows, Roots, VerifiedRows
from sglcore_mlx.speculative.stepper import SpeculativeStepper, Verified
from sglcore_mlx.speculative.verify import NONE, padded


class DraftStepper(SpeculativeStepper):
    """Drafts with a draft model. Its KV cache, `DeviceState.draft_cells`, has an entry for each
    valid KV slot of the target."""

    def __init__(self, *given: Any, model_drafter: ModelDrafter, **options: Any) -> None:
        """`given` and `options`: the arguments of `SpeculativeStepper`."""
        super().__init__(*given, **options)
        self.model_drafter = model_drafter
        self._more_rows = model_drafter.more_rows
        self._drafts.kept = model_drafter.kept(self._drafts.lengths.shape[0])
        mx.eval(self._drafts.kept)

    def _extend(self, batch: ScheduleBatch) -> StepOutput[mx.array]:
        """Run a prefill step, let the draft take in its tokens, and draft for the requests with a
        complete prompt."""
        ids = resolve_ids(batch.input_ids, self._state.last)  # before sampling, which replaces them
        output, hidden = self._prefill(batch)
        assert output.tokens is not None
        slots = mx.array(batch.slots)
        self._drafts.lengths[slots] = mx.array(batch.seq_lens)
        rows = self._prompt_rows(batch, ids, hidden, output.rows.select, output.tokens.token_ids)
        begun = self.model_drafter.take_in_prompts(rows, self._state.draft_cells)
        emitting = mx.array(output.rows.select(batch.slots))
        self._store(emitting, rows.page_table, begun, rows.roots, rows.lengths, 1)
        output.drafts = self._told(batch, slots)
        return output

    def _prompt_rows(
        self, batch: ScheduleBatch, ids: mx.array, hidden: mx.array, select: Any, roots: mx.array
    ) -> PromptRows:
        """Return the forward's rows; those of the requests that emit are padded as decode rows are.
        `select` takes the emitting rows of an array."""
        ends = batch.token_offsets[1:] - np.int32(1)
        assert batch.next_ids is not None or not self.model_drafter.lookahead
        after = np.full(batch.batch_size, NONE, np.int32) if batch.next_ids is None else batch.next_ids
        following = mx.concatenate([ids[1:], ids[:1]])
        following[mx.array(ends)] = resolve_ids(np.where(after < 0, -batch.slots, after), self._state.last)
        slots, lens = select(batch.slots), select(batch.seq_lens)
        size = row_bucket(len(slots), self._row_buckets, self._max_requests) if self._compiles else len(slots)
        pages = bucket(-(-int(lens.max(initial=1)) // self._table.page_size), self._table.rows.shape[1])
        page_table = self._table.rows[_widened(slots, size), :pages]
        own = mx.array(_widened(select(ends), size)), roots, mx.array(_widened(lens, size))
        requests = mx.array(_widened(select(np.arange(batch.batch_size, dtype=np.int32)), size))
        return PromptRows(
            batch, self._table, ids, following, hidden, *own, mx.array(page_table), requests, self._drafts.kept
        )

    def _follow(self, made: Verified) -> None:
        """Let the draft take in the verified tokens, and draft after them."""
        found, runs, drawn = made.found, made.runs, made.sampled.token_ids
        size, width = found.placed.ids.shape
        rows = VerifiedRows(
            found.fields,
            found.page_table,
            found.hidden,
            padded(drawn, size * width).reshape(size, width),
            padded(runs.accepted, size),
            padded(runs.roots, size),
            padded(runs.lengths, size),
            found.limits,
            self._drafts.kept,
        )
        begun = self.model_drafter.take_in_verified(rows, self._state.draft_cells)
        self._store(found.rows.slots, found.page_table, begun, runs.roots, rows.lengths, made.width)

    def _store(
        self, slots: mx.array, page_table: mx.array, begun: Begun, roots: mx.array, lengths: mx.array, width: int
    ) -> None:
        """Draft, and store the draft tokens of the requests in slots int32[B]. The last sampling
        had `width` rows of each."""
        wanted, table, count = self._counts.made, self._drafts.proposals, slots.shape[0]
        table[slots] = NONE
        if (not wanted or not count) and not self.model_drafter.always_runs:
            return
        pages = Pages(self._state.draft_cells, page_table, self._table.page_size)
        draw = self._drawing(lengths[:count], width) if wanted and count else _draw_nothing
        tokens = self.model_drafter.propose(pages, begun, Roots(roots, lengths), wanted, draw)
        if wanted and count:
            table[slots, :wanted] = tokens

    def _drawing(self, lengths: mx.array, width: int) -> Draw:
        """Return the function that draws draft tokens for requests with roots at lengths int32[B].
        The last sampling had `width` rows of each."""
        return self._sampling.drafting(width)

    def close(self) -> None:
        """As `Stepper.close`."""
        super().close()
        self.model_drafter.close()


def _draw_nothing(logits: mx.array, positions: mx.array) -> mx.array:
    raise AssertionError("no draft tokens are wanted")


def _widened(values: NDArray[np.int32], size: int) -> NDArray[np.int32]:
    return np.pad(values, (0, size - len(values)))
