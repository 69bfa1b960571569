"""The checking worker with draft tokens: each decode row advances by its own length, which the host
learns when it collects.

Like the real worker, it verifies up to `draft_tokens` draft tokens after each row's last token,
keeps the accepted ones, and leaves garbage in the KV cells of the rejected ones and of the next
draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

import numpy as np

from sglcore.schedule.request import Request
from sglcore.worker.model_worker import BatchResult, Limits, Ticket
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from tests.schedule.fake_slices import FakeSlicedWorker
from tests.schedule.fake_worker import (
    EMPTY,
    NOTHING,
    FakeMatcher,
    FakeWorker,
    Slot,
    Truth,
    mask_word,
    mix,
    want,
)

GARBAGE = -9
Accepts = Literal["some", "all", "none"]
"""The share of draft tokens that are accepted."""


@dataclass
class Known:
    """What the host can know of a slot: its KV cells after the last collected step, its
    verifications in flight, and the most KV cells requested so far."""

    cells: int = 0
    verifying: int = 0
    most: int = 0


class FakeSpeculativeWorker(FakeWorker):
    """Proposes `limits.draft_tokens` tokens per row. With `lookahead` 1, the drafter's KV depends
    on the next token."""

    def __init__(self, limits: Limits, truth: Truth | None = None, accepts: Accepts = "some") -> None:
        super().__init__(limits, truth)
        self.accepts = accepts
        self.known: dict[int, Known] = {}
        self.lengths: dict[int, dict[int, int]] = {}
        """{verifying step in flight: {slot: its KV cells after the step}}"""
        self.proposals: dict[int, list[int]] = {}
        """{slot: draft tokens after its last token}"""
        self.accepted: list[int] = []

    def submit(self, batch: ScheduleBatch) -> Ticket:
        ticket = super().submit(batch)
        if batch.forward_mode.is_decode:
            self.lengths[batch.step] = {slot: self.slots[slot].length for slot in batch.slots.tolist()}
            for slot in self.lengths[batch.step]:
                self.known[slot].verifying += 1
        return ticket

    def collect(self, ticket: Ticket) -> BatchResult:
        for slot, length in self.lengths.pop(ticket.step, {}).items():
            self.known[slot].cells = length
            self.known[slot].verifying -= 1
        return super().collect(ticket)

    def _run(self, batch: ScheduleBatch) -> BatchResult:
        want(batch.forward_mode is not ForwardMode.MIXED, "prompts beside rows that verify")
        want(batch.cell_limits is not None and batch.cell_limits.dtype == np.int32, "no cell_limits")
        self.runs: dict[int, int] = {}
        self.verified: dict[int, int] = {}
        result = super()._run(batch)
        if batch.masks is not None:
            drafts = [self.proposals[slot] for slot in batch.slots.tolist()]
            result = replace(result, drafts=np.array(drafts, dtype=np.int32))
        if not batch.forward_mode.is_decode:
            return result
        self.accepted += self.runs.values()
        if self._width(batch.step) == 1:
            return result
        return replace(result, proposed=np.array(list(self.verified.values()), dtype=np.int32))

    def _check_masks(self, batch: ScheduleBatch, requests: list[Request]) -> None:
        """Check that masks of decode rows follow the draft tokens, as far as the grammar allows
        them."""
        if not batch.forward_mode.is_decode:
            want(batch.mask_nodes is None, "masks along proposals in a step that verifies none")
            super()._check_masks(batch, requests)
            return
        self.nodes: dict[int, int] = {}
        wanted: list[tuple[int, int, int]] = []
        for row, request in enumerate(requests):
            if isinstance(request.matcher, FakeMatcher):
                words = self._words_along(self.slots[batch.slots[row]], int(batch.slots[row]), request, request.matcher)
                wanted += [(row, node, word) for node, word in enumerate(words)]
                self.nodes[row] = len(words)
        given = (batch.mask_rows, batch.mask_nodes, batch.masks)
        if batch.mask_rows is None or batch.mask_nodes is None or batch.masks is None:
            want(given == (None, None, None) and not wanted, f"no masks, wanted {wanted}")
            return
        found = list(zip(batch.mask_rows.tolist(), batch.mask_nodes.tolist(), batch.masks[:, 0].tolist(), strict=True))
        want(found == wanted, f"masks {found}, wanted (row, node, word) {wanted}")

    def _words_along(self, slot: Slot, number: int, request: Request, matcher: FakeMatcher) -> list[int]:
        emitted = self.truth.tokens(request, slot.length + 1)[len(request.prompt_ids) :]
        words = [mask_word(request, emitted)]
        for draft in self.proposals[number]:
            is_allowed = draft >= 0 and words[-1] >> (draft & 31) & 1
            if draft in request.stop_ids or not is_allowed or len(emitted) == matcher.refuse_after:
                break
            emitted = [*emitted, draft]
            words.append(mask_word(request, emitted))
        return words

    def _known_tokens(self, batch: ScheduleBatch, row: int) -> int:
        if not batch.forward_mode.is_decode:
            return super()._known_tokens(batch, row)
        return self.slots[batch.slots[row]].length + 1

    def _check_lengths(self, batch: ScheduleBatch, row: int, slot: Slot, request: Request) -> None:
        number, size, drafts = int(batch.slots[row]), self.limits.page_size, self.limits.draft_tokens
        prefix, final, held = int(batch.prefix_lens[row]), self._final(request), len(slot.pages) * size
        assert batch.cell_limits is not None
        limit = int(batch.cell_limits[row])
        if not batch.forward_mode.is_decode:
            super()._check_lengths(batch, row, slot, request)
            most = int(batch.seq_lens[row]) + self._spare(batch, row, request)
            self.known[number] = Known(int(batch.seq_lens[row]), 0, most)
            want(limit == min(held, final), f"cell_limits {limit} of {held} cells, {final} are needed")
            return
        known = self.known[number]
        want(slot.length <= prefix, f"at most {prefix} cells, the device has {slot.length}")
        bound = known.cells + known.verifying * (drafts + 1)
        want(prefix == bound, f"at most {prefix} cells, which is not the bound {bound}")
        want(known.cells + known.verifying < final, "a row runs whose last token is on its way")
        want(limit <= held, f"cells beyond the page table: cell_limits {limit}, pages hold {held}")
        want(limit <= final, f"cell_limits {limit}, no output needs more than {final}")
        # A step may write past its bound: the tokens that it verifies and the next draft tokens.
        most = prefix + 2 * drafts + 1 - self.limits.lookahead
        want(limit >= min(most, final), f"proposals without cells: cell_limits {limit}, wanted {most} or {final}")
        known.most = max(known.most, min(prefix + 1 + 2 * drafts, final))
        want(len(slot.pages) <= -(-known.most // size), "pages without cells")

    def _spare(self, batch: ScheduleBatch, row: int, request: Request) -> int:
        """KV cells for the draft tokens that follow the last chunk."""
        left = self._final(request) - int(batch.seq_lens[row])
        return max(0, min(self.limits.draft_tokens, left)) if batch.emits[row] else 0

    def _final(self, request: Request) -> int:
        """The KV cells of the request at its end: its last token has none."""
        most = request.params.max_tokens
        context = self.limits.max_model_len
        return (context if most is None else min(len(request.prompt_ids) + most, context)) - 1

    def _check_cells(self, slot: Slot, request: Request, prefix: int) -> None:
        super()._check_cells(slot, request, prefix)
        if prefix and self.limits.lookahead and request.rid not in self.bad_requests:
            found = self.cells[self._places(slot, np.arange(prefix)), 1]
            want(
                (found == self.truth.tokens(request, prefix + 1)[1:]).all(), "what proposals depend on is not complete"
            )

    def _write(self, batch: ScheduleBatch, row: int, request: Request) -> None:
        slot = self.slots[batch.slots[row]]
        if batch.forward_mode.is_decode:
            self._verify(batch, row, request, slot)
            return
        super()._write(batch, row, request)
        if self.limits.lookahead:
            self._check_next(batch, row, request, slot.length)
            self._set(batch, row, np.array([slot.length - 1]), 1, self.truth.tokens(request, slot.length + 1)[-1:])
        self._propose(batch, row, request, slot)

    def _check_next(self, batch: ScheduleBatch, row: int, request: Request, end: int) -> None:
        want(batch.next_ids is not None, "no tokens after the chunks")
        assert batch.next_ids is not None
        following = -1 if batch.emits[row] else self.truth.tokens(request, end + 1)[-1]
        want(batch.next_ids[row] == following, f"token {batch.next_ids[row]} after a chunk, wanted {following}")

    def _verify(self, batch: ScheduleBatch, row: int, request: Request, slot: Slot) -> None:
        number, start = int(batch.slots[row]), slot.length
        first = int(batch.input_ids[batch.token_offsets[row]])
        want(slot.last_token != NOTHING, "a row decodes that has sampled nothing")
        want(first in (slot.last_token, -number), f"token {first} instead of the last sampled")
        assert batch.cell_limits is not None
        nodes = min(self._width(batch.step), self.nodes.get(row, 1 + self.limits.draft_tokens))
        cells = np.arange(start, min(start + nodes, max(int(batch.cell_limits[row]), start)))
        proposals = self.proposals[number][: max(0, len(cells) - 1)]
        tokens = self.truth.tokens(request, start + 2 + len(proposals))
        pairs = zip(proposals, tokens[start + 1 :], strict=False)
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.runs[row], self.verified[row] = accepted, sum(token >= 0 for token in proposals)
        self._keep_right(batch, row, request, cells, accepted + 1)
        slot.length += min(accepted + 1, len(cells))
        self._propose(batch, row, request, slot)

    def _keep_right(self, batch: ScheduleBatch, row: int, request: Request, cells: np.ndarray, right: int) -> None:
        """Write the row's KV cells; the first `right` get the true values, the others garbage."""
        start, end = (int(cells[0]), int(cells[-1]) + 1) if len(cells) else (0, 0)
        contents = (self.truth.digests(request, end)[start:], self.truth.tokens(request, end + 1)[start + 1 :])
        is_bad = request.rid in self.bad_requests
        for column, values in enumerate(contents[: 1 + self.limits.lookahead]):
            found = [GARBAGE if place >= right else NOTHING if is_bad else value for place, value in enumerate(values)]
            self._set(batch, row, cells, column, found)

    def _width(self, step: int) -> int:
        """The tokens that a step verifies per row: all, or sometimes fewer."""
        drafts, chance = self.limits.draft_tokens, mix(EMPTY, step) >> 9
        return 1 + (chance // 4 % drafts if self.accepts == "some" and chance % 4 == 0 else drafts)

    def _rightly(self, request: Request, start: int) -> int:
        """The number of the next draft tokens that will be accepted."""
        if self.accepts != "some":
            return self.limits.draft_tokens if self.accepts == "all" else 0
        return (mix(mix(EMPTY, request.seed), start) >> 9) % (self.limits.draft_tokens + 1)

    def _propose(self, batch: ScheduleBatch, row: int, request: Request, slot: Slot) -> None:
        """Propose accepted tokens, a wrong one, and none; write garbage into their KV cells."""
        drafts = self.limits.draft_tokens
        proposals = self.proposals[int(batch.slots[row])] = [-1] * drafts
        if not batch.emits[row]:
            return
        right = self._rightly(request, slot.length)
        proposals[: right + 1] = self.truth.tokens(request, slot.length + right + 2)[slot.length + 1 :]
        proposals[right] = (proposals[right] + 1) % self.truth.vocab_size
        del proposals[drafts:]
        assert batch.cell_limits is not None
        end = slot.length + self.limits.draft_tokens - self.limits.lookahead
        cells = np.arange(slot.length, max(slot.length, min(end, int(batch.cell_limits[row]))))
        self._set(batch, row, cells, self.limits.lookahead, [GARBAGE] * len(cells))

    def _emit(self, batch: ScheduleBatch, row: int, request: Request) -> list[int]:
        if not batch.forward_mode.is_decode:
            return super()._emit(batch, row, request)
        slot, count = self.slots[batch.slots[row]], self.runs[row] + 1
        end = slot.length + 1
        run = self.truth.tokens(request, max(end, count + 1))[end - count : end]
        slot.last_token = run[-1]
        return run


def make_worker(limits: Limits, accepts: Accepts = "some") -> FakeWorker:
    """The checking worker for these limits."""
    if limits.draft_tokens:
        return FakeSpeculativeWorker(limits, accepts=accepts)
    return FakeSlicedWorker(limits) if limits.sliced_layers else FakeWorker(limits)
