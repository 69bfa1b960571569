"""Folders that a reader finds his way in, and names that tell files apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.folders import MOST_FILES, REPEATED, crowded_folders, repeated_names

ROOT = Path(__file__).resolve().parents[2]


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")


def test_no_folder_has_more_modules_than_a_reader_looks_through() -> None:
    assert crowded_folders(ROOT) == []


def test_no_two_modules_of_the_core_have_the_same_name_but_those_that_are_listed() -> None:
    assert repeated_names(ROOT) == []


def test_each_listed_name_is_repeated() -> None:
    names = [path.stem for path in (ROOT / "sglcore").rglob("*.py")]
    assert [name for name in REPEATED if names.count(name) < 2] == []


@pytest.mark.parametrize("folder", ["sglcore/runtime", "devices/one/sglcore_one/kernels", "tests/runtime"])
def test_one_module_too_many_is_found(tmp_path: Path, folder: str) -> None:
    write(tmp_path, *(f"{folder}/x{number}.py" for number in range(MOST_FILES)))
    assert crowded_folders(tmp_path) == []
    write(tmp_path, f"{folder}/one_more.py")
    assert crowded_folders(tmp_path) == [f"{folder}: {MOST_FILES + 1} modules, at most {MOST_FILES}"]


def test_a_repeated_name_is_found_in_the_core_alone(tmp_path: Path) -> None:
    write(tmp_path, "sglcore/a/x.py", "sglcore/a/route.py", "sglcore/b/route.py", "devices/one/sglcore_one/x.py")
    assert repeated_names(tmp_path) == []
    write(tmp_path, "sglcore/b/c/x.py")
    (found,) = repeated_names(tmp_path)
    assert {"sglcore/a/x.py", "sglcore/b/c/x.py"} <= set(found.replace(":", "").replace(",", "").split())
