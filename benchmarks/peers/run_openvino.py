"""The OpenVINO GenAI runner: steps its continuous batching pipeline, with the scheduler settings of
`LLMPipeline`."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import openvino as ov  # pyright: ignore[reportMissingImports]
import openvino_genai as genai  # pyright: ignore[reportMissingImports]
from runner import Generates, Job, Prompt, Reading, serve, steady


class OpenVino(Generates):
    """The engine chooses the precision of products and KV cache, and the cache's size."""

    def __init__(self, job: Job) -> None:
        plan = genai.SchedulerConfig()
        plan.max_num_batched_tokens = 1 << 20
        plan.max_num_seqs = 32
        plan.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": job.threads}
        self.pipeline = genai.ContinuousBatchingPipeline(job.model, plan, "CPU", properties)
        self.names = count()
        self.handles: list[Any] = []
        self.tokens: list[list[int]] = []

    def generate(self, prompts: list[Prompt], new: int) -> list[list[int]]:
        self._add(prompts, new)
        self._finish()
        return self.tokens

    def decode(self, prompts: list[Prompt], new: int) -> Reading:
        self._add(prompts, new)
        reading = steady(self._step, lambda: [len(ids) for ids in self.tokens], new)
        self._finish()
        return reading

    def _add(self, prompts: list[Prompt], new: int) -> None:
        wanted = genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        tensors = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        self.handles = [self.pipeline.add_request(next(self.names), tensor, wanted) for tensor in tensors]
        self.tokens = [[] for _ in prompts]

    def _step(self) -> None:
        self.pipeline.step()
        for handle, tokens in zip(self.handles, self.tokens, strict=True):
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids

    def _finish(self) -> None:
        while self.pipeline.has_non_finished_requests():
            self._step()


if __name__ == "__main__":
    serve(OpenVino)
