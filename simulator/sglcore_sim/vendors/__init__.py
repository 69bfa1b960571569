"""Stand-ins of the vendors' libraries: CPU references under the true signatures, planted as importable modules.

Every module here exports `plant(sim)`, which makes its library importable (`importlib.util.find_spec` sees it too) or
registers its operators. `LIBRARIES` says which a kind has, and on which chips: a library that lacks kernels for a chip is
not installed there either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Library:
    """A library and the targets that it serves; none named: all of the kind. `module` is one of this package."""

    module: str
    targets: Sequence[str] = ()

    def serves(self, target: str) -> bool:
        """There are kernels for this target."""
        return not self.targets or target in self.targets


LIBRARIES: Mapping[str, Sequence[Library]] = MappingProxyType(
    {
        "cuda": (Library("flashinfer"), Library("flash_attn", ("sm_90",))),
        "hip": (Library("aiter", ("gfx942", "gfx950")),),
        "musa": (Library("torch_musa_ops", ("mp_31",)),),
        "npu": (Library("torch_npu"),),
    }
)


def plant(sim: Any) -> None:
    """Plant what the simulated kind has."""
    for library in LIBRARIES.get(sim.kind.name, ()):
        if library.serves(sim.kind.arch):
            import_module(f"sglcore_sim.vendors.{library.module}").plant(sim)


def operators(namespace: str) -> list[str]:
    """Names of the operators that are registered under a namespace, without overloads."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted({name.split("::")[1].partition(".")[0] for name in names if name.startswith(f"{namespace}::")})
