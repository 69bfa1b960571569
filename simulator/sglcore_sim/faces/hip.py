"""HIP needs no face: torch serves it under the names of torch.cuda, whose shipped code runs. What is planted are the libraries of the chip."""

from __future__ import annotations

from typing import Any

from sglcore_sim import vendors


def plant(sim: Any) -> None:
    """Make the libraries of this chip importable."""
    vendors.plant(sim)
