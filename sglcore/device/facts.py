"""The facts of a device: values the core asks for instead of asking which device it is.

Each field is a real difference between devices. The core branches on the value, never on an identity; what reads each
fact, and the law that finds a false one, stand in `sglcore/conformance/fact_proofs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Facts:
    """What the runtime must know about a device, as plain host data."""

    tensor_device: str
    """The device that its tensor library allocates on, with its number where there may be several."""
    index_dtype: str = "int64"
    """The type of the numbers of cells, and the widest integer of any tensor that is kept on it or given to a kernel: on
    "int32" the core makes nothing wider, except where an operation of torch gives nothing else."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """The element types that it computes models in. A checkpoint in another is converted to `preferred_dtype`, or else to
    the first of these; what is asked for and not among them is refused."""
    preferred_dtype: str | None = None
    """The 16-bit type that it takes for a checkpoint in the other one. None: each as it is stored."""
    page_size: int = 16
    """Cells in a page, unless somebody asks for another number."""
    needs_host_lengths: bool = False
    """A forward must know the lengths of its requests on the host. Without it a replay may come without the `*_cpu`
    mirrors of a batch; with it they are there in every forward, and one without them is refused."""
    allows_mixed_batches: bool = True
    """One step may hold prompts and rows that decode."""
    has_streams: bool = False
    """`torch.Stream` and `torch.Event` work on it: steps run on a stream of their own, ahead of the host."""
    has_pinned_memory: bool = False
    """Copies from and to pinned host memory do not wait, and are ordered with the work of their stream."""
    reaches_pinned_memory: bool = False
    """Its kernels read and write pinned host memory by themselves."""
    shares_host_memory: bool = False
    """A host array and a tensor on the device may be the same bytes: nothing is copied."""
    default_graph: str = "off"
    """The graph kind that is taken when none is asked for, or "off"."""
    most_graph_segments: int | None = None
    """Captured pieces that may exist at a time: fewer sizes are captured. None: only memory bounds them."""

    def graph_kind(self, asked: str) -> str:
        """The graph kind that was asked for, or this device's own where that is "auto"."""
        return self.default_graph if asked == "auto" else asked
