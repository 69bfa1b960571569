"""A piecewise forward: work before, in and between the captured segments."""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.runtime.forward_context import ForwardContext, forward_context, get_forward_context
from sglcore.runtime.graphs.capture import Recorder
from sglcore.runtime.graphs.graph_segments import record_pieces
from tests.runtime.recording import RecordingCapture, make_streams
from tests.runtime.tiny import make_site


def test_the_memory_between_segments_is_made_before_anything_is_captured() -> None:
    capture, streams, rows = RecordingCapture(), make_streams(), torch.arange(6.0).view(3, 2)

    def step() -> Tensor:
        segments = get_forward_context().segments
        assert segments is not None
        return segments.run_between(lambda x: x * x, rows + 1) * 2

    with torch.inference_mode(), streams.running(), forward_context(ForwardContext(make_site().attention)):
        pieces = record_pieces(Recorder(capture, streams), step)
        assert torch.equal(pieces.replay(3), (rows + 1) ** 2 * 2)
    recorded = {op.function.overloadpacket.__name__ for segment in capture.segments for op in segment.ops}
    assert len(capture.segments) == 2 and recorded == {"add", "slice", "copy_", "clone", "mul"}
