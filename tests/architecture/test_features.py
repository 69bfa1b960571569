"""Optional features are leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture import rules
from tests.architecture.features import COMPOSERS, FEATURES, features_in_the_trunk, idle_composers

ROOT = Path(__file__).resolve().parents[2]
TYPES = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    "
CASES = {
    "whole": ("runtime/x.py", "from sglcore.runtime.overlap.slices import Slices", True),
    "of its package": ("runtime/x.py", "from sglcore.runtime.overlap import slices", True),
    "by name": ("runtime/x.py", "import sglcore.runtime.pooling", True),
    "for types": ("schedule/x.py", f"{TYPES}from sglcore.schedule.data_parallel.dp_loop import ShardLoop", True),
    "later": ("layers/x.py", "def f():\n    from sglcore.layers.parallel import x", True),
    "another feature": ("runtime/hisparse/x.py", "from sglcore.runtime.speculative.tree import TreeShape", False),
    "a composer": ("runtime/bring_up.py", "from sglcore.runtime.overlap.slices import Slices", False),
    "a program": ("serving/replicas/x.py", "from sglcore.engine.ranks.hosts import x", False),
    "the trunk": ("runtime/x.py", "from sglcore.runtime.pools import x", False),
    "a longer name": ("runtime/x.py", "from sglcore.runtime.pooling_rows import x", False),
}


def test_nothing_that_every_request_passes_imports_an_optional_feature() -> None:
    findings, idle = features_in_the_trunk(ROOT), idle_composers(ROOT)
    rules.parsed.cache_clear()
    assert not findings, "\n".join(findings)
    assert not idle, f"these compose nothing: {idle}"


@pytest.mark.parametrize("case", CASES)
def test_an_import_of_a_feature_is_found(tmp_path: Path, case: str) -> None:
    name, text, is_found = CASES[case]
    file = tmp_path / "sglcore" / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    found = features_in_the_trunk(tmp_path)
    assert bool(found) == is_found
    assert not found or found[0].startswith(f"sglcore/{name}:{text.count(chr(10)) + 1}: imports sglcore.")


def test_each_feature_and_each_composer_exists() -> None:
    assert not [name for name in (*FEATURES, *COMPOSERS) if not (ROOT / "sglcore" / name).exists()]
