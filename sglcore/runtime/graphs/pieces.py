"""A forward in pieces: captured segments, and between them the calls that are never captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sglcore.runtime.graphs.backend import Break, Walk
from sglcore.runtime.graphs.capture import Recorder, Segment


@dataclass(frozen=True, slots=True)
class EagerCall:
    """A break with the memory around it: inputs that a segment wrote, and the output that the next one reads. All breaks
    share it."""

    found: Break
    output: Tensor

    def run(self, num_tokens: int) -> None:
        """Call it on the first rows. Rows beyond keep finite values of an older step, which no real row reads."""
        rows = [value[:num_tokens] if isinstance(value, Tensor) else value for value in self.found.inputs]
        self.output[:num_tokens].copy_(self.found.call(*rows))


@dataclass(slots=True)
class Pieces:
    """Segments and eager calls in order; `keeps` is what they read and nobody else holds."""

    parts: list[Segment | EagerCall] = field(default_factory=list)
    output: Tensor | None = None
    keeps: Any = None

    def replay(self, num_tokens: int) -> Tensor:
        """Run every part in order on the current stream."""
        for part in self.parts:
            if isinstance(part, EagerCall):
                part.run(num_tokens)
            else:
                part.replay()
        assert self.output is not None
        return self.output


def walk_once(recorder: Recorder, walk: Walk) -> None:
    """Run a walk without capture, every break giving zeros: what is lazy gets ready, the memory between segments too, and
    no cell of a request is written."""
    found = _advance(walk, None)
    while isinstance(found, Break):
        inputs = _left(recorder, found).inputs
        recorder.between("result", inputs[0])
        found = _advance(walk, torch.zeros_like(inputs[0]))


def record_pieces(recorder: Recorder, make_walk: Callable[[], Walk]) -> Pieces:
    """Walk once to warm up, then walk under capture, one segment up to each break and one after the last."""
    walk_once(recorder, make_walk())
    walk = make_walk()
    pieces = Pieces(keeps=walk)
    given: Tensor | None = None
    while pieces.output is None:
        found, segment = _record(recorder, walk, given)
        pieces.parts.append(segment)
        if isinstance(found, Tensor):
            pieces.output = found
            break
        given = recorder.between("result", found.inputs[0])
        pieces.parts.append(EagerCall(found, given))
    return pieces


def _record(recorder: Recorder, walk: Walk, given: Tensor | None) -> tuple[Break | Tensor, Segment]:
    found: list[Break | Tensor] = []

    def step() -> None:
        # Copied on both sides, so that the pool is free to reuse what only this segment needs.
        result = _advance(walk, None if given is None else given.clone())
        found.append(_left(recorder, result) if isinstance(result, Break) else result)

    segment = recorder.record(step)
    return found[0], segment


def _left(recorder: Recorder, found: Break) -> Break:
    """The break with its tensors copied to memory that the next break of any walk uses again."""
    inputs = (
        recorder.between(place, value).copy_(value) if isinstance(value, Tensor) else value
        for place, value in enumerate(found.inputs)
    )
    return Break(found.call, tuple(inputs))


def _advance(walk: Walk, given: Tensor | None) -> Break | Tensor:
    try:
        return next(walk) if given is None else walk.send(given)
    except StopIteration as end:
        return end.value
