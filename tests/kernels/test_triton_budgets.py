"""Every Triton kernel compiles for every chip with exactly the stored costs in registers, bytes and
spills.

Compiling for all chips takes minutes, so it is a group (docs/testing.md): while the kernels are
those of the last complete pass, each turn compiles another part of the kernels for one chip and
checks the figures.
"""

from __future__ import annotations

import ast
import copy
import json
import random
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

import pytest

pytest.importorskip("triton", reason="needs the library triton")

from ci.groups import group_named, groups
from ci.selection import Selection
from tools.installer.commands import TESTS, pinned
from tools.kernel_budgets import BUDGETS, LIMITS, RECORD, ROOT, Figures, absent, differences, measure

STORED: Figures = json.loads(BUDGETS.read_text(encoding="utf-8"))
SOURCES = ("sglcore/runtime/kernels/triton/**/*.py", "sglcore/runtime/attention/triton_*.py")

GROUP = "kernel-budgets"
CASES = sorted({label.partition(": ")[0] for label in STORED})
PART = 5
"""A sample has one of PART cases."""
FORMS = ("in 16", "with bounded registers")
REGISTERS = MappingProxyType({"cuda": 96, "hip": 128})
"""Registers per thread under the options of `OPTIONS`."""
MEASURED_WITH = dict(line.split("==") for line in pinned(ROOT / TESTS))["triton"]
"""The Triton version of the stored figures: another compiler uses other registers."""

measured_triton = pytest.mark.skipif(
    version("triton") != MEASURED_WITH,
    reason=f"needs triton {MEASURED_WITH}, whose figures are stored; {version('triton')} is installed",
)


@measured_triton
def test_every_kernel_compiles_for_every_chip_within_its_budget(selection: Selection) -> None:
    if GROUP in selection.whole:
        lines = differences(STORED, measure())
    else:
        draw = random.Random(selection.turn)
        target, cases = draw.choice(tuple(LIMITS)), tuple(draw.sample(CASES, len(CASES) // PART))
        lines = absent(STORED, measure((target,), cases), target, cases)
    assert not lines, "\n".join(lines)


def test_a_figure_of_a_sample_that_no_compiled_kernel_has_is_named() -> None:
    figures = ({"registers": 8}, {"registers": 9})
    stored: Figures = {f"{case}: a_kernel": {"x": each} for case, each in zip(("one", "two"), figures, strict=True)}
    found: Figures = {"two: a_kernel": {"x": figures[1]}, "two: b_kernel": {"x": figures[0]}}
    assert absent(stored, found, "x", ("two",)) == []
    (line,) = absent(stored, found, "x", ("one", "two"))
    assert line == "one: a_kernel on x is {'registers': 8} in the record, and none of [{'registers': 9}]"


def test_the_group_covers_every_source_of_a_kernel() -> None:
    files = set(group_named(GROUP, groups()).files())
    assert {path for pattern in SOURCES for path in ROOT.glob(pattern)} <= files


def launched_kernels() -> set[str]:
    """Return the names of functions in our sources that are launched as `name[grid](...)`."""
    calls = (
        node.func.value.id
        for pattern in SOURCES
        for path in ROOT.glob(pattern)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
    )
    return {name for name in calls if name.endswith("_kernel")}


def test_no_kernel_is_left_out() -> None:
    measured = {label.partition(": ")[2].split(" ")[0] for label in STORED}
    assert launched_kernels() == measured
    assert len(measured) > 10


def test_each_kernel_has_figures_for_each_chip() -> None:
    for label, targets in STORED.items():
        assert targets.keys() == LIMITS.keys(), label
        for target, figures in targets.items():
            assert figures.keys() >= {"registers", "shared", "stack"}, (label, target)
            assert figures["registers"] > 0 and figures["shared"] <= LIMITS[target][3]


@pytest.mark.parametrize("target", LIMITS)
def test_a_launch_option_of_the_vendor_reaches_its_compiler(target: str) -> None:
    plain, bounded = (STORED[f"decode bfloat16 heads of 128 {how}: decode_kernel"] for how in FORMS)
    bound = REGISTERS[LIMITS[target][0]]
    assert bounded[target]["registers"] == bound != plain[target]["registers"]


@pytest.mark.parametrize("target", LIMITS)
@pytest.mark.parametrize("figure", ["registers", "shared", "stack"])
def test_a_rise_is_a_regression_and_a_fall_asks_to_be_recorded(target: str, figure: str) -> None:
    label = sorted(STORED)[0]
    now = STORED[label][target][figure]
    doctored = copy.deepcopy(STORED)
    doctored[label][target][figure] = now - 1
    assert differences(doctored, STORED) == [f"regression: {label} on {target}: {figure} rose from {now - 1} to {now}"]
    doctored[label][target][figure] = now + 1
    (line,) = differences(doctored, STORED)
    assert line == f"improvement: {label} on {target}: {figure} fell from {now + 1} to {now}; record it: {RECORD}"


def test_a_kernel_that_came_or_went_is_named() -> None:
    label = sorted(STORED)[0]
    without = {name: figures for name, figures in STORED.items() if name != label}
    assert all(f"{label} on" in line and "is new" in line for line in differences(without, STORED))
    assert all("is no longer compiled" in line for line in differences(STORED, without))
    assert len(differences(without, STORED)) == len(differences(STORED, without)) == len(LIMITS)


def test_a_new_spill_is_a_regression_even_where_none_was_stored() -> None:
    label = sorted(STORED)[0]
    worse = copy.deepcopy(STORED)
    worse[label]["hip:gfx942"]["spills"] = 12
    (line,) = differences(STORED, worse)
    assert line == f"regression: {label} on hip:gfx942: spills rose from 0 to 12"


def test_the_budgets_are_one_line_for_each_kernel() -> None:
    assert len(Path(BUDGETS).read_text(encoding="utf-8").splitlines()) == len(STORED) + 2
