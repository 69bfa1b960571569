"""The transformers runner: `generate` with its own cache, attention by torch's SDPA."""

from __future__ import annotations

import time
from typing import Any

import torch
from runner import Generates, Job, NotOffered, Prompt, Reading, serve
from transformers import AutoModelForCausalLM
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList


class Stamps(StoppingCriteria):
    """Records the times of tokens; never stops generation."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # pyright: ignore
        self.moments.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Transformers(Generates):
    """A causal model in its checkpoint's dtype."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            job.model, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()

    def generate(self, prompts: list[Prompt], new: int) -> list[list[int]]:
        made = self._generate(prompts, new, Stamps())
        return [ids[len(prompt) :] for ids, prompt in zip(made, prompts, strict=True)]

    def decode(self, prompts: list[Prompt], new: int) -> Reading:
        stamps = Stamps()
        self._generate(prompts, new, stamps)
        first, *others = stamps.moments
        return Reading(len(others) * len(prompts), others[-1] - first)

    def shared(self, prompts: list[Prompt], prefix: int, new: int) -> Reading:
        raise NotOffered("generate shares no prefix between requests")

    def _generate(self, prompts: list[Prompt], new: int, stamps: Stamps) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            found = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([stamps]),
            )
        return found.tolist()


if __name__ == "__main__":
    serve(Transformers)
