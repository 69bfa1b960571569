"""A forward in pieces: captured segments, and uncaptured calls between them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sglcore.core.errors import ConfigError
from sglcore.runtime.forward_context import Segments, forward_context, get_forward_context
from sglcore.runtime.graphs.capture import Recorder, Segment
from sglcore.runtime.graphs.graph_backend import Step


@dataclass(frozen=True, slots=True)
class EagerCall:
    """A call between segments, with its inputs and output.

    One segment wrote the inputs; the next one reads the output. All calls share this memory.
    """

    call: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    output: Tensor

    def run(self, num_tokens: int) -> None:
        """Run `call` on the first `num_tokens` rows of its inputs, and copy its result to these
        rows of `output`.

        Later rows keep finite values of an older step, which no real row reads.
        """
        rows = [value[:num_tokens] if isinstance(value, Tensor) else value for value in self.inputs]
        self.output[:num_tokens].copy_(self.call(*rows))


@dataclass(frozen=True, slots=True)
class Pieces:
    """The `CapturedPrompt` of a forward in pieces: segments and eager calls in order, and the
    output of the last.

    `step` keeps alive what they read: model, batch, weights.
    """

    parts: list[Segment | EagerCall]
    output: Tensor
    step: Step

    def replay(self, num_tokens: int) -> Tensor:
        """Implements `CapturedPrompt.replay`: run every part in order on the current stream."""
        for part in self.parts:
            if isinstance(part, EagerCall):
                part.run(num_tokens)
            else:
                part.replay()
        return self.output


class Uncaptured:
    """The `Segments` of a warm-up forward, which runs before the capture.

    Every call returns zeros, so that no request's KV slot is written. Also allocates the memory
    between segments. `has_calls`: an operation used the segments.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.has_calls = False
        self._recorder = recorder

    def run_between(self, call: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Implements `Segments.run_between` for a warm-up: return zeros of the shape of the first
        input, without running `call`.
        """
        self.has_calls = True
        self._recorder.leave(inputs)
        self._recorder.between("result", inputs[0])
        return torch.zeros_like(inputs[0])


class Captured:
    """The `Segments` of a forward under capture.

    `parts` are the finished segments and the calls between them.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.parts: list[Segment | EagerCall] = []
        self._recorder = recorder
        self._open = ExitStack()

    def run(self, step: Step) -> Tensor:
        """Return the output of a step; the last segment ends with it.

        Raises what step or capture raises.
        """
        with self._open:
            self._begin()
            return step()

    def run_between(self, call: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Implements `Segments.run_between`: end a segment, note the call, which does not run now,
        and begin the next segment. The result has the shape of the first input.

        Inputs and output are copied, so that the pool can reuse their memory.
        """
        left, result = self._recorder.leave(inputs), self._recorder.between("result", inputs[0])
        self._open.close()
        self.parts.append(EagerCall(call, left, result))
        self._begin()
        return result.clone()

    def _begin(self) -> None:
        self.parts.append(self._open.enter_context(self._recorder.record()))


def record_pieces(recorder: Recorder, step: Step) -> Pieces:
    """Run a step once to warm up, then under capture, split into segments at each uncaptured call.

    Raises ConfigError for a step without such calls: its attention would be captured.
    """
    first, captured = Uncaptured(recorder), Captured(recorder)
    _run_with(first, step)
    if not first.has_calls:
        raise ConfigError(
            "this model cannot be captured in pieces: none of its operations asks the context for segments",
            remedy="--graph full captures its decode steps, --graph off nothing",
        )
    output = _run_with(captured, lambda: captured.run(step))
    return Pieces(captured.parts, output, step)


def _run_with(segments: Segments, step: Step) -> Tensor:
    with forward_context(replace(get_forward_context(), segments=segments)):
        return step()
