"""Cutting a batch in two: for any lengths, both halves together are the batch, and no half of a
request is empty."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sglcore.runtime.batch_split import clip
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.step.micro_batch_cut import CutTerms, cut

CASES, SEED = 10_000, 11


def random_cases() -> list[tuple[NDArray[np.int32], float, int]]:
    rng = np.random.default_rng(SEED)
    found = []
    for _ in range(CASES):
        count = int(rng.integers(0, 9))
        most = int(rng.choice([2, 4, 40, 3000]))
        lengths = rng.integers(1, most, count).astype(np.int32)
        found.append((lengths, float(rng.choice([0.0, 0.25, 0.4, 0.5])), int(rng.choice([1, 1, 2, 3, 8]))))
    return found


def batch_of(lengths: NDArray[np.int32]) -> ForwardBatch:
    return ForwardBatch(  # pyright: ignore[reportCallIssue]
        batch_size=len(lengths), num_tokens=int(lengths.sum()), extend_seq_lens_cpu=lengths
    )


def tokens_of(lengths: NDArray[np.int32], first: int, last: int) -> list[tuple[int, int, int]]:
    """(request, its first token of the step in this child, number of tokens) for each request in
    the child that `clip` describes."""
    part = clip(batch_of(lengths), first, last)
    found = []
    for row in range(part.rows.start, part.rows.stop):
        skipped = part.skipped if row == part.rows.start else 0
        rest = part.rest if row == part.rows.stop - 1 else 0
        found.append((row, skipped, int(lengths[row]) - skipped - rest))
    return found


def test_the_halves_of_random_batches_have_each_token_once() -> None:
    did_cut = 0
    for lengths, theta, align in random_cases():
        total, where = int(lengths.sum()), cut(lengths, theta, align)
        did_cut += where > 0
        halves = [tokens_of(lengths, 0, where), tokens_of(lengths, where, total)]
        covered = [(row, step) for half in halves for row, start, count in half for step in range(start, start + count)]
        assert covered == [(row, step) for row, count in enumerate(lengths) for step in range(count)]
        for half, tokens in zip(halves, (where, total - where), strict=True):
            assert all(count >= 1 for _, _, count in half)
            assert len(half) <= tokens == sum(count for _, _, count in half)
    assert did_cut > CASES // 2


def test_a_cut_keeps_what_it_promises() -> None:
    for lengths, theta, align in random_cases():
        total, where = int(lengths.sum()), cut(lengths, theta, align)
        boundaries = {0, *np.cumsum(lengths).tolist()}
        assert 0 <= where <= max(total - 1, 0) and where % align == 0
        if theta == 0:
            legal = [each for each in boundaries if each % align == 0 and 0 < each < total]
            assert where in (legal or [0])
            assert all(abs(2 * where - total) <= abs(2 * each - total) for each in legal)
        elif where not in boundaries and align == 1:
            assert where == total // 2
            assert all(min(each, total - each) < theta * total for each in boundaries)
        elif where and align == 1:
            assert where == total // 2 or min(where, total - where) >= theta * total


@pytest.mark.parametrize(("lengths", "theta", "align", "wanted"), [
    ([], 0.4, 1, 0),
    ([1], 0.4, 1, 0),
    ([2], 0.4, 1, 1),
    ([2], 0.0, 1, 0),
    ([1, 1], 0.0, 1, 1),
    ([100, 1], 0.4, 1, 50),
    ([100, 1], 0.0, 1, 100),
    ([5, 5], 0.4, 1, 5),
    ([6, 5], 0.4, 4, 8),
    ([3], 0.4, 8, 0),
    ([3, 3, 3, 3], 0.0, 2, 6),
    ([3, 3], 0.0, 2, 0),
])  # fmt: skip
def test_cuts(lengths: list[int], theta: float, align: int, wanted: int) -> None:
    assert cut(np.array(lengths, np.int32), theta, align) == wanted


@pytest.mark.parametrize(("theta", "align"), [(0.6, 1), (-0.1, 1), (0.4, 0)])
def test_terms_that_make_no_sense_are_refused(theta: float, align: int) -> None:
    with pytest.raises(ValueError, match="wanted theta in"):
        cut(np.array([4, 4], np.int32), theta, align)


def test_a_decode_is_cut_between_requests_however_many_rows_they_have() -> None:
    terms = CutTerms(least_decode=6)
    assert [terms.of_decode(count, 3) for count in range(6)] == [0, 0, 3, 3, 6, 6]
    assert [terms.of_decode(count) for count in (5, 6, 7)] == [0, 3, 3]


def test_prompts_alone_are_cut_in_multiples() -> None:
    terms = CutTerms(align=4)
    assert terms.of_prompts(np.array([11, 3], np.int32)) == 8 and terms.of_decode(6) == 3


def test_small_steps_run_whole() -> None:
    terms = CutTerms(least=10)
    assert terms.of_prompts(np.array([9], np.int32)) == 0
    assert terms.of_prompts(np.array([10], np.int32)) == 5
    assert CutTerms(least=0, least_decode=0).of_prompts(np.array([1], np.int32)) == 0
    assert CutTerms(least=0, least_decode=0).of_decode(1) == 0
