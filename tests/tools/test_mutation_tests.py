"""The selection of tests to run against a mutant."""

from __future__ import annotations

from tools.mutation_tests import Record

SECONDS = {"tests/a/x.py::f[0]": 1.0, "tests/a/x.py::f[1]": 0.5, "tests/a/x.py::g": 2.0, "tests/a/y.py::h": 9.0}
RECORD = Record(SECONDS, {"sglcore/a/m.py": {"3": [*SECONDS][:3], "7": ["tests/a/y.py::h"]}}, [], [])


def test_the_fastest_case_of_each_function_comes_before_any_second_one_as_far_as_the_time_goes() -> None:
    f0, f1, g, _ = SECONDS
    assert RECORD.tests_of("sglcore/a/m.py", [3], 10) == [f1, g, f0]
    assert RECORD.tests_of("sglcore/a/m.py", [3], 20) == [f1, g, f0, "tests/a/y.py::h"], "it runs another line"
    assert RECORD.tests_of("sglcore/a/m.py", [3, 7], 3) == [f1, g]
    assert RECORD.tests_of("sglcore/a/m.py", [7], 0) == ["tests/a/y.py::h"], "one is run however long it takes"


def test_what_runs_when_it_is_imported_meets_the_tests_of_its_file_and_folder() -> None:
    assert set(RECORD.tests_of("sglcore/a/m.py", [1], 100)) == set(SECONDS)
    assert set(RECORD.tests_of("sglcore/a/other.py", [1], 100)) == set(SECONDS)
    assert RECORD.tests_of("sglcore/b/other.py", [1], 100) == []


def test_the_tests_of_the_folder_come_before_faster_ones_of_others() -> None:
    record = Record(
        {"tests/b/x.py::f": 0.1, "tests/a/x.py::g": 1.0},
        {"sglcore/a/m.py": {"3": ["tests/b/x.py::f", "tests/a/x.py::g"]}},
        [],
        [],
    )
    assert record.tests_of("sglcore/a/m.py", [3], 9) == ["tests/a/x.py::g", "tests/b/x.py::f"]
