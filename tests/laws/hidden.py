"""Requests that want hidden states, on an engine of the laws, and transformers' own states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sglcore.engine.output_processor import HiddenParts
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request
from sglcore.schedule.step_loop import Loop

TOLERANCE = 2e-4
NORMS = ("norm", "norm_f", "embedding_norm", "final_layernorm", "ln_f")
"""Names of the last norm in transformers' models."""
States = NDArray[np.float32]


class Driven(Protocol):
    """An engine or a session of a test: a scheduler and its loop."""

    scheduler: Any
    loop: Loop


def last_norm(oracle: Any) -> Any:
    """Return the last norm of a model of transformers."""
    return next(module for name, module in oracle.base_model.named_children() if name in NORMS)


def their_states(oracle: Any, ids: list[int], before: bool = False) -> States:
    """Return float32 [tokens, hidden]: transformers' last hidden states, after the last norm or
    `before` it."""
    taken: list[torch.Tensor] = []
    hook = last_norm(oracle).register_forward_pre_hook(lambda _, given: taken.append(given[0].clone()))
    with torch.no_grad():
        after = oracle(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    hook.remove()
    return (taken[0].reshape(after.shape) if before else after).float().numpy()


def make_requests(prompts: Sequence[list[int]], count: int, **params: Any) -> list[Request]:
    """Return greedy requests for `count` tokens each; `params`: further sampling parameters."""
    made = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": count, **params})
    return [Request(f"h{place}-{id(made)}", np.array(ids, np.int32), made) for place, ids in enumerate(prompts)]


def run_for_states(engine: Driven, requests: Sequence[Request], stagger: int = 0) -> list[States | None]:
    """Run requests to their end, adding one every `stagger` steps (0: all at once); return the
    hidden states of each, as a caller gets them."""
    parts = {request.rid: HiddenParts(request.params.return_hidden_states) for request in requests}
    waiting, step = list(requests), 0
    while waiting or engine.loop.has_work:
        while waiting and (not stagger or step % stagger == 0):
            engine.scheduler.add(waiting.pop(0))
            if stagger:
                break
        for output in engine.loop.step() if engine.loop.has_work else ():
            parts[output.request_id].take(output, len(output.token_ids), output.finished)
        step += 1
    engine.scheduler.audit()
    for request in requests:
        assert request.finish_reason == "length", request.error
    return [parts[request.rid].whole() for request in requests]


def check_states(
    requests: Sequence[Request], found: Sequence[States | None], oracle: Any, tolerance: float = TOLERANCE
) -> None:
    """Every request has exactly the states that it wants, and they are transformers' for its text,
    within the tolerance, relative to the largest one of the text."""
    for request, states in zip(requests, found, strict=True):
        params, ids = request.params, request.prompt_ids.tolist() + request.output_ids
        if params.return_hidden_states is None:
            assert states is None
            continue
        wanted = their_states(oracle, ids[:-1], params.return_hidden_states_before_norm)
        wanted = wanted[-1:] if params.return_hidden_states == "last" else wanted
        assert states is not None and states.shape == wanted.shape, (request.rid, states)
        scale = max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(states / scale, wanted / scale, atol=tolerance, rtol=0)
