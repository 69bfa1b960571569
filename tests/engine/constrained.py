"""The embedded model with its scheduler, for text generation under grammars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from sglcore.config.engine_config import resolve_config
from sglcore.engine.start import start
from sglcore.engine.structured_output.grammar_cache import Grammars, open_backend
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.tokenizers.text_codec import TextCodec, eos_token_ids
from sglcore.sampling.grammar_spec import Grammar, Thinking
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.make_loop import make_scheduler
from sglcore.schedule.request import Request
from sglcore.schedule.step_loop import Loop


@dataclass(frozen=True, slots=True)
class Sample:
    """A request; without a grammar its text is free."""

    grammar: Grammar | None = None
    seed: int = 0
    max_tokens: int = 120
    thinking: Thinking | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a request."""

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish: str
    error: str


class Constrained:
    """A started device, also as a context manager. Each `run` uses a new scheduler; `steps` is the
    number of steps it took."""

    def __init__(self, **settings: Any) -> None:
        started = start(resolve_config({"threads": 1, "max_requests": 64, "kv_cache_memory": 96 << 20, **settings}, {}))
        self.worker, self.limits = started.worker, started.worker.limits
        self.codec = TextCodec(started.model_path)
        self.eos_ids = frozenset(eos_token_ids(started.model_path))
        vocabulary = Vocabulary(self.codec.tokenizer, self.limits.vocab_size, tuple(self.eos_ids))
        self.grammars = Grammars(open_backend("llguidance", vocabulary))
        self.steps = 0
        self._composition = 0

    def run(
        self, samples: Sequence[Sample], prompt: str = "Once upon a time", *, overlap: bool = True, **sampling: Any
    ) -> list[Answer]:
        """Run all samples together and return their answers; the temperature is 1 unless given."""
        ids = np.array(self.codec.encode(prompt))
        requests: list[Request] = []
        for sample in samples:
            values = {
                "temperature": 1.0,
                "max_tokens": sample.max_tokens,
                "grammar": sample.grammar,
                "thinking": sample.thinking,
            }
            params = SamplingParams(**{**values, **sampling})
            requests.append(Request(f"r{len(requests)}", ids, params, seed=sample.seed, stop_ids=self.eos_ids))
        scheduler = make_scheduler(self.limits)
        scheduler._builder._composition = self._composition
        loop = Loop(scheduler, self.worker, overlap=overlap)
        for request, sample in zip(requests, samples, strict=True):
            if sample.grammar is not None or sample.thinking is not None:
                request.matcher = self.grammars.compile(sample.grammar, sample.thinking).start()
            scheduler.add(request)
        while loop.has_work:
            loop.step()
        scheduler.audit()
        self._composition, self.steps = scheduler._builder._composition, scheduler.stats().steps
        return [self._answer(request) for request in requests]

    def close(self) -> None:
        """Close the worker."""
        self.worker.close()

    def __enter__(self) -> Constrained:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, request: Request) -> Answer:
        ids = [token for token in request.output_ids if token not in self.eos_ids]
        text = self.codec.decode(ids, skip_special_tokens=False)
        logprobs = [float(found.chosen[0]) for found in request.logprobs]
        return Answer(text, list(request.output_ids), logprobs, request.finish_reason or "", request.error)
