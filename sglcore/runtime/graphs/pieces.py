"""A forward in pieces: captured segments, and between them the calls that are never captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sglcore.device.errors import ConfigError
from sglcore.runtime.forward_context import Segments, forward_context, get_forward_context
from sglcore.runtime.graphs.backend import Step
from sglcore.runtime.graphs.capture import Recorder, Segment


@dataclass(frozen=True, slots=True)
class EagerCall:
    """A call between segments with the memory around it: inputs that a segment wrote, and the output that the next one
    reads. All calls share it."""

    call: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    output: Tensor

    def run(self, num_tokens: int) -> None:
        """Call it on the first rows. Rows beyond keep finite values of an older step, which no real row reads."""
        rows = [value[:num_tokens] if isinstance(value, Tensor) else value for value in self.inputs]
        self.output[:num_tokens].copy_(self.call(*rows))


@dataclass(frozen=True, slots=True)
class Pieces:
    """Segments and eager calls in order, and the output of the last; `step` holds what they read: model, batch, weights."""

    parts: list[Segment | EagerCall]
    output: Tensor
    step: Step

    def replay(self, num_tokens: int) -> Tensor:
        """Run every part in order on the current stream."""
        for part in self.parts:
            if isinstance(part, EagerCall):
                part.run(num_tokens)
            else:
                part.replay()
        return self.output


class Uncaptured:
    """Segments of a forward that warms up: every call gives zeros, so that no cell of a request is written, and the memory
    between segments gets ready. `has_calls`: something asked for them."""

    def __init__(self, recorder: Recorder) -> None:
        self.has_calls = False
        self._recorder = recorder

    def run_between(self, call: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Zeros."""
        self.has_calls = True
        self._recorder.leave(inputs)
        self._recorder.between("result", inputs[0])
        return torch.zeros_like(inputs[0])


class Captured:
    """Segments of a forward that is captured; `parts` are those that ended, and the calls between them."""

    def __init__(self, recorder: Recorder) -> None:
        self.parts: list[Segment | EagerCall] = []
        self._recorder = recorder
        self._open = ExitStack()

    def run(self, step: Step) -> Tensor:
        """The output of a step, the last of whose segments ends with it. Raises what the step or the capture raises."""
        with self._open:
            self._begin()
            return step()

    def run_between(self, call: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """End a segment, begin the next. Copied on both sides, so that the pool is free to reuse what only one of them needs."""
        left, result = self._recorder.leave(inputs), self._recorder.between("result", inputs[0])
        self._open.close()
        self.parts.append(EagerCall(call, left, result))
        self._begin()
        return result.clone()

    def _begin(self) -> None:
        self.parts.append(self._open.enter_context(self._recorder.record()))


def record_pieces(recorder: Recorder, step: Step) -> Pieces:
    """Run a step once to warm up, then under capture: one segment up to each call between, and one after the last. Raises
    ConfigError for one that asks for no segments: its attention would be captured."""
    first, captured = Uncaptured(recorder), Captured(recorder)
    _run_with(first, step)
    if not first.has_calls:
        raise ConfigError(
            "this model can not be captured in pieces: none of its operations asks the context for segments",
            remedy="--graph full captures its decode steps, --graph off nothing",
        )
    output = _run_with(captured, lambda: captured.run(step))
    return Pieces(captured.parts, output, step)


def _run_with(segments: Segments, step: Step) -> Tensor:
    with forward_context(replace(get_forward_context(), segments=segments)):
        return step()
