"""The contract is read in one sitting, and a device's own code stays small, for standard attention and for DeepSeek's."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRACT, PACKAGE, SPARSE = 380, 700, 350
STREAM_DEVICES = sorted(
    path.parent.name for path in ROOT.glob("devices/*/sglcore_*/graphs.py") if "cpu" not in path.parent.name
)


def lines(*paths: Path) -> int:
    """Lines, blank ones and comments included."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_the_whole_contract_is_under_380_lines() -> None:
    """All that `tests/device/test_contract.py` finds, so nothing gets smaller by moving elsewhere."""
    assert lines(ROOT / "tests" / "device" / "contract.txt") < CONTRACT


@pytest.mark.parametrize("module", STREAM_DEVICES)
def test_a_package_brings_less_than_700_lines(module: str) -> None:
    """All of it, but for kernels' sources and what is for DeepSeek's attention."""
    (folder,) = ROOT.glob(f"devices/*/{module}")
    sources = [path for path in folder.rglob("*.py") if "kernel_sources" not in path.parts]
    assert lines(*(path for path in sources if not path.name.startswith("sparse"))) < PACKAGE


@pytest.mark.parametrize("module", STREAM_DEVICES)
def test_its_files_for_sparse_attention_have_at_most_350_lines(module: str) -> None:
    assert lines(*ROOT.glob(f"devices/*/{module}/**/sparse*.py")) <= SPARSE
