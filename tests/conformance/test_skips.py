"""Skipped laws are rows of `gaps.toml`, all or none: a skipped case without a row is an error, and
so is a row of a case that runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore.conformance.gaps import (
    Missing,
    Skip,
    read_gaps,
    read_missing,
    read_skips,
    skip_for,
    stale_skips,
    wrong_skip,
)
from sglcore.core.errors import ConfigError

ROW = Skip("rows_by_pages[latent]", "not yet", "no latent attention", "another device")
WHOLE = Skip("kernel_is_reference", "impossible", "no kernel table", "none is needed")
TEXT = """
[[skip]]
law = "rows_by_pages[latent]"
answer = "not yet"
reason = "no latent attention"
remedy = "another device"
"""


def written(folder: Path, text: str) -> Path:
    (folder / "gaps.toml").write_text(text)
    return folder


def test_skips_are_read_beside_gaps(tmp_path: Path) -> None:
    folder = written(tmp_path, TEXT)
    assert read_skips(folder) == (ROW,) and read_gaps(folder) == ()
    assert read_skips(None) == () and read_skips(tmp_path / "nowhere") == ()


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("remedy", "instead"),
        TEXT.replace('"another device"', '""'),
        TEXT.replace("not yet", "never"),
    ],
)
def test_what_is_not_a_skip_is_an_error_that_shows_one(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gaps\.toml .*; wanted .* impossible, not yet"):
        read_skips(written(tmp_path, text))


MISSING = """
[[missing]]
feature = "draft trees"
answer = "not yet"
reason = "one draft token per position"
remedy = "chains"
"""


def test_what_no_law_checks_is_a_row_too(tmp_path: Path) -> None:
    folder = written(tmp_path, TEXT + MISSING)
    assert read_missing(folder) == (Missing("draft trees", "not yet", "one draft token per position", "chains"),)
    assert read_skips(folder) == (ROW,) and read_gaps(folder) == () and read_missing(None) == ()


@pytest.mark.parametrize("text", [MISSING * 2, MISSING.replace("not yet", "later"), MISSING.replace("remedy", "then")])
def test_what_is_no_such_row_is_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gaps\.toml .*; wanted feature, reason and remedy"):
        read_missing(written(tmp_path, text))


def test_a_row_speaks_of_one_case_or_of_a_whole_law() -> None:
    assert skip_for([WHOLE], "kernel_is_reference[moe]") is WHOLE
    assert skip_for([ROW], "rows_by_pages[latent]") is ROW and skip_for([ROW], "rows_by_pages[compressed]") is None
    assert ROW.text == "not yet: no latent attention; another device"


def test_a_skipped_case_without_a_row_is_an_error() -> None:
    rows = (ROW, WHOLE)
    assert not wrong_skip(rows, "rows_by_pages[latent]", was_skipped=True, text="why")
    wrong = wrong_skip(rows, "rows_by_pages[compressed]", was_skipped=True, text="why")
    assert wrong == "rows_by_pages[compressed] is skipped (why), and gaps.toml has no [[skip]] row for it"


def test_a_row_of_a_case_that_runs_is_an_error() -> None:
    wrong = wrong_skip((WHOLE,), "kernel_is_reference[moe]", was_skipped=False, text="")
    assert wrong.endswith("says that it is skipped (no kernel table); remove the row")
    assert not wrong_skip((WHOLE,), "retraction", was_skipped=False, text="")


def test_a_package_without_rows_says_nothing_about_skipped_laws() -> None:
    assert not wrong_skip((), "retraction", was_skipped=True, text="why")


def test_rows_that_match_no_law_or_are_there_twice_are_errors() -> None:
    assert not stale_skips((ROW, WHOLE), ("rows_by_pages[latent]", "kernel_is_reference[moe]"))
    wrong = stale_skips((ROW, ROW, WHOLE), ("rows_by_pages[latent]",))
    assert wrong[0] == "there are two skips 'rows_by_pages[latent]'"
    assert wrong[1:] == ["the skip 'kernel_is_reference' matches no law of this device"]
