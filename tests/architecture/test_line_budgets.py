"""Limits of size: the device contract, and a device package's own code for standard attention and
for DeepSeek's attention.

The contract is counted in fields and methods, not in lines, so shortening its text does not help.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture import rules

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = ROOT / "tests" / "device" / "contract.txt"
PACKAGE, SPARSE = 550, 200
MOST_FIELDS, MOST_METHODS, MOST_KERNELS = 190, 48, 66
"""Most fields of all records, most methods of all classes that a device brings or calls, and most
kernels of the table."""
MOST_OF_A_RECORD = (("DevicePackage", 16), ("Facts", 15), ("Limits", 37), ("BatchResult", 12), ("ScheduleBatch", 44))
NO_RECORDS = ("The standard bring-up", "Imported by what `sglcore new-device` writes")
STREAM_DEVICES = sorted(
    path.parent.name for path in ROOT.glob("devices/*/sglcore_*/graphs.py") if "cpu" not in path.parent.name
)


def lines(*paths: Path) -> int:
    """Lines of code, without docstrings and comments."""
    return sum(len(rules.code_lines(source_of(path))) for path in paths)


def source_of(path: Path) -> rules.Source:
    text = path.read_text()
    return rules.Source(path.name, tuple(text.splitlines()), rules.parsed(text))


def contract() -> dict[str, list[str]]:
    """Map each part of the contract to the lines of its fields or methods."""
    parts: dict[str, list[str]] = {}
    for block in CONTRACT.read_text(encoding="utf-8").split("\n\n"):
        head, *members = block.splitlines()
        parts[head.split(",")[0]] = members
    return {name: members for name, members in parts.items() if name not in NO_RECORDS}


def is_method(member: str) -> bool:
    """Whether a line of the contract is a method or a property, not a field."""
    return "(self" in member or member.endswith(": property")


def test_a_reader_can_hold_the_fields_and_the_methods_of_the_contract() -> None:
    """Counts everything that `tests/device/test_contract.py` finds, so moving a field elsewhere
    does not reduce the count."""
    parts = contract()
    kernels = parts.pop("KernelTable")
    methods = [member for members in parts.values() for member in members if is_method(member)]
    fields = [member for members in parts.values() for member in members if not is_method(member)]
    assert len(fields) <= MOST_FIELDS and len(methods) <= MOST_METHODS and len(kernels) <= MOST_KERNELS


@pytest.mark.parametrize(("record", "most"), MOST_OF_A_RECORD)
def test_no_record_of_the_contract_grows_past_what_a_reader_can_hold(record: str, most: int) -> None:
    fields = contract()[record]
    assert 0 < len(fields) <= most, fields


@pytest.mark.parametrize("module", STREAM_DEVICES)
def test_a_package_brings_few_lines_of_code(module: str) -> None:
    """The package's code without kernel sources and without the files for DeepSeek's sparse
    attention."""
    (folder,) = ROOT.glob(f"devices/*/{module}")
    sources = [path for path in folder.rglob("*.py") if "kernel_sources" not in path.parts]
    assert lines(*(path for path in sources if not path.name.startswith("sparse"))) < PACKAGE


@pytest.mark.parametrize("module", STREAM_DEVICES)
def test_its_files_for_sparse_attention_have_few_lines_of_code(module: str) -> None:
    assert lines(*ROOT.glob(f"devices/*/{module}/**/sparse*.py")) <= SPARSE
