"""The oldest torch that must do has every torch name that the runtime and the packages use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ci.torch_names import STORED, unknown_names

NAMES = json.loads(STORED.read_text())


def test_every_torch_name_in_use_is_in_the_oldest_torch() -> None:
    assert NAMES["version"] == ["2.11.0"]
    assert unknown_names(NAMES) == []


@pytest.mark.parametrize(
    ("line", "is_known"),
    [
        ("torch.accelerator.current_stream()", True),
        ("torch.accelerator.Graph()", False),
        ("torch.no_such_function()", False),
        ("torch.ops.own.operator()", True),
        ("from torch.nn.functional import gelu", True),
        ("from torch.nn.functional import no_such", False),
        ("import torch.no_such_module", False),
        ("x.record_stream(s)", True),
    ],
)
def test_a_newer_name_would_be_seen(tmp_path: Path, line: str, is_known: bool) -> None:
    (tmp_path / "sglcore").mkdir()
    (tmp_path / "sglcore" / "planted.py").write_text(f"import torch\n{line}\n")
    assert (unknown_names(NAMES, tmp_path) == []) == is_known
