"""CUDA needs no face: the shipped code of torch.cuda runs. What is planted are the libraries of the chip."""

from __future__ import annotations

from typing import Any

from sglcore_sim import vendors


def plant(sim: Any) -> None:
    """Make the libraries of this chip importable."""
    vendors.plant(sim)
