"""The context of a stream is entered once, also when it is requested again inside itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglcore.runtime.graphs.torch_capture import TorchCapture
from sglcore.runtime.streams import entered


class Narrow:
    """A stream as in older releases of torch: its context must not be entered inside itself."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.is_entered = False

    def __enter__(self) -> None:
        if self.is_entered:
            raise RuntimeError("Stream's context should not be initialized.")
        self.is_entered = True

    def __exit__(self, *_: object) -> None:
        self.is_entered = False


class Graph:
    """A graph that records nothing."""

    def capture_begin(self, **_: Any) -> None:
        """Begin the capture."""

    def capture_end(self) -> None:
        """End the capture."""


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `Narrow` stream, which is the current stream while it is entered."""
    made = Narrow()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: made if made.is_entered else None)
    return made


def test_a_stream_that_is_current_is_not_entered_again(stream: Any) -> None:
    with entered(stream), entered(stream):
        assert stream.is_entered
    assert not stream.is_entered


def test_a_capture_runs_on_its_stream_whether_or_not_that_is_current(stream: Any) -> None:
    seen: list[bool] = []
    capture = TorchCapture(Graph, object)
    with capture.capture(stream, None):
        seen.append(stream.is_entered)
    with stream, capture.capture(stream, None):
        seen.append(stream.is_entered)
    assert seen == [True, True] and not stream.is_entered
