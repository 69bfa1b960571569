"""How acme captures what is queued on a stream. The core makes decode and prefill graphs of it.

Through torch's own graph of an accelerator; where the extension has only its own, give a function that makes a `TorchCapture` of
its class and its pool's handle.
"""

from __future__ import annotations

from sglcore.runtime.graphs.stream_graphs import stream_graphs
from sglcore.runtime.graphs.torch_capture import AcceleratorCapture

full, breakable, piecewise = stream_graphs(AcceleratorCapture)
