"""An empty Triton kernel, in its own file because not every device has Triton."""

from __future__ import annotations

import triton


@triton.jit
def empty(target):
    """Nothing."""
