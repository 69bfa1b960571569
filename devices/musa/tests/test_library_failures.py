"""A FlashAttention of the vendor that is missing or fails is a refused candidate, and the start
goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore_musa import package
from sglcore_musa.attention_flash import FUNCTION, MODULES
from tests.laws.vendor_libraries import *  # noqa: F403
from tests.laws.vendor_libraries import Library, attention_of, break_name, spoken

pytestmark = pytest.mark.needs("simulator")

USERS = ("sglcore_musa.attention_flash",)


def test_the_library_is_used_where_it_works(model: Path) -> None:
    tokens, told = spoken(model, package.name)
    assert len(tokens) == 4 and attention_of(told) == "flash_attention"


@pytest.mark.parametrize("how", ["missing", "failing"])
def test_a_start_goes_on_without_the_librarys_function(monkeypatch: pytest.MonkeyPatch, how: str, model: Path) -> None:
    for name in MODULES:
        try:
            break_name(monkeypatch, Library(name, USERS), FUNCTION, how)
        except (ImportError, AttributeError):
            continue
    tokens, told = spoken(model, package.name)
    assert len(tokens) == 4
    assert attention_of(told) != "flash_attention" and "flash_attention refused: " in told
