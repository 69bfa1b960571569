"""Returned hidden states, as the scheduler sees them: which requests may have them, which rows of a
step bring them, and what a request keeps until its next output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglcore.schedule.request import Request
from sglcore.schedule.request_errors import RequestError
from sglcore.schedule.request_output import EngineOutput
from sglcore.worker.model_worker import Limits
from sglcore.worker.schedule_batch import CaptureHiddenMode, ScheduleBatch

Floats = NDArray[np.float32]
STATES = "return_hidden_states"
"""The sampling parameter that errors name."""


def check_hidden_states(request: Request, limits: Limits) -> None:
    """Raise RequestError if a request wants hidden states that a worker with these limits does not
    return.
    """
    params = request.params
    if params.return_hidden_states is None:
        return
    if not limits.hidden_size:
        raise RequestError(
            "this request wants hidden states, and this device's worker returns none yet; leave return_hidden_states"
            " out, or use a device with a worker that returns them",
            field=STATES,
        )
    if params.return_hidden_states_before_norm and not limits.gives_norm_inputs:
        raise RequestError(
            "this request wants hidden states before the last norm, and of this model only those after it can be"
            " returned yet; leave return_hidden_states_before_norm out, or start with --model-impl native if sglcore"
            " has the model",
            field="return_hidden_states_before_norm",
        )


def add_hidden_modes(batch: ScheduleBatch, requests: Sequence[Request], ends: Sequence[int]) -> None:
    """Add the rows of a new batch that return hidden states. `requests` has the request of each
    row; `ends`: the tokens after each of the last `len(ends)` rows, the prompt chunks.

    A decode row returns the state of its token. A chunk returns its last one if it samples
    ("last"), or all of them, unless the request has them from before it was preempted ("all").
    """
    if all(request.params.return_hidden_states is None for request in requests):
        return
    decodes = len(requests) - len(ends)
    modes = np.zeros(len(requests), dtype=np.int32)
    for row, request in enumerate(requests):
        wanted = request.params.return_hidden_states
        if wanted is None:
            continue
        if row < decodes or wanted == "last":
            modes[row] = CaptureHiddenMode.LAST if batch.emits[row] else CaptureHiddenMode.NONE
        elif ends[row - decodes] > request.num_hidden:
            modes[row] = CaptureHiddenMode.FULL
        if request.params.return_hidden_states_before_norm:
            modes[row] = -modes[row]
    if modes.any():
        batch.hidden_modes = modes
        put_hidden_mode(batch)


def put_hidden_mode(batch: ScheduleBatch) -> None:
    """Set the one-shot values that say what the next forward of the batch returns. A batch that is
    submitted again needs them again."""
    if batch.hidden_modes is not None:
        batch.capture_hidden_mode.put(CaptureHiddenMode(int(np.abs(batch.hidden_modes).max())))
        if batch.hidden_modes.min() < 0:
            batch.return_hidden_states_before_norm.put(True)


def take_hidden_states(request: Request, states: Floats, start: int) -> None:
    """Keep the states float32[n, H] of a step's row; its first token is number `start` of the
    request. For "all", those that the request had before it was preempted are left out, and those
    after its last emitted token too: its draft tokens go beyond its end.
    """
    if request.params.return_hidden_states == "last":
        # Of a chunk there is only the last one; of a verification, one for each sampled token.
        request.hidden_states = [states[: max(request.num_tokens - 1 - start, 1)].copy()]
        return
    first = max(request.num_hidden - start, 0)
    states = states[first : max(request.num_tokens - 1, len(request.prompt_ids)) - start]
    if len(states):
        request.hidden_states.append(states.copy())
        request.num_hidden += len(states)


def hand_over(request: Request, output: EngineOutput) -> None:
    """Move the states that the request keeps to an output with its new tokens; an output without
    tokens gets none."""
    kept = request.hidden_states
    if kept and output.token_ids:
        output.hidden_size = kept[0].shape[1]
        output.hidden_states = b"".join(np.ascontiguousarray(each, dtype="<f4").tobytes() for each in kept)
        request.hidden_states = []
