"""Lists the schemas of the operators in the namespace `npu`."""

from __future__ import annotations

import torch


def answer() -> list[str]:
    """Return one line per schema, sorted."""
    return sorted(str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("npu::"))
