"""Which sliding-window layers share storage with which layers that keep all tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from sglcore.runtime.memory.geometry import has_window, keeps_window
from sglcore.step.sizing import Sharing

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.memory.pools import PoolKind


def sharing_of(layers: Sequence[Attention], window: int, kind: PoolKind) -> Sharing:
    """Return how the layers of a model can share the memory of their pages, or why they cannot.

    `window` is the longest sliding window with pages that are freed (0: there is none).
    """
    if not any(has_window(layer) for layer in layers):
        return Sharing(0, "no layer has a sliding window, so all pages are of one kind")
    if not window:
        return Sharing(0, "no window page would be freed (see the row `window cache`), so all pages are of one kind")
    if any(layer.rows for layer in layers):
        return Sharing(0, "not yet: this model keeps KV rows, and those of windows and of all tokens differ in size")
    if kind.windows is None:
        return Sharing(0, "not yet: this device's KV pool cannot show windows in the storage of other layers")
    windows = [layer for layer in layers if layer.stores and keeps_window(layer, window)]
    full = [layer for layer in layers if layer.stores and not keeps_window(layer, window)]
    if not full:
        return Sharing(0, "every layer keeps a sliding window only, so all pages are of one kind")
    shapes = sorted({(layer.num_kv_heads, layer.head_dim) for layer in (*windows, *full)})
    if len(shapes) > 1:
        found = ", ".join(f"{heads} of {size}" for heads, size in shapes)
        return Sharing(0, f"not yet: layers have KV heads of several shapes ({found})")
    unit = -(-len(windows) // len(full))
    return Sharing(unit, f"{len(windows)} layers with windows, {len(full)} with all tokens", len(windows), len(full))


def shared_places(layers: Sequence[Attention], windowed: Collection[int]) -> dict[int, tuple[int, int]]:
    """Return where each sliding-window layer is kept, by its id: the layer with the storage, and
    the index of its page among those of a window page.

    Window layers are dealt in order to the layers that keep all tokens.
    """
    full = [layer.layer_id for layer in layers if layer.stores and layer.layer_id not in windowed]
    windows = [layer.layer_id for layer in layers if layer.stores and layer.layer_id in windowed]
    return {layer: (full[index % len(full)], index // len(full)) for index, layer in enumerate(windows)}
