"""Tests that running the kernels' source detects planted defects, which shows what
`test_metal_kernel.py` can detect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from devices.mlx.tests.metal_cases import Case, assert_right, made
from devices.mlx.tests.metal_on_host import RUNS_HERE, Host
from sglcore_mlx.attention.metal import PART, paged_decode

pytestmark = RUNS_HERE

SHORT = Case(lengths=(1, 37, 70), heads=6, kv_heads=2, head_dim=64, page_size=8)
WINDOW = replace(SHORT, window=33)
LONG = Case(lengths=(PART + 9, 5, PART + 40), heads=2, kv_heads=1)
STRONG = replace(SHORT, strength=60.0)
EXTRAS = replace(LONG, softcap=0.7, has_sinks=True)
BRANCHES = replace(LONG, has_visible=True)
NEAREST = "metal::clamp(block + t, begin, end - 1) - block"
FLAG = "mem_flags::mem_threadgroup"
BARRIER = f"metal::threadgroup_barrier(metal::{FLAG});\n"


@dataclass(frozen=True, slots=True)
class Defect:
    """Replaces the `place`-th occurrence (from 0) of `old` with `new` in every kernel that has
    it."""

    old: str
    new: str
    case: Case = SHORT
    sanitizer: str = ""
    place: int = 0

    def edit(self, text: str) -> str:
        """Return the text with the defect, or unchanged if there is no such occurrence."""
        parts = text.split(self.old)
        if len(parts) <= self.place + 1:
            return text
        return self.old.join(parts[: self.place + 1]) + self.new + self.old.join(parts[self.place + 1 :])


DEFECTS = (
    ("no barrier before the simdgroups' sums are read", Defect(BARRIER, "")),
    ("no barrier before the shares are read", Defect(BARRIER, "", place=1)),
    ("no barrier before the shares are written again", Defect(BARRIER, "", place=2)),
    ("no barrier, seen by the sanitizer", Defect(BARRIER, "", SHORT, "thread")),
    ("no barrier before shares are read, seen by the sanitizer", Defect(BARRIER, "", SHORT, "thread", 1)),
    ("no barrier before shares are written, seen by the sanitizer", Defect(BARRIER, "", SHORT, "thread", 2)),
    ("a barrier that does not order memory", Defect(FLAG, "mem_flags::mem_none", SHORT, "thread")),
    ("a barrier that some threads miss", Defect("if (begin >= end)", "if (begin + lane >= end)")),
    ("a sum that some lanes miss", Defect("if (begin >= end)", "if (begin + lane >= end)", Case(lengths=(20,)))),
    ("one position too few", Defect("seq_lens[row]", "seq_lens[row] - 1")),
    ("one position too many", Defect("seq_lens[row]", "seq_lens[row] + 1")),
    ("one position before the window", Defect("length - WINDOW :", "length - WINDOW - 1 :", WINDOW)),
    ("one position of the window lost", Defect("length - WINDOW :", "length - WINDOW + 1 :", WINDOW)),
    ("the window is forgotten", Defect("WINDOW > 0 && length > WINDOW", "false", WINDOW)),
    (
        "heads dealt out to KV heads in turn",
        Defect("first_head / (HEADS / KV_HEADS)", "first_head % KV_HEADS", replace(SHORT, heads=8)),
    ),
    ("keys in the place of values", Defect("+ KV_HEADS * HEAD_DIM + i]", "+ i]")),
    ("values of positions that do not count", Defect(NEAREST, "t", place=1)),
    ("keys of positions that do not count", Defect(NEAREST, "t")),
    ("scores of positions that do not count", Defect("counts ? dot : LOWEST", "dot")),
    ("another row's page table", Defect("row * page_table_shape[1]", "row * page_table_shape[0]")),
    ("the first page for all", Defect("+ block / PAGE_SIZE", "")),
    ("cells of a page in the wrong order", Defect("block % PAGE_SIZE", "0")),
    (
        "the largest score is not taken off",
        Defect("highest = metal::max(highest, scores[t][j]);", "highest = 0.0f;", STRONG),
    ),
    ("the sum is not rescaled", Defect("sum[j] *= fade;", "")),
    ("the values are not rescaled", Defect("values[j][i] *= fade;", "")),
    ("simdgroups added without their weights", Defect("values[j][i] * fade;", "values[j][i];")),
    ("blocks of one simdgroup only", Defect("block += SIMDGROUPS * BLOCK", "block += 2 * SIMDGROUPS * BLOCK")),
    ("one element past the head", Defect("d < HEAD_DIM; d", "d <= HEAD_DIM; d")),
    ("the scale is forgotten", Defect("float(queries[at]) * scale", "float(queries[at])")),
    ("parts that overlap", Defect("begin + PART)", "begin + PART + 1)", LONG)),
    ("parts that the row does not have", Defect("(length - oldest + PART - 1) / PART", "part_tops_shape[2]", LONG)),
    ("the last part left out", Defect("(length - oldest + PART - 1) / PART", "(length - oldest) / PART", LONG)),
    ("parts added without their weights", Defect("weight * part_values", "part_values", LONG)),
    ("parts' sums added without their weights", Defect("weight * part_sums", "part_sums", LONG)),
    ("the softcap is forgotten", Defect("if (HAS_SOFTCAP)", "if (false)", EXTRAS)),
    ("the words are forgotten", Defect("if (HAS_VISIBLE)", "if (false)", BRANCHES)),
    ("words of the first row for all", Defect("visible[row]", "visible[0]", BRANCHES)),
    ("words that begin one position before", Defect("length - 1 - block - t", "length - block - t", BRANCHES)),
    ("nothing before a word is seen", Defect("before > 31 ||", "before <= 31 &&", BRANCHES)),
    ("sinks in every part", Defect(" && part == 0", "", EXTRAS)),
    ("sinks of the first heads for all", Defect("sinks[first_head + j]", "sinks[j]", replace(SHORT, has_sinks=True))),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache folder of binaries for this file's tests."""
    return tmp_path_factory.mktemp("metal_defects")


def run(defect: Defect, host: Host) -> None:
    """Run the defect's case on a host and check the result."""
    case, inputs = defect.case, made(defect.case)
    got = paged_decode(
        *inputs.all,
        page_size=case.page_size,
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
        sinks=inputs.sinks,
        visible=inputs.visible,
        launcher=host.launch,
    )
    assert_right(case, inputs, got)


@pytest.mark.parametrize("defect", [pytest.param(defect, id=name) for name, defect in DEFECTS])
def test_a_planted_defect_is_caught(defect: Defect, folder: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        run(defect, Host(folder, sanitizer=defect.sanitizer, edit=defect.edit))
    assert "does not compile" not in str(caught.value)
    assert not defect.sanitizer or "ThreadSanitizer: data race" in str(caught.value)


@pytest.mark.parametrize(
    "case",
    [SHORT, WINDOW, LONG, STRONG, EXTRAS, BRANCHES],
    ids=["short", "window", "long", "strong", "extras", "branches"],
)
def test_without_a_defect_their_cases_pass(case: Case, folder: Path) -> None:
    run(Defect("", "", case), Host(folder))
