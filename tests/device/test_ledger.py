"""The ledger keeps every decision, and strict mode refuses a downgrade."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import pytest

from sglcore.core.errors import StrictError
from sglcore.core.ledger import DecisionLedger, Row

PLAIN = Row("device", "automatic", "cpu", "no accelerator is present")
DOWNGRADE = Row("graph", "full", "off", "this device has no graphs", "--graph compiled", downgrade=True)


def test_rows_come_back_in_the_order_they_were_recorded() -> None:
    ledger = DecisionLedger()
    ledger.record(PLAIN)
    ledger.record(DOWNGRADE)
    assert ledger.rows == (PLAIN, DOWNGRADE)


def test_rows_given_out_do_not_change_with_the_ledger() -> None:
    ledger = DecisionLedger()
    before = ledger.rows
    ledger.record(PLAIN)
    assert before == ()
    with pytest.raises(FrozenInstanceError):
        ledger.rows[0].reason = "another"  # type: ignore[misc]


def test_a_strict_ledger_refuses_a_downgrade_and_names_it_whole() -> None:
    ledger = DecisionLedger(strict=True)
    ledger.record(PLAIN)
    with pytest.raises(StrictError) as caught:
        ledger.record(DOWNGRADE)
    text = "graph: found off (this device has no graphs); wanted full; --graph compiled"
    assert str(caught.value) == text
    assert ledger.rows == (PLAIN, DOWNGRADE)


def test_a_ledger_that_is_not_strict_takes_the_same_downgrade() -> None:
    ledger = DecisionLedger()
    ledger.record(DOWNGRADE)
    assert ledger.rows == (DOWNGRADE,)


def test_rows_are_plain_json() -> None:
    ledger = DecisionLedger()
    ledger.record(PLAIN, DOWNGRADE)
    values = json.loads(json.dumps(ledger.as_json()))
    assert [Row(**value) for value in values] == [PLAIN, DOWNGRADE]
