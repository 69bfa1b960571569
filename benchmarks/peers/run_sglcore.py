"""The sglcore runner, by its offline API."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from geometry import CACHE_BYTES, INT8_CACHE_BYTES
from runner import Generates, Job, Prompt, Reading, serve, steady

from sglcore import LLM, SamplingParams
from sglcore.engine.outputs import RequestOutput

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"bf16": {}, "int8": {"quantize": "int8"}, "int4": {"quantize": "int4"}, "kv8": {"kv_cache_dtype": "int8"}}
)
"""Settings of `LLM` by format."""
PAGE_BYTES = 4096


class Sglcore(Generates):
    """Steps the engine of `LLM`."""

    def __init__(self, job: Job) -> None:
        cell_bytes = INT8_CACHE_BYTES if job.format == "kv8" else CACHE_BYTES
        self.llm = LLM(
            model=job.model,
            device="cpu",
            max_model_len=job.cache_tokens,
            max_requests=32,
            kv_cache_memory=(job.cache_tokens + 1024) * cell_bytes,
            **SETTINGS[job.format],
        )
        print(self.llm.ledger)
        self._is_started = False

    def complete(self, prompt: Prompt, new: int) -> list[int]:
        """As `Engine` says. The first call ends the start-up. Later ones first write to the KV
        cache, so that measurements are those of a server that has run for a while."""
        if self._is_started:
            write_cells(self.llm)
        self._is_started = True
        return super().complete(prompt, new)

    def generate(self, prompts: list[Prompt], new: int) -> list[list[int]]:
        outputs = self._add(prompts, new)
        self._finish()
        return [list(each.outputs[0].token_ids) for each in outputs]

    def decode(self, prompts: list[Prompt], new: int) -> Reading:
        outputs = self._add(prompts, new)
        reading = steady(self.llm.engine.step, lambda: [len(each.outputs[0].token_ids) for each in outputs], new)
        self._finish()
        return reading

    def _add(self, prompts: list[Prompt], new: int) -> list[RequestOutput]:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        return [self.llm.engine.add(prompt, params) for prompt in prompts]

    def _finish(self) -> None:
        while self.llm.engine.has_work:
            self.llm.engine.step()


def write_cells(llm: LLM) -> None:
    """Write to every memory page of the KV cache, as vLLM does during start-up: the first write to
    a memory page waits for the system, on a virtual machine maybe longer than a prefill."""
    worker: Any = llm.engine.worker
    pool = worker.runner.attn_backend.token_to_kv_pool
    for layer in range(pool.num_layers):
        for cells in pool.kv(layer):
            cells.view(torch.uint8).flatten()[::PAGE_BYTES].bitwise_or_(0)


if __name__ == "__main__":
    serve(Sglcore)
