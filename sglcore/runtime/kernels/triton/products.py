"""Matrix products that accumulate in float32, the same in compiled and in interpreted kernels."""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from sglcore.runtime.kernels.triton.rounding import INTERPRETED, narrow

NARROWEST_DOT = 16
"""The smallest side of a matrix product."""


@triton.jit
def wide_dot(a, b):
    """Return a @ b in float32. Float32 inputs are not rounded to a shorter format.

    The interpreter multiplies bfloat16 wrongly, so it gets float32.
    """
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision="ieee")
    return product


@triton.jit
def rounded_dot(a, b, dtype: tl.constexpr):
    """Return float32 a @ b, with the float32 values a and b rounded to dtype before the product:
    half dtypes use the matrix unit.
    """
    return wide_dot(narrow(a, dtype), narrow(b, dtype))
