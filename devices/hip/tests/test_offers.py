"""The README's tables of what AITER offers, held against its published parameters, which are stored
here with their versions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sglcore_hip import package
from tests.kernels.library_offers import check_parameters, check_served, check_used, offers_of

HERE = Path(__file__).parent
STORED = json.loads((HERE / "aiter_offers.json").read_text())
CALLED = json.loads((HERE / "aiter_signatures.json").read_text())["functions"]
OFFERS = offers_of(HERE.parent / "README.md")
PUBLISHED: dict[str, list[str]] = {name.rpartition(".")[2]: each for name, each in STORED["in_wheel"].items()}
PUBLISHED |= {name.rpartition(".")[2]: each for name, (_, each) in STORED["in_repository"].items()}
"""Parameters by function, those of the repository in place of the wheel's."""


def test_rows_have_the_published_parameters_and_name_what_exists() -> None:
    check_parameters(OFFERS, PUBLISHED)
    check_served(OFFERS, package)
    assert OFFERS.keys() == PUBLISHED.keys()


def test_the_functions_that_are_used_are_those_that_are_called() -> None:
    check_used(OFFERS, CALLED)
    for name, parameters in CALLED.items():
        assert [each for each, _, _ in parameters if each in PUBLISHED[name]] == [each for each, _, _ in parameters]


def test_a_row_with_another_parameter_or_verdict_is_caught(tmp_path: Path) -> None:
    text = (HERE.parent / "README.md").read_text(encoding="utf-8")
    for old, new in (("`silu_and_mul(out, input)`", "`silu_and_mul(input, out)`"), ("| used: decode |", "| not yet |")):
        assert old in text
        (tmp_path / "README.md").write_text(text.replace(old, new), encoding="utf-8")
        with pytest.raises(AssertionError):
            check_parameters(offers_of(tmp_path / "README.md"), PUBLISHED)
            check_used(offers_of(tmp_path / "README.md"), CALLED)


def test_every_file_of_the_repository_has_its_commit() -> None:
    assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit, _ in STORED["in_repository"].values())
