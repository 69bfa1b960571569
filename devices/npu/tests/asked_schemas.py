"""The schemas of the operators in the namespace `npu`, by name."""

from __future__ import annotations

import torch


def answer() -> list[str]:
    """One line each."""
    return sorted(str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("npu::"))
