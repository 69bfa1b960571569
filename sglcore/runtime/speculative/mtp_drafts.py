"""Multi-token prediction by several layers, one draft token each.

DeepSeek-AI 2024, arXiv 2412.19437, section 2.2. KV slot i of layer j (from 0) has token i + 1 + j
and the output of layer j - 1 for KV slot i; layer 0 has the target's features of token i. The last
j KV slots of a text therefore depend on draft tokens. With k layers, every forward begins k - 1 KV
slots before those of the target and rewrites them from the accepted text; their inputs are kept by
slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.speculative.draft_batches import decode_batch, no_tokens
from sglcore.runtime.speculative.drafter import DraftRows
from sglcore.step.batch_field import Axis
from sglcore.worker.schedule_batch import ForwardMode
from sglcore.worker.step_plan import StepPlan


class HeadsModel(Protocol):
    """The draft model of `MultiHeadDrafter`: its first layer, and the projection that all layers
    share.
    """

    feature_size: int
    dtype: torch.dtype

    def project(self, features: Tensor, /) -> Tensor:
        """Map the target's features [T, F] to [T, feature_size]."""
        ...


class Window(NamedTuple):
    """The rows that every layer runs again: of each of B requests the last KV slots before the
    target's forward, and in a verification also those of that forward; N rows per request.

    `slots` int32[B]: request slots. `batch`: a decode batch of the B * N rows. `ids` int32[B, C], C
    >= N: the token after each row; entries from `known` int32[B] on (which may exceed C) are drafts
    or padding. `features` [B * N, H]: the target's projected features, the input of layer 0.
    """

    slots: Tensor
    batch: ForwardBatch
    ids: Tensor
    known: Tensor
    features: Tensor


class MultiHeadDrafter:
    """A `Drafter` that runs one forward of each layer over the same KV slots; each layer proposes
    the next draft token.

    All layers run at every step, even if fewer tokens are wanted, so that every KV slot is written.
    """

    reads_history = False

    def __init__(self, runners: Sequence[ModelRunner], slots: int, model: HeadsModel) -> None:
        """`runners` of two or more layers, in order, over the target's page table. `slots` includes
        slot 0.
        """
        self.runners = tuple(runners)
        self.tokens = self.lookahead = len(self.runners)
        self._project = model.project
        self._back = back = self.tokens - 1
        device = runners[0].token_table.last.device
        self._steps = torch.arange(max(2 * self.tokens, slots), dtype=torch.int32, device=device)
        # By slot: the tokens after its last KV slots, the target's features of these, the KV slots
        # before the request's first prefilled token, and the draft tokens after the known text.
        self._ids = torch.zeros(slots, back, dtype=torch.int32, device=device)
        self._features = torch.zeros(slots, back, model.feature_size, dtype=model.dtype, device=device)
        self._starts = torch.zeros(slots, dtype=torch.int32, device=device)
        self._beyond = torch.zeros(slots, back, dtype=torch.int32, device=device)

    def advance(self, rows: DraftRows) -> Tensor:
        """Implements `Drafter.advance`: run every layer over the target's rows, and draw a wanted
        token from each layer's output before the next layer runs.
        """
        assert rows.features is not None
        found, count = list[Tensor](), len(rows.most_lens)
        run = self.run_verified if rows.batch.forward_mode.is_decode else self.run_prompts
        if rows.batch.forward_mode is ForwardMode.IDLE:
            run = self.run_nothing
        for depth, hidden in enumerate(run(rows, self._project(rows.features)), 1):
            if depth > rows.wanted or not count:
                continue
            found.append(rows.draw(self.runners[depth - 1].logits(hidden, None), depth))
            if depth <= self._back:
                self._beyond[:, depth - 1].index_put_((rows.slots,), found[-1])
        return torch.stack(found, 1) if found else rows.ids.new_empty(count, rows.wanted)

    def run_verified(self, rows: DraftRows, features: Tensor) -> Iterator[Tensor]:
        """Yield each layer's output [R, H] for the last accepted token of each request.

        `features` [T, H]: those of the rows, projected. The caller draws a token from each output
        and writes it to `_beyond`, where the next layer reads it.
        """
        count = len(rows.most_lens)
        if not count:
            return
        window = self.verified(rows, features)
        size = window.batch.num_tokens // count
        last = self._steps[:count] * size + window.known - 1
        kept, ids = (last[:, None] + self._steps[: self._back] - (self._back - 1)).flatten(), window.ids.flatten()
        self.keep(rows.slots, ids.index_select(0, kept), window.features.index_select(0, kept))
        self._expect(rows.slots, ids.index_select(0, last))
        hidden = window.features
        for depth, runner in enumerate(self.runners):
            self._run_no_front(runner, rows, features)
            hidden = self._run(runner, window, depth, hidden)
            yield hidden.index_select(0, last)

    def run_nothing(self, rows: DraftRows, features: Tensor) -> Iterator[Tensor]:
        """Run each layer without requests, because other data-parallel shards have some, and yield
        its output, which has no rows.

        `features` are [0, H].
        """
        plan = self._plan_of_rows(rows.batch)
        assert plan is not None
        for runner in self.runners:
            self._run_no_front(runner, rows, features)
            yield runner.forward(no_tokens(rows.batch, plan, features))[0]

    def run_prompts(self, rows: DraftRows, features: Tensor) -> Iterator[Tensor]:
        """Yield each layer's output [R, H] for the last tokens of prompts that end in this step.

        Runs the chunks of all prompts.
        """
        batch, slots = rows.batch, rows.batch.req_pool_indices
        first, lengths, before = batch.extend_start_loc, batch.extend_seq_lens, batch.extend_prefix_lens
        assert first is not None and lengths is not None and before is not None and rows.begins is not None
        starts = torch.where(rows.begins > 0, before, self._starts.index_select(0, slots))
        self._starts.index_put_((slots,), starts)
        ends = first + lengths - 1
        self._expect(slots, rows.ids.index_select(0, ends))
        window = self.before_chunks(rows, first, ends) if rows.goes_on else None
        self._keep_of_chunks(rows, features, first, lengths)
        front, hidden = None if window is None else window.features, features
        plan = self._plan_of_rows(batch)
        for depth, runner in enumerate(self.runners):
            if window is not None and front is not None:
                # Prefill graphs may share memory with decode graphs.
                front = self._run(runner, window, depth, front).clone()
            else:
                self._run_no_front(runner, rows, features)
            ids = self._ahead(rows.ids, slots, first, ends, depth)
            given = {"input_ids": ids, "input_embeds": None, "features": hidden, "plan_record": None, "step_plan": plan}
            hidden = runner.forward(replace(batch, **given))[0]
            yield hidden.index_select(0, rows.select)

    def verified(self, rows: DraftRows, features: Tensor) -> Window:
        """Return the rows to run for a verification: k - 1 KV slots before it, and its own. k is
        the number of layers; `features` [T, H] are those of its rows, projected.

        Host lengths are those of the verification, as far as the host knows them.
        """
        count, batch = len(rows.most_lens), rows.batch
        assert batch.seq_lens_cpu is not None
        ends = batch.seq_lens_cpu.reshape(count, -1)
        places = batch.positions.view(count, -1)
        slots, positions = self.front(rows.slots, places[:, 0])
        slots = torch.cat([slots, batch.req_pool_indices.view(count, -1)], 1).flatten()
        positions = torch.cat([positions, places], 1).flatten()
        ids = torch.cat([self._ids.index_select(0, rows.slots), rows.ids.view(count, -1)], 1)
        most = np.concatenate([self._front_ends(ends[:, :1] - np.int32(1)), ends], 1).reshape(-1)
        known = rows.select - self._steps[:count] * rows.width + (1 + self._back)
        own = features.view(count, rows.width, -1)
        features = torch.cat([self._features.index_select(0, rows.slots), own], 1).flatten(0, 1)
        plan = self._plan_of_rows(batch)
        firsts = self._steps[:count] * rows.width

        def sources(axis: Axis) -> Tensor:
            return firsts.repeat_interleave(self._back + rows.width)

        decode = decode_batch(batch, sources, slots, positions, ids, most, plan=plan)
        return Window(rows.slots, decode, ids, known, features)

    def before_chunks(self, rows: DraftRows, first: Tensor, ends: Tensor) -> Window:
        """Return the rows to run before prefill chunks: k - 1 KV slots before each, for k layers.

        The tokens of a chunk are `first` <= i <= `ends` int32[B] of the batch.
        """
        batch, slots = rows.batch, rows.batch.req_pool_indices
        assert batch.extend_prefix_lens is not None and batch.extend_prefix_lens_cpu is not None
        owners, positions = self.front(slots, batch.extend_prefix_lens)
        places = torch.minimum(first[:, None] + self._steps[: self._back], ends[:, None])
        following = rows.ids.index_select(0, places.flatten()).view(places.shape)
        ids = torch.cat([self._ids.index_select(0, slots), following], 1)
        most = self._front_ends(batch.extend_prefix_lens_cpu[:, None]).reshape(-1)
        plan = self._plan_of_front(batch)

        def sources(axis: Axis) -> Tensor:
            entries = first if axis is Axis.TOKENS else self._steps[: batch.batch_size]
            return entries.repeat_interleave(self._back)

        decode = decode_batch(batch, sources, owners.flatten(), positions.flatten(), ids, most, plan=plan)
        known = ends - first + (1 + self._back)
        return Window(slots, decode, ids, known, self._features.index_select(0, slots).flatten(0, 1))

    def front(self, slots: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Return slots and positions int32[B, k - 1] of the last KV slots before `cells` int32[B].

        KV slots before the request's first go to position 0 of slot 0.
        """
        places = cells[:, None] + (self._steps[: self._back] - self._back)
        usable = places >= self._starts.index_select(0, slots)[:, None]
        return slots[:, None] * usable, places * usable

    def keep(self, slots: Tensor, ids: Tensor, features: Tensor) -> None:
        """Store the inputs of the last k - 1 KV slots of the request slots `slots` int32[B].

        These are the tokens after the KV slots, `ids` int32[B * (k - 1)], and the target's
        projected features [B * (k - 1), H].
        """
        self._ids.index_put_((slots,), ids.view(-1, self._back))
        self._features.index_put_((slots,), features.view(-1, self._back, features.shape[-1]))

    def _keep_of_chunks(self, rows: DraftRows, features: Tensor, first: Tensor, lengths: Tensor) -> None:
        """Store what `keep` stores, for prefill chunks; a chunk shorter than k - 1 keeps part of
        the stored values.
        """
        slots = rows.batch.req_pool_indices
        places = lengths[:, None] + (self._steps[: self._back] - self._back)
        new = (first[:, None] + places.clamp(min=0)).flatten()
        old = (slots[:, None] * self._back + (places + self._back).clamp(max=self._back - 1)).flatten()
        is_new = (places >= 0).flatten()
        ids = torch.where(is_new, rows.ids.index_select(0, new), self._ids.flatten().index_select(0, old))
        before = self._features.flatten(0, 1).index_select(0, old)
        self.keep(slots, ids, torch.where(is_new[:, None], features.index_select(0, new), before))

    def _expect(self, slots: Tensor, last: Tensor) -> None:
        """Initialise the expected next tokens with the last known tokens int32[B]."""
        self._beyond.index_put_((slots,), last[:, None].expand(-1, self._back))

    def _run(self, runner: ModelRunner, window: Window, depth: int, features: Tensor) -> Tensor:
        """Run the layer number `depth`; return [B * N, H]."""
        given = {"input_ids": self.ahead(window, depth), "features": features, "plan_record": None}
        return runner.forward(replace(window.batch, **given))[0]

    def _run_no_front(self, runner: ModelRunner, rows: DraftRows, features: Tensor) -> None:
        """Join the forward that other shards run before their prefill, if there is one."""
        plan = self._plan_of_front(rows.batch)
        if plan is not None:
            runner.forward(no_tokens(rows.batch, plan, features[:0]))

    def _plan_of_rows(self, batch: ForwardBatch) -> StepPlan | None:
        """Return the plan of a forward with all rows and those before them; None with one shard."""
        if batch.step_plan is None:
            return None
        plan = batch.step_plan.from_before(self._back)
        return self.runners[0].replayed(plan) if plan.is_decode else plan

    def _plan_of_front(self, batch: ForwardBatch) -> StepPlan | None:
        """Return the plan of a forward with the rows before continued prompts; None with one shard,
        or if no shard continues a prompt.
        """
        plan = None if batch.step_plan is None else batch.step_plan.before_prompts(self._back)
        return None if plan is None else self.runners[0].replayed(plan)

    def ahead(self, window: Window, depth: int) -> Tensor:
        """Return the input ids of layer number `depth`, int32[B * N]: the token `depth` places
        after `window.ids` of each row.

        From `window.known` on, these are the draft tokens drawn so far for the slot.
        """
        size = window.batch.num_tokens // len(window.slots)
        columns = self._steps[:size] + depth
        ids = window.ids.index_select(1, columns.clamp(max=window.ids.shape[1] - 1))
        behind = columns - window.known[:, None]
        places = window.slots[:, None] * self._back + behind.clamp(0, self._back - 1)
        beyond = self._beyond.flatten().index_select(0, places.flatten()).view(places.shape)
        return torch.where(behind < 0, ids, beyond).flatten()

    def _ahead(self, ids: Tensor, slots: Tensor, first: Tensor, ends: Tensor, depth: int) -> Tensor:
        """Return the input ids of layer number `depth` for prefill chunks, int32[T]: the token
        `depth` places after `ids` of each token.

        After the end of a chunk these are the draft tokens drawn so far for its slot.
        """
        turned, beyond = ids.roll(-depth), self._beyond.index_select(0, slots)
        # The last token of a chunk is written last: a short chunk's missing tokens are overwritten.
        for place in range(depth):
            rows = torch.maximum(ends - (depth - 1 - place), first)
            turned.index_put_((rows,), beyond[:, place])
        return turned

    def _front_ends(self, cells: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return int32[B, k - 1]: the lengths (position + 1, at least 1) of the k - 1 rows before
        KV slots `cells` int32[B, 1].
        """
        steps = np.arange(1 - self._back, 1, dtype=np.int32)
        return np.maximum(cells + steps, np.int32(1))

    def close(self) -> None:
        """Close the runners: free their graphs, and leave the communication groups if there are
        any.
        """
        for each in self.runners:
            each.close()
