"""Rows of a pool that are named by lists or by pages: their numbers, and their elements, which are
decoded if they are in 8 bits.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from sglcore.runtime.kernels.row_codec import RowCodec
from sglcore.runtime.kernels.triton.rounding import narrow
from sglcore.runtime.kernels.triton.tuning import Tuning


@triton.jit
def paged_rows(table, slot, place, inside, table_stride, PAGE: tl.constexpr):
    """Return the pool rows, int64, of the entries `place` of a slot's request, with PAGE rows per
    page; undefined where not inside.
    """
    page = tl.load(table + slot * table_stride + place // PAGE, mask=inside, other=0).to(tl.int64)
    return page * PAGE + place % PAGE


@triton.jit
def small_floats(byte, BIAS: tl.constexpr):
    """Return (values, factor): bytes of float8 e4m3 with the exponent bias BIAS are float32 values
    * factor.

    Converted through the bits of float16, or, if BIAS is negative, by the device's instruction for
    the bias -BIAS; exact in both cases.
    """
    if BIAS < 0:
        if BIAS == -8:
            values = byte.to(tl.float8e4b8, bitcast=True).to(tl.float32)
        else:
            values = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        factor = 1.0
    else:
        bits = (byte.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4001
        # The exponent bias of float16 is 15.
        values, factor = bits.to(tl.float16, bitcast=True).to(tl.float32), 256.0 if BIAS == 7 else 128.0
    return values, factor


@triton.jit
def decoded(
    line,
    inside,
    dtype: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT,
    GROUP,
    BIAS,
):
    """Return [rows, BLOCK] of dtype, as `load_elements` does, decoded from rows in the format of
    `RowCodec` (GROUP > 0) at the uint8 addresses `line`.
    """
    ROUNDED: tl.constexpr = SIZE - EXACT
    column = FIRST + tl.arange(0, BLOCK)
    is_small = inside[:, None] & (column < ROUNDED)[None, :]
    byte = tl.load(line[:, None] + column[None, :], mask=is_small, other=0)
    values, factor = small_floats(byte, BIAS)
    SPAN: tl.constexpr = min(GROUP, BLOCK)
    group = (FIRST + tl.arange(0, BLOCK // SPAN) * SPAN) // GROUP
    has_scale = inside[:, None] & (group * GROUP < ROUNDED)[None, :]
    exponent = tl.load(line[:, None] + (ROUNDED + 2 * EXACT + group)[None, :], mask=has_scale, other=0).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True) * factor
    apart = tl.reshape(values, [values.shape[0], BLOCK // SPAN, SPAN]) * scale[:, :, None]
    values = tl.reshape(apart, [values.shape[0], BLOCK])
    if EXACT > 0:
        is_exact = inside[:, None] & ((column >= ROUNDED) & (column < SIZE))[None, :]
        first = (line + ROUNDED).to(tl.pointer_type(tl.bfloat16))
        exact = tl.load(first[:, None] + (column - ROUNDED)[None, :], mask=is_exact, other=0.0)
        values = tl.where(is_exact, exact.to(tl.float32), values)
    return narrow(values, dtype)


@triton.jit
def load_elements(
    line,
    inside,
    dtype: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Return [rows, BLOCK] of dtype: the elements from FIRST on of the rows at the addresses
    `line`, which have SIZE elements.

    Zeros past SIZE and where not inside. EXACT, GROUP and BIAS are those of `read_form_of`; with
    GROUP = 0 rows are numbers.
    """
    if GROUP:
        values = decoded(line, inside, dtype, FIRST, SIZE, BLOCK, EXACT, GROUP, BIAS)
    else:
        column = FIRST + tl.arange(0, BLOCK)
        loaded = inside[:, None] & (column < SIZE)[None, :]
        values = tl.load(line[:, None] + column[None, :], mask=loaded, other=0.0)
        if values.dtype != dtype:
            values = narrow(values.to(tl.float32), dtype)
    return values


@triton.jit
def load_heads(
    line, head, head_stride, FIRST: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Return [heads, BLOCK]: the elements from FIRST on of the heads `head` of the token at the
    address `line`.

    A head has SIZE elements and is `head_stride` from the next. Zeros past SIZE, and for heads at
    or past HEADS.
    """
    column = FIRST + tl.arange(0, BLOCK)
    inside = (head < HEADS)[:, None] & (column < SIZE)[None, :]
    return tl.load(line + (head * head_stride)[:, None] + column[None, :], mask=inside, other=0.0)


def form_of(codec: RowCodec | None) -> dict[str, int]:
    """Return the constants EXACT, GROUP and BIAS of kernels that write rows in this format; zeros
    if rows are numbers (None).
    """
    if codec is None:
        return {"EXACT": 0, "GROUP": 0, "BIAS": 0}
    return {"EXACT": codec.exact, "GROUP": codec.group, "BIAS": codec.floats.bias}


def read_form_of(codec: RowCodec | None, tuning: Tuning) -> dict[str, int]:
    """Return the constants EXACT, GROUP and BIAS of `load_elements`.

    As `form_of`, with a negative bias for a format that the device converts by an instruction
    (`Tuning.float8`).
    """
    form = form_of(codec)
    converts = codec is not None and codec.float8 == tuning.float8
    return {**form, "BIAS": -form["BIAS"]} if converts else form
