"""Stand-ins of the vendors' libraries: CPU references under the true signatures, planted as
importable modules.

Every module here exports `plant(sim)`, which makes its library importable
(`importlib.util.find_spec` sees it too) or registers its operators. A `Kind` names those that its
chip has.
"""

from __future__ import annotations

import torch


def operators(namespace: str) -> list[str]:
    """Names of the operators that are registered under a namespace, without overloads."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted({name.split("::")[1].partition(".")[0] for name in names if name.startswith(f"{namespace}::")})
