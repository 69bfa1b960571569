"""The facts of a device: values that the core reads instead of asking which device it is.

Each field is a real difference between devices. The core branches on the value, never on an
identity. `sglcore/conformance/fact_proofs.py` says what reads each fact, and which law finds a
false one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Facts:
    """What the core must know about a device, as plain host data: its element types and page size,
    whether it has streams and pinned memory, and which graphs it captures. A package's
    `DevicePackage.facts` returns it; the core reads its fields in place of the device's name.
    """

    tensor_device: str
    """The device on which its tensor library allocates, such as "acme:0"; with its index if there
    may be several.
    """
    index_dtype: str = "int64"
    """The type of KV slot indices, and the widest integer type of tensors on the device and of
    kernel arguments. On "int32" the core makes no wider integers, except where a torch operation
    returns nothing else.
    """
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """The element types in which it runs models. A checkpoint in another type is converted to
    `preferred_dtype`, or else to the first of these. A requested type that is not listed is
    refused.
    """
    preferred_dtype: str | None = None
    """The 16-bit type to which checkpoints in the other 16-bit type are converted. None: each keeps
    its type.
    """
    page_size: int = 16
    """Default number of tokens per KV page."""
    needs_host_lengths: bool = False
    """Whether its graphs, or every attention on it, need the exact lengths of requests on the host.
    What one attention backend needs is in its own facts. If either is True, every forward has them,
    and one without them is refused; if both are False, a replay may lack the `*_cpu` mirrors of a
    batch.
    """
    allows_mixed_batches: bool = True
    """Whether one step may have prompts and decode rows."""
    has_streams: bool = False
    """Whether `torch.Stream` and `torch.Event` work: steps then run on their own stream, ahead of
    the host.
    """
    has_pinned_memory: bool = False
    """Whether copies from and to pinned host memory return without waiting and are ordered with the
    work of their stream.
    """
    reaches_pinned_memory: bool = False
    """Whether its kernels access pinned host memory directly."""
    shares_host_memory: bool = False
    """Whether a host array and a device tensor may share memory, so that nothing is copied."""
    default_graph: str = "off"
    """The graph kind that "auto" selects, or "off"."""
    most_graph_segments: int | None = None
    """Maximum number of captured graph segments at a time; fewer sizes are captured if needed.
    None: limited only by memory.
    """

    def graph_kind(self, asked: str) -> str:
        """Return the graph kind that the setting `asked` selects: `default_graph` for "auto",
        otherwise `asked`, which is not checked.
        """
        return self.default_graph if asked == "auto" else asked
