"""Requests that want hidden states, on an engine of the laws, and transformers' own states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglcore.conformance.session import Session
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request

TOLERANCE = 2e-4
NORMS = ("norm", "norm_f", "embedding_norm", "final_layernorm", "ln_f")
"""Names of the last norm in transformers' models."""
States = NDArray[np.float32]


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


def run_for_states(engine: Session, requests: Sequence[Request], stagger: int = 0) -> list[States | None]:
    """Run requests to their end, adding one every `stagger` steps (0: all at once); return the
    hidden states of each, as a caller gets them."""
    engine.submit(requests, stagger)
    engine.finish()
    results = engine.end()
    assert [result.finish for result in results] == ["length"] * len(results)
    return [result.states for result in results]


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
