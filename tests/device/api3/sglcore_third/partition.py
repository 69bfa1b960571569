"""Streams that keep to some of the compute units of a third."""

from __future__ import annotations

import torch

from sglcore.runtime.overlap.parts import Partition
from sglcore_third.capability import read_capability


def partition(device: torch.device) -> Partition:
    """Two units at a time."""

    def stream(units: int) -> torch.Stream:
        return torch.Stream(device)

    return Partition(read_capability(device).cores, 2, stream)
