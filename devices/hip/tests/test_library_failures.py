"""An AITER that lacks a name or fails is a refused candidate, and the start goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore_hip import package
from tests.laws.vendor_libraries import *  # noqa: F403
from tests.laws.vendor_libraries import Library, attention_of, break_name, cases, spoken

pytestmark = pytest.mark.needs("simulator")

AITER = Library("aiter", ("sglcore_hip.attention_aiter",))


def test_aiter_is_used_where_it_works(model: Path) -> None:
    tokens, told = spoken(model, package.name)
    assert len(tokens) == 4 and attention_of(told) == "aiter"


@pytest.mark.parametrize(("library", "name", "how"), cases([AITER]))
def test_a_start_goes_on_without_any_name_of_the_library(
    monkeypatch: pytest.MonkeyPatch, library: Library, name: str, how: str, model: Path
) -> None:
    break_name(monkeypatch, library, name, how)
    tokens, told = spoken(model, package.name)
    assert len(tokens) == 4
    assert attention_of(told) != "aiter" and "aiter refused: " in told
