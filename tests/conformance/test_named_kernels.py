"""The kit compares every kernel table that a package names with the reference, not only the default
one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sglcore.conformance.kit_run import Kit, run_case
from sglcore.conformance.laws.laws_kernels import LAWS, entries
from sglcore.conformance.reference_parts import REFERENCE
from sglcore.core.errors import ConfigError
from sglcore.runtime.kernels.table import KernelTable

(LAW,) = LAWS


def fused() -> KernelTable:
    """Another way to compute RMS norm."""
    return KernelTable().replace(rms_norm=lambda x, weight, eps: torch.rms_norm(x, weight.shape, weight, eps))


def forgetful() -> KernelTable:
    """Mutant: RMS norm without its weight."""

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.rms_norm(x, weight.shape, None, eps)

    return KernelTable().replace(rms_norm=rms_norm)


def elsewhere() -> KernelTable:
    """A table with a library that is not installed."""
    raise ConfigError("its library is 1.0", wanted="2.0")


def damaged() -> KernelTable:
    """Mutant: a table that raises when it is made."""
    raise RuntimeError("half a library")


def test_tables_that_must_be_asked_for_are_held_against_the_reference_too(tmp_path: Path) -> None:
    kernels = {**REFERENCE.package.kernels}
    kernels |= {name: f"{__name__}:{name}" for name in ("fused", "forgetful", "elsewhere", "damaged")}
    target = replace(REFERENCE, package=replace(REFERENCE.package, kernels=kernels))
    cases = [case for case in entries(target) if "/" in case]
    assert cases[:2] == ["fused/rms_norm", "forgetful/rms_norm"]
    assert cases[2:] == [f"damaged/{entry}" for entry in KernelTable.declared()]
    kit = Kit(target, tmp_path)
    right, wrong, damaged = (run_case(kit, LAW, case) for case in cases[:3])
    kit.close()
    assert right.verdict == "passed"
    assert wrong.verdict == "failed" and "forgetful/rms_norm, " in wrong.text
    assert damaged.verdict == "failed" and "half a library" in damaged.text
