"""An engine over a random checkpoint, with token ids as input and output, and checks of its
log-probabilities."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglcore.config.engine_config import EngineConfig, resolve_config
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.conformance.oracle import check_results
from sglcore.conformance.recording_worker import RecordingWorker
from sglcore.conformance.session import Result, Session, scramble
from sglcore.engine.start import start
from sglcore.runtime.overlap.slices import Slices, SliceSteps
from sglcore.runtime.tp_worker import TpModelWorker
from sglcore.schedule.make_loop import make_loop
from tests.checkpoints import oracle_logprobs

__all__ = [
    "BUCKETS",
    "SMALL",
    "TOKEN_BUCKETS",
    "TOLERANCE",
    "Result",
    "TokenEngine",
    "TransformersOracle",
    "check_logprobs",
    "configured",
    "environ",
    "on_this_device",
    "random_prompts",
    "running_slices",
]

TOLERANCE = 2e-4
BUCKETS = (2, 6)
"""Batch sizes of decode graphs: batches of one, three, four and five rows are padded."""

TOKEN_BUCKETS = (48,)
"""Token counts of prefill graphs; the one of 48 takes batches of 24 tokens and more. A test with
shorter prompts sets its own."""

SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "dtype": "float32",
        "threads": 1,
        "max_requests": 6,
        "page_size": 4,
        "kv_cache_memory": 8 << 20,
        "max_batch_tokens": 128,
    }
)
"""Settings of a small engine."""


def environ() -> dict[str, str]:
    """Return the variables that a test's engine may read: only the place of the lane's machine
    files."""
    return {name: os.environ[name] for name in ("SGLCORE_SYSTEM_ROOT",) if name in os.environ}


def on_this_device() -> dict[str, str]:
    """Return engine settings for the lane's device; except on cpu, they choose functions that a
    simulated device runs fast."""
    device = os.environ["LANE_DEVICE"]
    return {"device": device} | ({} if device == "cpu" else {"attention_backend": "gathered", "kernels": "reference"})


def configured(folder: Path, **settings: Any) -> EngineConfig:
    """Return a small configuration in float32 on the lane's device."""
    device = os.environ["LANE_DEVICE"]
    return resolve_config({**SMALL, "device": device, **settings, "model": str(folder)}, environ())


class TokenEngine(Session):
    """Scheduler and worker over a checkpoint in float32, without text."""

    def __init__(self, folder: Path, *, scramble_pages: int | None = None, **settings: Any) -> None:
        graphs = {"graph_buckets": BUCKETS, "graph_token_buckets": TOKEN_BUCKETS}
        config = configured(folder, **{**graphs, **on_this_device(), **settings})
        worker = start(config).worker
        assert isinstance(worker, TpModelWorker)
        self.worker = worker
        recorder = RecordingWorker(worker)
        made: Any = make_loop(recorder, overlap=config.overlap is not False, prefix_cache=config.prefix_cache)
        super().__init__(recorder, *made)
        if scramble_pages is not None:
            scramble(self.scheduler, scramble_pages)

    @property
    def paths(self) -> set[str]:
        """The paths of the steps so far."""
        return self.recorder.paths

    def begin(
        self, prompts: Sequence[list[int]], lengths: int | Sequence[int], *, score_prompts: bool = False, **how: Any
    ) -> None:
        """Submit prompts, as `Session.begin` does, without alternatives: those of some models
        differ by more than the tolerance."""
        scored = 0 if score_prompts else None
        super().begin(prompts, lengths, **{"logprobs": 0, "prompt_logprobs": scored, **how})

    def end(self) -> list[Result]:
        """Return the results, as `Session.end` does; every request had its full length."""
        results = super().end()
        assert [result.finish for result in results] == ["length"] * len(results)
        return results


class TransformersOracle:
    """A causal model of transformers as an oracle of the kit."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def logprobs(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return log-probabilities float32 [len(ids), vocab]; row i is of the token after
        ids[i]."""
        return oracle_logprobs(self.model, list(ids)).numpy()


def check_logprobs(results: Sequence[Result], oracle: Any, tolerance: float = TOLERANCE) -> None:
    """Every log-probability equals transformers' for the same text, within the tolerance, and every
    greedy token is one of transformers' best."""
    check_results(results, TransformersOracle(oracle), tolerance)


def running_slices(engine: TokenEngine) -> Slices:
    """Return the object that runs an engine's prefill slices."""
    (steps,) = engine.worker.kinds
    assert isinstance(steps, SliceSteps)
    return steps.slices
