"""Broken devices that store or choose entries of sparse attention wrongly: defects in the kernel
entries that the core's backends use. A defect is a function from the entry's function, or from a
class, to a broken one; its docstring is the text of its `Mutant`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglcore.conformance.mutant import Mutant, become, in_runtime, words_of

Entry = Callable[..., Any]


def forgets_blocks(real: Entry) -> Entry:
    """Tokens of an incomplete block are lost after their step."""

    def plan(*args: Any) -> None:
        real(*args)
        args[-1].zero_()

    return plan


def keeps_the_last_page(real: Entry) -> Entry:
    """Only the last page of a step keeps the tokens of its last blocks."""

    def plan(*args: Any) -> None:
        real(*args)
        slots, seq_lens, _, _, token_slots, positions, table, _, _, page_size, *_ = args
        ends = torch.zeros(table.shape[0], dtype=torch.int64, device=slots.device)
        ends[slots.long()] = seq_lens.long()
        is_last = positions // page_size == (ends[token_slots.long()] - 1) // page_size
        args[-1].mul_(is_last)

    return plan


def reads_before_the_first(real: Entry) -> Entry:
    """A request's first block reads old rows of its slot or page."""

    def plan(*args: Any) -> None:
        real(*args)
        reads, is_event = args[-4], args[-4][:, -1:] != -1
        reads.copy_(torch.where((reads == -1) & is_event, -2, reads))

    return plan


def chooses_first(real: Entry) -> Entry:
    """The first rows of a text are chosen, whatever their scores."""

    def top_k(logits: Tensor, *args: Any) -> Tensor:
        return real(-torch.arange(logits.shape[1], device=logits.device).float().expand_as(logits).contiguous(), *args)

    return top_k


def loses_oldest(real: Entry) -> Entry:
    """A window is one token too short."""

    def rows(table: Tensor, token_slots: Tensor, positions: Tensor, window: int, page_size: int, out: Tensor) -> None:
        real(table, token_slots, positions, window, page_size, out)
        is_full = out[:, -1:] >= 0
        out.copy_(torch.where(is_full, torch.cat((out[:, 1:], torch.full_like(out[:, :1], -1)), dim=1), out))

    return rows


def sees_open_blocks(real: Entry) -> Entry:
    """A block is visible one token before it is complete."""

    def rows(table: Tensor, token_slots: Tensor, positions: Tensor, *args: Any) -> None:
        real(table, token_slots, positions + 1, *args)

    return rows


def rows_of_neighbours(real: Entry) -> Entry:
    """Tokens of a step are stored in each other's rows."""

    def store(*args: Any) -> None:
        real(*args[:-2], args[-2].roll(1), args[-1])

    return store


def forgets_to_load(real: Entry) -> Entry:
    """The last row that is missing on the device is not loaded."""

    def copy_rows(source: Tensor, target: Tensor, loads: Tensor, counts: Tensor) -> None:
        real(source, target, loads, (counts - 1).clamp(min=0))

    return copy_rows


def keeps_what_others_left(base: Any) -> type:
    """The rows of a slot's previous request are used for the next one."""

    class KeepsWhatOthersLeft(base):
        __slots__ = ()

        def enter(self, slots: Tensor) -> None:
            return None

    return KeepsWhatOthersLeft


def plans_once(base: Any) -> type:
    """The first plan is replayed for all steps."""

    class PlansOnce(base):
        __slots__ = ()

        def refresh(self, plan: Any, batch: Any) -> None:
            return None

    return PlansOnce


def _in_table(entry: str, broken: Callable[[Entry], Entry]) -> Mutant:
    return in_runtime(*words_of(broken), kernels=lambda table: table.replace(**{entry: broken(getattr(table, entry))}))


FORGETS_BLOCKS = _in_table("compress_plan", forgets_blocks)
KEEPS_THE_LAST_PAGE = _in_table("compress_plan", keeps_the_last_page)
READS_BEFORE_THE_FIRST = _in_table("compress_plan", reads_before_the_first)
CHOOSES_FIRST = _in_table("index_top_k", chooses_first)
LOSES_OLDEST = _in_table("window_rows", loses_oldest)
SEES_OPEN_BLOCKS = _in_table("block_rows", sees_open_blocks)
ROWS_OF_NEIGHBOURS = _in_table("norm_rope_store", rows_of_neighbours)
PLANS_ONCE = in_runtime(*words_of(plans_once), attention=lambda backend: become(backend, plans_once))
FORGETS_TO_LOAD = _in_table("copy_rows", forgets_to_load)
KEEPS_WHAT_OTHERS_LEFT = in_runtime(
    *words_of(keeps_what_others_left), hisparse=lambda coordinator: become(coordinator, keeps_what_others_left)
)
