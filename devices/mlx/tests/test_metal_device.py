"""Tests of the Metal kernels on an Apple GPU, against attention in float64 and the gathering
backend."""

from __future__ import annotations

import mlx.core as mx
import pytest

from devices.mlx.tests.metal_cases import Case, assert_right, drawn, made, one_row
from sglcore_mlx.attention.metal import PART, metal_available, paged_decode

pytestmark = pytest.mark.needs("metal")

LONG = Case(
    lengths=(20 * PART + 3, 1, PART), heads=32, kv_heads=8, head_dim=128, dtype=mx.bfloat16, kv_dtype=mx.bfloat16
)


def run(case: Case, arrays: tuple[mx.array, mx.array, mx.array, mx.array]) -> mx.array:
    """Run the case on the GPU."""
    return paged_decode(*arrays, page_size=case.page_size, scale=case.scale, window=case.window)


def test_this_machine_has_metal() -> None:
    assert metal_available()


@pytest.mark.parametrize("seed", range(100))
def test_drawn_cases_agree_with_attention_in_float64(seed: int) -> None:
    case = drawn(seed)
    inputs = made(case)
    assert_right(case, inputs, run(case, inputs.all))


def test_long_rows_agree_and_repeat_bit_for_bit() -> None:
    inputs = made(LONG)
    first = run(LONG, inputs.all)
    assert_right(LONG, inputs, first)
    for _ in range(20):
        assert mx.array_equal(run(LONG, inputs.all), first)


def test_a_row_gives_the_same_bits_whatever_stands_beside_it() -> None:
    inputs = made(LONG)
    together = run(LONG, inputs.all)
    for row, length in enumerate(LONG.lengths):
        alone = run(LONG, one_row(inputs, row, -(-length // LONG.page_size)).all)
        assert mx.array_equal(alone[0], together[row]), row


def test_compiled_calls_give_what_plain_calls_give() -> None:
    inputs = made(LONG)

    def call(q: mx.array, kv: mx.array, page_table: mx.array, seq_lens: mx.array) -> mx.array:
        return run(LONG, (q, kv, page_table, seq_lens))

    assert mx.array_equal(mx.compile(call)(*inputs.all), call(*inputs.all))
