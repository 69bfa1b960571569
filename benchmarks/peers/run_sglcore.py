"""sglcore in the comparison, by its offline API."""

from __future__ import annotations

import time
from typing import Any

from geometry import CACHE_BYTES
from runner import Job, Prompt, Reading, serve, steady

from sglcore import LLM, SamplingParams
from sglcore.engine.outputs import RequestOutput


class Sglcore:
    """The engine of `LLM`, stepped by hand."""

    def __init__(self, job: Job) -> None:
        quantized: dict[str, Any] = {} if job.format == "bf16" else {"quantize": job.format}
        self.llm = LLM(
            model=job.model,
            device="cpu",
            max_model_len=job.cache_tokens,
            max_requests=32,
            kv_cache_memory=(job.cache_tokens + 1024) * CACHE_BYTES,
            **quantized,
        )
        print(self.llm.ledger)

    def complete(self, prompt: Prompt, new: int) -> list[int]:
        return list(self._run([prompt], new)[0].outputs[0].token_ids)

    def decode(self, prompts: list[Prompt], new: int) -> Reading:
        outputs = self._add(prompts, new)
        reading = steady(self.llm.engine.step, lambda: [len(each.outputs[0].token_ids) for each in outputs], new)
        self._finish()
        return reading

    def prefill(self, prompt: Prompt) -> Reading:
        begin = time.perf_counter()
        self._run([prompt], 1)
        return Reading(len(prompt), time.perf_counter() - begin)

    def shared(self, prompts: list[Prompt], prefix: int, new: int) -> Reading:
        begin = time.perf_counter()
        outputs = self._run(prompts, new)
        return Reading(sum(len(each.outputs[0].token_ids) for each in outputs), time.perf_counter() - begin)

    def _add(self, prompts: list[Prompt], new: int) -> list[RequestOutput]:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        return [self.llm.engine.add(prompt, params) for prompt in prompts]

    def _run(self, prompts: list[Prompt], new: int) -> list[RequestOutput]:
        outputs = self._add(prompts, new)
        self._finish()
        return outputs

    def _finish(self) -> None:
        while self.llm.engine.has_work:
            self.llm.engine.step()


if __name__ == "__main__":
    serve(Sglcore)
