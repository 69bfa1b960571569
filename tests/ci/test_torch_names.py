"""The oldest supported torch and the newest have every torch name that the runtime and the packages
use."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.torch_names import stored_versions, unknown_names

VERSIONS = stored_versions()
OLDEST, NEWEST = VERSIONS.values()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_torch_name_in_use_is_in_the_oldest_torch_and_in_the_newest(version: str) -> None:
    assert list(VERSIONS) == ["2.11.0", "2.15.0"]
    assert unknown_names(VERSIONS[version]) == []


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
    assert is_in(OLDEST, line, tmp_path) == is_known


@pytest.mark.parametrize(
    ("line", "is_known"),
    [("torch.accelerator.Graph()", True), ("torch.align_tensors(x)", False)],
)
def test_a_name_that_is_gone_would_be_seen(tmp_path: Path, line: str, is_known: bool) -> None:
    assert is_in(NEWEST, line, tmp_path) == is_known


def is_in(names: dict[str, list[str]], line: str, root: Path) -> bool:
    """Whether a torch with these names has everything that a line uses."""
    (root / "sglcore").mkdir()
    (root / "sglcore" / "planted.py").write_text(f"import torch\n{line}\n")
    return unknown_names(names, root) == []
