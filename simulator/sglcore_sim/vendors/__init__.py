"""Stand-ins for the vendors' libraries: CPU references with the real signatures, planted as
importable modules.

Every module here has `plant(sim)`, which makes its library importable (and visible to
`importlib.util.find_spec`) or registers its operators. A `Kind` lists the libraries of its chip.
"""

from __future__ import annotations

import torch


def operators(namespace: str) -> list[str]:
    """Return the names of the operators that torch has in `namespace`, sorted, without namespace
    and overload. It includes names with a kernel but no schema."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted({name.split("::")[1].partition(".")[0] for name in names if name.startswith(f"{namespace}::")})
