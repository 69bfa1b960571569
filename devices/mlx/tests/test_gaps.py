"""Tests the package's `gaps.toml` without running a law: it has a row for each law that lacks a
capability. `test_conformance.py` runs the laws, and the kit compares all skipped cases with the
rows."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from sglcore_mlx import package
from sglcore_mlx.speculative.choice import GAPS

pytestmark = pytest.mark.needs("torch")

if find_spec("torch") is not None:
    from sglcore.conformance.catalogue import LAWS
    from sglcore.conformance.gaps import ANSWERS, read_gaps, read_missing, read_skips, skip_for, stale_skips, wrong_skip
    from sglcore.conformance.law import run_name
    from sglcore.conformance.target import find_target


FOLDER = Path(__file__).parents[1] / "sglcore_mlx"


def test_every_law_that_lacks_a_capability_has_a_row_and_every_row_a_law() -> None:
    target, skips = find_target("mlx"), read_skips(FOLDER)
    known = [run_name(law, case) for law in LAWS for case in law.cases(target)]
    lacking = [run_name(law, case) for law in LAWS for case in law.cases(target) if law.missing(target.capabilities())]
    assert len(lacking) > 60
    assert not [name for name in lacking if skip_for(skips, name) is None]
    assert not stale_skips(skips, known) and not read_gaps(FOLDER)
    assert {row.answer for row in skips} == set(ANSWERS)


def test_what_speculation_refuses_by_name_is_a_row_too() -> None:
    rows = {row.feature for row in read_missing(FOLDER)}
    assert {name for name in rows if name.startswith("speculative")} == {f"speculative {kind}" for kind in GAPS}
    assert {name for name in rows if name.startswith("draft trees")} == {"draft trees on windows, states and indexers"}
    assert package.communication is not None and {"ranks on several hosts", "dp and ep"} <= rows


def test_without_one_of_its_rows_a_skipped_law_is_an_error() -> None:
    skips = read_skips(FOLDER)
    for number, row in enumerate(skips):
        assert not wrong_skip(skips, row.law, was_skipped=True, text="no torch_runtime")
        others = (*skips[:number], *skips[number + 1 :])
        assert "has no [[skip]] row" in wrong_skip(others, row.law, was_skipped=True, text="no torch_runtime")
        assert "remove the row" in wrong_skip(skips, row.law, was_skipped=False, text="")
