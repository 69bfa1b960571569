"""A device with a limit on captured graphs gets fewer buckets: the largest decode buckets stay,
prompt buckets go first, and the ledger reports it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglcore.runtime.graphs.graph_limits import Buckets, limit_row, thinned, within

SIZES = tuple(range(8, 8 * 21, 8))
ASKED = Buckets((1, 2, 4, 8), SIZES, 33)


def test_without_a_bound_or_below_it_nothing_changes() -> None:
    assert within(ASKED, None) == ASKED and within(ASKED, ASKED.count) == ASKED
    assert limit_row(ASKED, ASKED, None) is None


def test_prompts_are_thinned_before_decode_and_keep_their_largest() -> None:
    fit = within(ASKED, 4 + 5 * 33)
    assert fit.decode == ASKED.decode
    assert len(fit.prompts) == 5 and fit.prompts[-1] == SIZES[-1]
    row = limit_row(ASKED, fit, 4 + 5 * 33)
    assert row is not None and row.downgrade
    assert (row.requested, row.effective) == ("4 of decode, 20 of prompts", "4 of decode, 5 of prompts")


def test_when_not_even_decode_fits_its_largest_stay() -> None:
    assert within(ASKED, 2) == Buckets((2, 8), (), 33)
    assert within(ASKED, 0) == Buckets((), (), 33)


@pytest.mark.parametrize("most", range(0, 22))
def test_thinning_keeps_that_many_and_is_even(most: int) -> None:
    kept = thinned(SIZES, most)
    assert len(kept) == min(most, len(SIZES)) and list(kept) == sorted(set(kept)) and set(kept) <= set(SIZES)
    if most:
        assert kept[-1] == SIZES[-1]
        gaps = [b - a for a, b in zip((0, *kept), kept, strict=False)]
        assert max(gaps) - min(gaps) <= 8


@given(st.sets(st.integers(1, 64)), st.sets(st.integers(1, 4096)), st.integers(1, 100), st.integers(0, 3000))
def test_the_bound_holds(decode: set[int], prompts: set[int], pieces: int, most: int) -> None:
    asked = Buckets(tuple(sorted(decode)), tuple(sorted(prompts)), pieces)
    assert within(asked, most).count <= most
