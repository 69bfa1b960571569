"""The values by which acme differs from other devices. Each is explained in sglcore/device/facts.py."""

from __future__ import annotations

from sglcore.device.facts import Facts


def facts(index: int = 0) -> Facts:
    """A plain stream device."""
    return Facts(
        tensor_device=f"acme:{index}",
        index_dtype="int64",
        page_size=16,
        has_streams=True,
        has_pinned_memory=True,
        default_graph="full",
    )
