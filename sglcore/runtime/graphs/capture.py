"""Stream capture: `StreamCapture`, which a device implements to record the work queued on a stream,
and `Recorder`, which uses it by the rules common to all devices.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from sglcore.runtime.attention.contract import HostUpdate
from sglcore.runtime.streams import Streams


class CaptureError(RuntimeError):
    """A step cannot be captured: it queued no work on the stream, there is no stream or another one
    is current, or its forward is not one graph with one output.
    """


class Segment(Protocol):
    """A piece of captured work that can be replayed; `StreamCapture.capture` makes it."""

    def replay(self, update: HostUpdate | None = None) -> None:
        """Queue it on the current stream, after applying `update` (values that it patches into the
        graph) if given. Does not wait for the queued work.
        """
        ...

    def reset(self) -> None:
        """Free it. The device must have finished it."""
        ...


class StreamCapture(Protocol):
    """A device's way to record the work queued on a stream as a `Segment`."""

    def make_pool(self) -> object:
        """Return new, empty memory for all graphs of one runner."""
        ...

    def capture(self, stream: torch.Stream, pool: object) -> AbstractContextManager[Segment]:
        """Record the work that a block queues on `stream`, which is current inside the block.

        The segment can be replayed after the block. Raises if the capture fails, and re-raises
        exceptions of the block. The caller warms up.
        """
        ...


class Recorder:
    """Records segments on the forward stream into one pool.

    Owns the segments and the memory between them. The constructor raises CaptureError if the device
    has no forward stream.
    """

    def __init__(self, capture: StreamCapture, streams: Streams) -> None:
        if streams.forward is None:
            raise CaptureError("these graphs record a stream, and the facts of this device say has_streams=False")
        self._capture = capture
        self._stream = streams.forward
        self._pool: object | None = None
        self._segments: list[Segment] = []
        self._between: dict[tuple[object, ...], Tensor] = {}

    def between(self, name: object, like: Tensor) -> Tensor:
        """Return memory outside the pool for a tensor [rows, ...] that leaves or enters a segment.

        All calls with this name, dtype and row shape share it: contents are valid until the next
        use. Initially zero. The largest tensor must come first, and not under capture.
        """
        key = (name, like.dtype, like.shape[1:])
        found = self._between.get(key)
        if found is None or len(found) < len(like):
            found = self._between[key] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        return found[: len(like)]

    def leave(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the values as a tuple: tensors copied to memory outside the pool, which the next
        call between segments reuses (`between`, by place in `inputs`), others as they are.
        """
        return tuple(
            self.between(place, value).copy_(value) if isinstance(value, Tensor) else value
            for place, value in enumerate(inputs)
        )

    @contextmanager
    def record(self) -> Iterator[Segment]:
        """Context manager: capture the work that the block queues, as the segment that it gets,
        which can be replayed after the block.

        Raises CaptureError if the block queued none on the forward stream, or if another stream is
        current in it.
        """
        # A pool ends with its last graph; a pool without a successful capture is not reused.
        if not self._segments:
            self._pool = self._capture.make_pool()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with self._capture.capture(self._stream, self._pool) as segment:
                _check_stream(self._stream)
                yield segment
        self._segments.append(segment)
        for warning in said:
            if "empty" in str(warning.message).lower():
                raise CaptureError(
                    "the capture recorded nothing: the step queued no work on the stream it was given "
                    f"({warning.message})"
                )
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def close(self) -> None:
        """Free every segment and drop the pool. Waits for the forward stream."""
        if self._segments:
            self._stream.synchronize()
        for segment in reversed(self._segments):
            segment.reset()
        self._segments.clear()
        self._between.clear()
        self._pool = None


def _check_stream(wanted: torch.Stream) -> None:
    """Raise CaptureError if a step would queue its work on another stream than the captured one."""
    if torch.accelerator.is_available() and (current := torch.accelerator.current_stream(wanted.device)) != wanted:
        raise CaptureError(
            f"the capture of {wanted} runs its step while {current} is current; enter the stream it was given"
        )
