"""HIP needs no face: torch serves it under the names of torch.cuda, whose shipped code runs over
the same bindings."""

from __future__ import annotations

from typing import Any

from sglcore_sim import cuda_bindings


def plant(sim: Any) -> None:
    """A torch that was built for ROCm."""
    sim.core.claim_rocm()
    cuda_bindings.plant(sim, hip="6.4.43482")
