"""A scheduler on the checking worker, with short ways to add requests and to run."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglcore.schedule.cache.in_batch_prefix import Awaited
from sglcore.schedule.make_loop import make_scheduler
from sglcore.schedule.request import Request
from sglcore.schedule.request_output import EngineOutput
from sglcore.schedule.step_loop import Loop
from tests.schedule.fake_speculation import make_worker
from tests.schedule.fake_worker import compose, make_limits, make_params


class Drive:
    """`drive.add(...)`, `drive.step()`, `drive.run()`; every step is audited."""

    def __init__(self, *, prefix_cache: bool = True, overlap: bool = True, **limits: object) -> None:
        self.limits = make_limits(**limits)
        self.worker = make_worker(self.limits)
        self.scheduler = make_scheduler(self.limits, prefix_cache=prefix_cache, compose=compose)
        self.loop = Loop(self.scheduler, self.worker, overlap=overlap)
        self.outputs: list[EngineOutput] = []

    def make(self, rid: str, prompt: int | list[int], max_tokens: int | None = 8, **given: Any) -> Request:
        """Make a request without adding it. An integer prompt gives that number of tokens,
        different for each request."""
        first = 1 + sum(map(ord, rid)) % 7
        ids = (
            [(first + index) % self.limits.vocab_size for index in range(prompt)] if isinstance(prompt, int) else prompt
        )
        wanted = {
            name: given.pop(name)
            for name in ("logprobs", "prompt_logprobs", "needs_history", "priority")
            if name in given
        }
        return Request(rid, np.array(ids, dtype=np.int32), make_params(max_tokens, **wanted), **given)

    def add(self, rid: str, prompt: int | list[int], max_tokens: int | None = 8, **given: Any) -> Request:
        """Make a request and add it."""
        request = self.make(rid, prompt, max_tokens, **given)
        self.scheduler.add(request)
        return request

    def step(self, count: int = 1) -> list[EngineOutput]:
        """Run `count` steps of the loop; return the outputs of the last one."""
        outputs: list[EngineOutput] = []
        for _ in range(count):
            outputs = self.loop.step()
            self.outputs += outputs
            self.scheduler.audit()
        return outputs

    def run(self, most: int = 500) -> int:
        """Step until all work is done; return the number of steps."""
        for count in range(most):
            if not self.loop.has_work:
                return count
            self.step()
        raise AssertionError(f"still working after {most} steps: {self.scheduler.stats()}")

    def awaited(self, request: Request) -> Awaited | None:
        """What the waiting request waits for, or None."""
        return self.scheduler.running._in_batch_prefixes.awaited(request)

    def alone(self, request: Request) -> list[int]:
        """The request's output when it runs alone."""
        return self.worker.truth.output(request, self.limits.max_model_len)[0]

    def finishes(self) -> list[str]:
        """Names of the requests that finished by themselves, in order."""
        return [output.request_id for output in self.outputs if output.finished]

    def stop_after(self, request: Request, count: int) -> Request:
        """Make the request's token number `count` (from 1) its stop token; call before adding."""
        output = self.worker.truth.tokens(request, len(request.prompt_ids) + count)
        request.stop_ids = frozenset(output[-1:])
        return request
