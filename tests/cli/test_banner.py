"""The start-up output: device, model and memory, every downgrade, and with `--verbose` all
decisions."""

from __future__ import annotations

import pytest

from sglcore.cli.banner import SHOWN, show_start
from sglcore.core.ledger import Row

ROWS = (
    Row("device", "auto", "acme", "the only one that is present"),
    Row("threads", "auto", "1", "one core"),
    Row("model", "m", "/models/m", "asked for"),
    Row("graph", "full", "off", "the driver is too old", "install driver 3", downgrade=True),
    Row("kv cache", "auto", "64 pages", "18 GiB of memory available"),
)
SECONDS = {"model": 0.5, "total": 1.0}


def said(capsys: pytest.CaptureFixture[str], *, verbose: bool) -> list[str]:
    """Return the lines printed at a start."""
    show_start("acme", "acme 1", "Acme One", ROWS, SECONDS, verbose=verbose)
    return capsys.readouterr().err.splitlines()


def test_a_start_has_a_line_for_each_of_device_model_and_memory_and_counts_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = said(capsys, verbose=False)
    topics = [line.split()[0] for line in lines[2:-2]]
    assert topics == ["device", "model", "graph", "kv"] and set(SHOWN) < {row.topic for row in ROWS}
    assert "the only one that is present" in lines[2] and "prints all 5 decisions" in lines[-2]


def test_what_is_less_than_was_asked_is_always_said_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = [line for line in said(capsys, verbose=False) if "graph" in line]
    assert line == "  graph    off: the driver is too old; otherwise: install driver 3"


def test_every_decision_is_a_row_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(said(capsys, verbose=True))
    assert all(row.topic in text and row.effective in text for row in ROWS) and "--verbose" not in text
