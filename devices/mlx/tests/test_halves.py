"""Tests that two-batch overlap is unavailable with one rank, and that the ledger says so."""

from __future__ import annotations

import pytest

from devices.mlx.tests.running import running
from sglcore.core.ledger import DecisionLedger


@pytest.mark.parametrize(("asked", "is_less"), [("on", True), ("auto", False)])
def test_halves_are_refused_by_a_row(asked: str, is_less: bool) -> None:
    ledger = DecisionLedger()
    with running(ledger=ledger, two_batch_overlap=asked):
        row = next(row for row in ledger.rows if row.topic == "two-batch overlap")
    assert (row.requested, row.effective, row.downgrade) == (asked, "off", is_less)


def test_nothing_is_said_where_nothing_was_asked() -> None:
    ledger = DecisionLedger()
    with running(ledger=ledger):
        assert all(row.topic != "two-batch overlap" for row in ledger.rows)
