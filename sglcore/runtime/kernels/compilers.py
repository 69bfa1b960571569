"""Checks which compilers the installed Triton has. Imports Triton only when called."""

from __future__ import annotations

from importlib import import_module


def triton_gap(compiler: str) -> str:
    """Return why the core's Triton kernels cannot run here with this compiler, a name in
    `triton.backends`; "" if they can.
    """
    try:
        from sglcore.runtime.kernels.triton.rounding import INTERPRETED
    except ImportError as error:
        return str(error)
    compilers = import_module("triton.backends").backends
    if INTERPRETED.value or compiler in compilers:
        return ""
    return f"the Triton that is installed compiles for {', '.join(sorted(compilers))}"
