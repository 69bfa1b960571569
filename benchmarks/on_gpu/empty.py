"""A Triton kernel that does nothing, in a file of its own: not every device has Triton."""

from __future__ import annotations

import triton


@triton.jit
def empty(target):
    """Nothing."""
