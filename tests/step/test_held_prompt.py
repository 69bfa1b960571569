"""Which prompt keeps its KV entries on the device between its chunks with hisparse, and how many of
its tokens are there."""

from __future__ import annotations

import numpy as np
import pytest

from sglcore.step.held_prompt import Held, HeldPrompt
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch


def batch(*rows: tuple[int, int, int, bool, bool], mode: ForwardMode = ForwardMode.EXTEND) -> ScheduleBatch:
    """Make a batch of (slot, tokens before, tokens after, is the last chunk, is a new request)."""
    slots, before, after, emits, new = (np.array(each) for each in zip(*rows, strict=True))
    before, after, slots = before.astype(np.int32), after.astype(np.int32), slots.astype(np.int32)
    offsets = np.append(0, np.cumsum(after - before)).astype(np.int32)
    none = np.zeros(0, np.int32)
    given = offsets, np.zeros(offsets[-1], np.int32), (~new).astype(np.int32), 0 * offsets, none, emits
    return ScheduleBatch(0, mode, slots, after, before, *given)


def told(prompt: HeldPrompt, *rows: tuple[int, int, int, bool, bool], mode: ForwardMode = ForwardMode.EXTEND) -> object:
    assert not prompt.changes(batch(*rows, mode=mode))
    return prompt.now


def test_a_prompt_is_held_from_its_first_chunk_to_its_last() -> None:
    prompt = HeldPrompt(100)
    assert told(prompt, (3, 0, 24, False, True)) == Held(0, 0)
    assert told(prompt, (3, 24, 25, True, False), mode=ForwardMode.DECODE) is None
    assert told(prompt, (1, 7, 9, True, False), (3, 24, 48, False, False)) == Held(1, 24)
    assert told(prompt, (3, 48, 60, True, False), (2, 0, 12, False, True)) == Held(0, 48)
    assert told(prompt, (3, 60, 61, True, False), (2, 12, 30, True, False)) is None


def test_a_prompt_with_a_cached_beginning_brings_it_once() -> None:
    prompt = HeldPrompt(100)
    assert told(prompt, (3, 32, 56, False, True)) == Held(0, 0)
    assert told(prompt, (3, 56, 80, False, False)) == Held(0, 56)


def test_a_new_request_in_the_same_slot_begins_again_even_where_the_other_ended() -> None:
    prompt = HeldPrompt(100)
    told(prompt, (3, 0, 32, False, True))
    assert told(prompt, (3, 32, 56, False, True)) == Held(0, 0)


def test_a_chunk_that_does_not_follow_brings_the_older_rows_again() -> None:
    """As after a step that failed."""
    prompt = HeldPrompt(100)
    told(prompt, (3, 0, 24, False, True))
    assert told(prompt, (3, 16, 40, False, False)) == Held(0, 0)


def test_a_prompt_that_waits_gives_its_place_away() -> None:
    prompt = HeldPrompt(100)
    told(prompt, (3, 0, 24, False, True))
    assert told(prompt, (2, 0, 24, False, True)) == Held(0, 0)
    assert told(prompt, (3, 24, 48, False, False)) == Held(0, 0)
    assert told(prompt, (3, 48, 56, False, False), (2, 24, 40, False, False)) == Held(0, 48)


@pytest.mark.parametrize("most", [0, 40])
def test_a_prompt_is_held_as_long_as_it_fits(most: int) -> None:
    prompt = HeldPrompt(most)
    assert told(prompt, (3, 0, 24, False, True)) == (Held(0, 0) if most else None)
    assert told(prompt, (3, 24, 48, False, False)) is None
    assert told(prompt, (1, 0, 8, False, True), (3, 48, 60, True, False)) == (Held(0, 0) if most else None)
