"""The README's table of what MATE offers, held against its published parameters, which are stored
here with the commits of their files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sglcore_musa import package
from tests.kernels.library_offers import check_parameters, check_served, check_used, offers_of

HERE = Path(__file__).parent
STORED = json.loads((HERE / "mate_offers.json").read_text())["functions"]
OFFERS = offers_of(HERE.parent / "README.md")


def test_rows_have_the_published_parameters_and_name_what_exists() -> None:
    published = {name.rpartition(".")[2]: parameters for name, (_, parameters) in STORED.items()}
    check_parameters(OFFERS, published)
    check_served(OFFERS, package)
    assert OFFERS.keys() == published.keys()
    assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit, _ in STORED.values())


@pytest.mark.needs("simulator")
def test_the_function_that_is_used_is_the_one_that_is_called() -> None:
    from sglcore_musa.attention_flash import ARGUMENTS, FUNCTION

    check_used(OFFERS, {FUNCTION})
    (parameters,) = (each for name, (_, each) in STORED.items() if name.endswith(f".{FUNCTION}"))
    assert set(parameters) >= ARGUMENTS
