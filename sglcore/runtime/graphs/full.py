"""Full graphs: a whole decode forward is one segment."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sglcore.runtime.attention.contract import HostUpdate
from sglcore.runtime.graphs.capture import Recorder, Segment, StreamCapture
from sglcore.runtime.graphs.graph_backend import Step
from sglcore.runtime.streams import Streams


@dataclass(frozen=True, slots=True)
class FullStep:
    """The `CapturedStep` of a forward that is one segment, with its output buffer.

    `step` keeps alive what the segment reads: model, batch, plan.
    """

    segment: Segment
    output: Tensor
    step: Step

    def replay(self, update: HostUpdate | None) -> Tensor:
        """Implements `CapturedStep.replay`; queues the graph. The next replay overwrites the
        output.
        """
        self.segment.replay(update)
        return self.output


class FullGraphs:
    """The `GraphBackend` that captures a whole decode forward as one segment, over a stream
    capture. `kind` is the name of these graphs in `StepOutput.path`.
    """

    kind: str = "full"

    def __init__(self, capture: StreamCapture, streams: Streams) -> None:
        self.recorder = Recorder(capture, streams)

    def capture(self, step: Step) -> FullStep:
        """Implements `GraphBackend.capture`: run the step once to warm up (lazy libraries,
        autotuners), then once under capture.
        """
        step()
        with self.recorder.record() as segment:
            output = step()
        return FullStep(segment, output, step)

    def close(self) -> None:
        """Free the graphs and their pool. Waits for the forward stream."""
        self.recorder.close()
