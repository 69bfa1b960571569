"""HIP needs no face of its own: torch uses the names of torch.cuda for it, and that shipped code
runs over the same bindings."""

from __future__ import annotations

from typing import Any

from sglcore_sim import cuda_bindings


def plant(sim: Any) -> None:
    """Make torch in this process look like a build for ROCm 6.4, over the simulator `sim`. There is
    no way back."""
    sim.core.claim_rocm()
    cuda_bindings.plant(sim, hip="6.4.43482")
