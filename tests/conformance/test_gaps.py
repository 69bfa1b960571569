"""Gaps are data with an expiry date: a gap that passes, matches no law, or has expired is an
error."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from sglcore.conformance.gaps import Gap, closed_gap, gap_for, read_gaps, stale_gaps
from sglcore.conformance.kit_run import Outcome, Verdict
from sglcore.conformance.result import verdict
from sglcore.core.errors import ConfigError

TODAY = datetime.date(2030, 6, 1)
GAP = Gap("replay_is_eager[full/moe]", "two nodes are reordered", "https://example.org/1", TODAY)
KNOWN = ("tiny[dense]", "tiny[moe]", "replay_is_eager[full/moe]", "retraction")
TEXT = """
[[gap]]
law = "replay_is_eager[full/moe]"
reason = "two nodes are reordered"
link = "https://example.org/1"
expiry = 2030-06-01
"""


def outcome(name: str, verdict: Verdict) -> Outcome:
    law, _, case = name.rstrip("]").partition("[")
    return Outcome(law, "C2", case, verdict, "why", 0.1, {})


def written(folder: Path, text: str) -> Path:
    (folder / "gaps.toml").write_text(text)
    return folder


def test_gaps_are_read_from_the_packages_folder(tmp_path: Path) -> None:
    assert read_gaps(written(tmp_path, TEXT)) == (GAP,)
    assert read_gaps(written(tmp_path, "# none\n")) == ()
    assert read_gaps(None) == () and read_gaps(tmp_path / "nowhere") == ()


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("reason", "because"),
        TEXT.replace('"https://example.org/1"', '""'),
        TEXT.replace("2030-06-01", '"2030-06-01"'),
        TEXT.replace("2030-06-01", "2030-06-01T00:00:00"),
        TEXT.replace("[[gap]]", "[gap]"),
        TEXT + "\nowner = 'me'\n",
        "[[hole]]\n",
        "gap = 3\n",
        "[[gap\n",
    ],
)
def test_what_is_not_a_gap_is_an_error_that_shows_one(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gaps\.toml .*; wanted"):
        read_gaps(written(tmp_path, text))


def test_a_gap_speaks_of_one_case_or_of_a_whole_law() -> None:
    whole = Gap("tiny", "no float32", "https://example.org/2", TODAY)
    assert gap_for([whole, GAP], "tiny[moe]") is whole
    assert gap_for([GAP], "replay_is_eager[full/moe]") is GAP
    assert gap_for([GAP], "replay_is_eager[full/dense]") is None
    exact = Gap("tiny[moe]", "experts", "https://example.org/3", TODAY)
    assert gap_for([whole, exact], "tiny[moe]") is exact


def test_gaps_that_are_current_and_about_laws_are_fine() -> None:
    assert stale_gaps([GAP], KNOWN, TODAY) == []


def test_an_expired_gap_is_an_error() -> None:
    (wrong,) = stale_gaps([GAP], KNOWN, TODAY + datetime.timedelta(days=1))
    assert "expired on 2030-06-01" in wrong and GAP.link in wrong


def test_a_gap_that_matches_no_law_is_an_error() -> None:
    (wrong,) = stale_gaps([Gap("tiny[window]", "?", "?", TODAY)], KNOWN, TODAY)
    assert "'tiny[window]' matches no law" in wrong


def test_two_gaps_of_one_name_are_an_error() -> None:
    assert stale_gaps([GAP, GAP], KNOWN, TODAY) == ["there are two gaps 'replay_is_eager[full/moe]'"]


def test_a_gap_that_passes_is_told_with_its_reason() -> None:
    assert "holds" in closed_gap(GAP, "replay_is_eager[full/moe]") and GAP.reason in closed_gap(GAP, "x")


def test_the_verdict_tells_known_failures_from_new_ones() -> None:
    known, new = outcome("replay_is_eager[full/moe]", "failed"), outcome("tiny[dense]", "failed")
    fine = outcome("retraction", "passed")
    assert verdict([fine], [], []) == "passed"
    assert verdict([fine, known], [GAP], []) == "gaps"
    assert verdict([fine, known, new], [GAP], []) == "failed"
    assert verdict([fine, known], [GAP], ["the gap 'x' expired"]) == "failed"
