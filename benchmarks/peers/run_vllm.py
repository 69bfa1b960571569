"""The vLLM runner (CPU build): steps the engine of its `LLM`, in one process and on every core."""

from __future__ import annotations

import os
import sys
from itertools import count

from geometry import CACHE_BYTES
from runner import Generates, Job, Prompt, Reading, serve, steady

CORES = sorted(os.sched_getaffinity(0))
GIB = 1 << 30


class Vllm(Generates):
    """vLLM's defaults leave one core idle and run the scheduler in its own process; both would cost
    speed here and are changed."""

    def __init__(self, job: Job) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, CORES[: job.threads]))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(-(-job.cache_tokens * CACHE_BYTES // GIB))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["VLLM_CACHE_ROOT"] = os.path.join(sys.prefix, "cache")
        from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

        self.params = SamplingParams
        self.engine = LLM(
            model=job.model, dtype="bfloat16", max_model_len=2304, max_num_seqs=32, enable_prefix_caching=True, seed=0
        ).llm_engine
        self.names = count()
        self.tokens: dict[str, list[int]] = {}

    def generate(self, prompts: list[Prompt], new: int) -> list[list[int]]:
        self._add(prompts, new)
        self._finish()
        return list(self.tokens.values())

    def decode(self, prompts: list[Prompt], new: int) -> Reading:
        self._add(prompts, new)
        reading = steady(self._step, lambda: [len(ids) for ids in self.tokens.values()], new)
        self._finish()
        return reading

    def _add(self, prompts: list[Prompt], new: int) -> None:
        params = self.params(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        names = [f"request-{next(self.names)}" for _ in prompts]
        self.tokens = {name: [] for name in names}
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def _step(self) -> None:
        for output in self.engine.step():
            self.tokens[output.request_id] = list(output.outputs[0].token_ids)  # pyright: ignore

    def _finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self._step()


if __name__ == "__main__":
    serve(Vllm)
