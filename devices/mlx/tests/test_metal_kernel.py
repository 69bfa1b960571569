"""Tests of the Metal kernels' source, run on the CPU (`metal_on_host.py`), against attention in
float64."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.metal_cases import Case, Inputs, assert_right, drawn, made, one_row
from devices.mlx.tests.metal_on_host import RUNS_HERE, Host
from sglcore_mlx.attention.metal import PART, paged_decode

pytestmark = RUNS_HERE

MIXED = Case(lengths=(1, 37, 70), heads=6, kv_heads=2, head_dim=64, page_size=8, window=33)
LONG = Case(lengths=(PART + 9, 5, 2 * PART), pages=2 * PART // 16 + 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache folder of binaries for this file's tests."""
    return tmp_path_factory.mktemp("metal")


def run(case: Case, inputs: Inputs, host: Host) -> mx.array:
    """Run the case on the host."""
    return paged_decode(
        *inputs.all,
        page_size=case.page_size,
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
        sinks=inputs.sinks,
        visible=inputs.visible,
        launcher=host.launch,
    )


def check(case: Case, host: Host) -> None:
    """Run the case and compare the result with the expected one."""
    inputs = made(case)
    assert_right(case, inputs, run(case, inputs, host))


@pytest.mark.parametrize("seed", range(14))
def test_drawn_cases_agree_with_attention_in_float64(seed: int, folder: Path) -> None:
    check(drawn(seed), Host(folder, seed=seed))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_every_type_is_rounded_once_at_the_end(dtype: mx.Dtype, folder: Path) -> None:
    check(Case(lengths=(65, 3), heads=8, kv_heads=1, head_dim=128, dtype=dtype, kv_dtype=dtype), Host(folder))


@pytest.mark.parametrize("page_size", [1, 2, 12])
def test_pages_of_any_size_hold_whole_blocks(page_size: int, folder: Path) -> None:
    check(Case(lengths=(31, 1), page_size=page_size, window=10), Host(folder))


@pytest.mark.parametrize("length", [PART - 1, PART, PART + 1, 2 * PART + 3])
@pytest.mark.parametrize("window", [None, 7, PART])
def test_rows_longer_than_a_part_are_added_up_from_their_parts(length: int, window: int | None, folder: Path) -> None:
    case = Case(lengths=(length, 1), heads=2, kv_heads=1, window=window, pages=2 * PART // 16 + 3, seed=length)
    check(case, Host(folder))


def test_large_scores_do_not_overflow(folder: Path) -> None:
    check(Case(lengths=(40, PART + 40), strength=60.0), Host(folder))


def test_a_row_gives_the_same_bits_whatever_stands_beside_it(folder: Path) -> None:
    for case in (LONG, MIXED):
        inputs = made(case)
        together = np.array(run(case, inputs, Host(folder)))
        for row, length in enumerate(case.lengths):
            alone = one_row(inputs, row, -(-length // case.page_size))
            assert np.array_equal(np.array(run(case, alone, Host(folder, seed=row + 1)))[0], together[row]), (case, row)


@pytest.mark.parametrize("length", [3, 37, PART + 5, 2 * PART + 31])
@pytest.mark.parametrize("window", [None, 20])
def test_a_row_sees_only_the_last_positions_that_its_word_names(length: int, window: int | None, folder: Path) -> None:
    check(Case(lengths=(length, 1, length + 9), window=window, has_visible=True, seed=length), Host(folder))


@pytest.mark.parametrize("seed", range(3))
def test_padding_rows_disturb_nothing(seed: int, folder: Path) -> None:
    inputs = made(MIXED)
    width = inputs.page_table.shape[1]
    padded = Inputs(
        mx.concatenate([inputs.q, mx.full((2, 6, 64), mx.nan)]),
        inputs.kv,
        mx.concatenate([inputs.page_table, mx.zeros((2, width), mx.int32)]),
        mx.concatenate([inputs.seq_lens, mx.ones(2, mx.int32)]),
    )
    assert_right(MIXED, inputs, run(MIXED, padded, Host(folder, seed=seed))[:3])


@pytest.mark.parametrize("case", [MIXED, LONG], ids=["one part", "several parts"])
def test_nothing_outside_the_arrays_is_read(case: Case, folder: Path) -> None:
    check(case, Host(folder, sanitizer="address"))


@pytest.mark.parametrize("case", [MIXED, LONG], ids=["one part", "several parts"])
def test_only_barriers_order_what_threads_share(case: Case, folder: Path) -> None:
    check(case, Host(folder, sanitizer="thread"))
