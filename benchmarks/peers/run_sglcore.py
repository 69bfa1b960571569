"""sglcore in the comparison, by its offline API."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from geometry import CACHE_BYTES, INT8_CACHE_BYTES
from runner import Generates, Job, Prompt, Reading, serve, steady

from sglcore import LLM, SamplingParams
from sglcore.engine.outputs import RequestOutput
from sglcore_cpu.touch import NAME as CELLS_THREAD

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"bf16": {}, "int8": {"quantize": "int8"}, "int4": {"quantize": "int4"}, "kv8": {"kv_cache_dtype": "int8"}}
)
"""What a format asks of `LLM`."""


class Sglcore(Generates):
    """The engine of `LLM`, stepped by hand."""

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
        """As `Engine` says. The first ends the start; a server that has started gives its cells memory while it waits."""
        if self._is_started:
            wait_for_cells()
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


def wait_for_cells() -> None:
    """Until all cells have memory, which they get while cores are idle."""
    for thread in threading.enumerate():
        if thread.name == CELLS_THREAD:
            thread.join()


if __name__ == "__main__":
    serve(Sglcore)
