"""Tests of the Metal kernels in the engine: built for the CPU, they serve whole requests with the
same results as the gathering backend."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from devices.mlx.tests.metal_on_host import RUNS_HERE, Host
from devices.mlx.tests.running import running
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.make_loop import make_scheduler
from sglcore.schedule.request import Request
from sglcore.schedule.step_loop import Loop
from sglcore_mlx.attention.paged import MetalAttention
from sglcore_mlx.speculative.stepper import SpeculativeStepper
from sglcore_mlx.stepper import Stepper

COIN = {30: 2.0**30, 31: 2.0**30}
"""Draws one of two tokens, so that draft tokens are sometimes right."""


def run(host: Host | None, tokens: int | None = None) -> list[Request]:
    """Run three prompts, one of them in chunks, to six tokens each. With `tokens`, use speculation
    with this number of draft tokens and run to twenty tokens."""
    proposing: dict[str, Any] = {} if tokens is None else {"speculative": "ngram", "draft_tokens": tokens}
    with running(dtype="float32", graph="off", page_size=8, max_batch_tokens=24, **proposing) as built:
        worker = built["worker"]
        if host is not None:
            model, sizes = built["model"], built["sizes"]
            attention = MetalAttention(model.layers, sizes.page_size, launcher=host.launch)
            kind = Stepper if tokens is None else partial(SpeculativeStepper, tokens=tokens)
            make = partial(kind, model, attention, built["pools"], sizes, compiles=False)
            worker._stepper = built["stream_thread"].call(make)
        scheduler = make_scheduler(worker.limits)
        rng, requests = np.random.default_rng(2), []
        for number, length in enumerate((5, 40, 17)):
            drawn: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
            if tokens is not None:
                drawn = {"temperature": 1.0, "max_tokens": 20, "logit_bias": COIN}
            params = SamplingParams(**drawn, ignore_eos=True, logprobs=3)
            requests.append(Request(f"r{number}", rng.integers(5, 2000, length).astype(np.int32), params, seed=0))
            scheduler.add(requests[-1])
        loop = Loop(scheduler, worker)
        while loop.has_work:
            loop.step()
        return requests


@RUNS_HERE
def test_requests_served_by_the_kernels_text_are_those_of_the_gather_path(tmp_path: Path) -> None:
    check(run(Host(tmp_path)), run(None))


@RUNS_HERE
def test_tokens_verified_by_the_kernels_text_are_those_of_the_gather_path(tmp_path: Path) -> None:
    check(run(Host(tmp_path), 3), run(None, 3))


def check(some: list[Request], others: list[Request]) -> None:
    for found, wanted in zip(some, others, strict=True):
        assert found.output_ids == wanted.output_ids
        for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
            np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, atol=1e-4)
