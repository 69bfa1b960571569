"""A started device on one of the kit's models, driven by the engine's own scheduler: tokens in,
tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglcore.conformance.recording_worker import RecordingWorker
from sglcore.conformance.session import Drive, Result, Session, open_session
from sglcore.conformance.target import Geometry, StartedDevice
from sglcore.device.facts import Facts
from sglcore.runtime.memory.pools import TokenToKVPool
from sglcore.worker.model_worker import Limits


class Harness:
    """A started device on one of the kit's models, with a `RecordingWorker` (`recorder`) around its
    worker. Sessions run prompts on it, one at a time. `geometry`: head size, page size and dtype of
    this start."""

    def __init__(
        self,
        model: str,
        started: StartedDevice,
        geometry: Geometry,
        facts: Facts,
        pool: TokenToKVPool | None,
        cell_device: str,
    ) -> None:
        """`pool`: the device's keys and values, None if the kit has no access to them;
        `cell_device`: the device of the tensors that the pool reads into and writes from."""
        self._pool = pool
        self.cell_device = cell_device
        self.model = model
        self.started = started
        self.geometry = geometry
        self.facts = facts
        self.recorder = RecordingWorker(started.worker)

    @property
    def limits(self) -> Limits:
        """Limits of the worker, not narrowed by any session."""
        return self.recorder.limits

    @property
    def pool(self) -> TokenToKVPool:
        """The keys and values of a device with the capability "cells"; raises AssertionError for
        another."""
        assert self._pool is not None
        return self._pool

    def settle(self) -> None:
        """Wait for the device if it has streams, so that writes of the kit itself come before any
        work on the runtime's streams."""
        if self.facts.has_streams:
            torch.accelerator.synchronize()

    def session(self, **how: Any) -> Session:
        """Return a session with a fresh scheduler on this worker. `how`: fields of `Drive`."""
        return open_session(self.recorder, Drive(**how))

    def run(
        self,
        prompts: Sequence[list[int]],
        lengths: int | Sequence[int],
        *,
        score_prompts: bool = False,
        sampling: Any = None,
        **how: Any,
    ) -> list[Result]:
        """Run prompts under a scheduler of their own and return their results. Waits. `lengths`
        and `score_prompts` as for `Session.begin`; `sampling`: further keywords of it;
        `how`: fields of `Drive`.
        """
        return self.session(**how).run(prompts, lengths, score_prompts=score_prompts, **(sampling or {}))

    def close(self) -> None:
        """Close the worker, which frees the device's memory."""
        self.recorder.close()
