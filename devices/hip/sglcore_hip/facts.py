"""The facts of an AMD GPU. torch calls its devices by the other vendor's name, on purpose; these are its own names."""

from __future__ import annotations

import torch

from sglcore.device.facts import Facts


def facts() -> Facts:
    """Streams, graphs and pinned memory; the fp8 format by what the current GPU's matrix units take, if there is one."""
    return Facts(
        tensor_device="cuda:0",
        cache_loc_dtype="int64",
        page_size=16,
        has_streams=True,
        has_pinned_memory=True,
        collective_backend="nccl",
        fp8_format=fp8_format(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None,
        default_graph="full",
    )


def fp8_format(capability: tuple[int, int]) -> str | None:
    """The fp8 format of a target, given as torch gives it: (9, 4) is gfx942, whose zero has no sign (e4m3fnuz); gfx950
    and gfx12 take the open format (e4m3fn); older ones and gfx11 have none."""
    if capability == (9, 4):
        return "e4m3fnuz"
    return "e4m3fn" if capability == (9, 5) or capability[0] >= 12 else None
