"""The facts of a device: values the core asks for instead of asking which device it is.

Each field is a real difference between devices. The core branches on the value, never on an identity.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Facts:
    """What the runtime must know about a device, as plain host data.

    `tensor_device` is the device string a tensor library allocates on. `page_size` is the preferred number of cells in a
    page. `shares_host_memory` says that a host array and a device tensor may be the same bytes. `default_graph` is the graph
    kind taken when none is asked for, or "off". `most_graph_segments` bounds the captured pieces that may exist at a time;
    None: only memory does.
    """

    tensor_device: str
    cache_loc_dtype: str = "int64"
    kv_page_layout: str = "cell_major"
    page_size: int = 16
    needs_host_lengths: bool = False
    shares_input_buffers: bool = True
    allows_mixed_batches: bool = True
    has_streams: bool = False
    has_pinned_memory: bool = False
    shares_host_memory: bool = False
    collective_backend: str = ""
    fp8_format: str | None = None
    preferred_dtype: str | None = None
    default_graph: str = "off"
    most_graph_segments: int | None = None

    def graph_kind(self, asked: str) -> str:
        """The graph kind that was asked for, or this device's own where that is "auto"."""
        return self.default_graph if asked == "auto" else asked
