"""The attention laws on this package's device, and the size of the library's partial results."""

from __future__ import annotations

from sglcore.runtime.attention.contract import Bucket
from sglcore_hip import package  # noqa: F401
from sglcore_hip.graphs import make_capture  # noqa: F401
from tests.attention.on_packages import *  # noqa: F403
from tests.attention.on_packages import Placing


def test_decode_reads_no_more_tokens_than_its_partial_results_have_room_for(placing: Placing) -> None:
    placed = placing.place([(47, 1)], "aiter", decode=True)
    plan = placed.backend.plan(placed.batch)
    assert plan.rows.longest == 48  # pyright: ignore[reportAttributeAccessIssue]
    captured = placed.backend.capture_plan(Bucket(2, 2))
    pool = placed.backend.req_to_token_pool
    assert captured.rows.longest == pool.max_pages * pool.page_size  # pyright: ignore[reportAttributeAccessIssue]
