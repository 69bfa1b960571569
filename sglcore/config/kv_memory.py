"""The choices of `kv_memory`: whether pages of sliding windows share memory with other pages."""

from __future__ import annotations

KV_MEMORY = ("auto", "split", "shared")
"""The values of the setting."""
KV_MEMORY_HELP = (
    "Memory of the KV cache: split (layers with a sliding window have pages of their own, of a number fixed at the"
    " start), shared (one memory for the pages of all layers, taken by the layers that need it; an error if the model"
    " or the device does not allow it), or auto (default: shared where it is possible and wastes little)."
)
