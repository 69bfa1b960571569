"""Every supported type of transformers, compared as in the sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore.models.transformers_backend.verified_types import PROVEN
from tests.models.transformers_cases import compare, compare_served, sizes_of, tiny_model


@pytest.mark.parametrize("kind", sorted(PROVEN))
def test_every_type_that_is_served_gives_what_its_own_forward_gives(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind, sizes_of(kind))
    assert max(compare(model, tmp_path), compare_served(model, tmp_path)) <= 2e-4
