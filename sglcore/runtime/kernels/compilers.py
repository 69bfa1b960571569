"""Tells why the core's Triton kernels cannot be compiled for a device, by the backends of the
installed Triton. Imports Triton only when called.
"""

from __future__ import annotations

from importlib import import_module


def triton_gap(compiler: str) -> str:
    """Return why the core's Triton kernels cannot run here with this compiler, a name in
    `triton.backends`; "" if they can, or if the interpreter runs them.
    """
    try:
        from sglcore.runtime.kernels.triton.rounding import INTERPRETED
    except ImportError as error:
        return str(error)
    compilers = import_module("triton.backends").backends
    if INTERPRETED.value or compiler in compilers:
        return ""
    return f"the Triton that is installed compiles for {', '.join(sorted(compilers))}"
