"""Statistics of draft tokens: sums, counts per draft position, and counts by a property of the
request."""

from __future__ import annotations

import numpy as np
import pytest

from sglcore.sampling.params import SamplingParams
from sglcore.schedule.draft_counts import CACHED, DraftSums, at_places, cells_of, sums_by, sums_of
from sglcore.schedule.request import Request

COUNTS = {(4, 0, 3, 0): 2, (4, 0, 3, 3): 1, (5, 2, 3, 1): 4, (5, 2, 0, 0): 3}


def test_sums_are_over_steps_of_requests() -> None:
    assert sums_of(COUNTS) == (10, 21, 7)
    assert sums_of(COUNTS).length == pytest.approx(1.7)
    assert sums_of({}) == DraftSums() and sums_of({}).length is None
    assert sums_by(COUNTS, lambda cell: cell.context) == {4: (3, 9, 3), 5: (7, 12, 4)}
    assert list(sums_by(COUNTS, lambda cell: -cell.proposed)) == [-3, 0]


def test_a_place_counts_where_there_was_a_proposal_and_where_all_up_to_it_were_right() -> None:
    assert at_places(COUNTS) == [(7, 5), (7, 1), (7, 1)]
    assert at_places({(1, 0, 0, 0): 5}) == []


@pytest.mark.parametrize(("cached", "share"), [(0, 0), (1, 1), (10, 1), (11, 2), (20, 2), (30, 3), (39, 4)])
def test_a_request_is_counted_by_its_tokens_and_by_what_was_cached_of_its_prompt(cached: int, share: int) -> None:
    request = Request("a", np.zeros(40, np.int32), SamplingParams())
    request.begin_with(cached)
    request.output_ids += range(25)
    assert cells_of([request, request], [4, 1], [3, 1]) == [(7, share, 4, 2), (7, share, 1, 0)]
    assert 2**6 <= request.num_tokens < 2**7
    assert float(CACHED[share]) >= cached / 40
