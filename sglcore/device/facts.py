"""The facts of a device: values the core asks for instead of asking which device it is.

Each field is a real difference between devices. The core branches on the value, never on an identity.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Facts:
    """What the runtime must know about a device, as plain host data.

    `tensor_device` is the device string a tensor library allocates on. `index_dtype` is the type of every tensor of indices on
    it. `dtypes` are the element types that it computes in, `preferred_dtype` the one it takes where nobody asked for another;
    None: the checkpoint's. `page_size` is the preferred number of cells in a page. `needs_host_lengths` says that a forward
    must know the lengths of its requests on the host. `shares_host_memory` says that a host array and a device tensor may be
    the same bytes. `default_graph` is the graph kind taken when none is asked for, or "off". `most_graph_segments` bounds the
    captured pieces that may exist at a time; None: only memory does.
    """

    tensor_device: str
    index_dtype: str = "int64"
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    preferred_dtype: str | None = None
    page_size: int = 16
    needs_host_lengths: bool = False
    allows_mixed_batches: bool = True
    has_streams: bool = False
    has_pinned_memory: bool = False
    shares_host_memory: bool = False
    default_graph: str = "off"
    most_graph_segments: int | None = None

    def graph_kind(self, asked: str) -> str:
        """The graph kind that was asked for, or this device's own where that is "auto"."""
        return self.default_graph if asked == "auto" else asked
