"""The results of one step, in arrays of the worker's library and as host arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglcore.sampling.state import Logprobs, SampledTokens
from sglcore.step.emitting_rows import RowPlan
from sglcore.step.hidden_rows import HiddenRows, accepted_states
from sglcore.step.hisparse_config import StepSwaps
from sglcore.step.verification_rows import accepted_runs
from sglcore.worker.model_worker import BatchResult, TokenLogprobs

A = TypeVar("A")


@dataclass(slots=True)
class StepOutput(Generic[A]):
    """Results of one step in arrays of the worker's library, which the device may not have computed
    yet.
    """

    rows: RowPlan
    """The rows of the batch that sample."""
    path: str
    """What ran, for example "eager"."""
    tokens: SampledTokens[A] | None = None
    """Sampled tokens. None: the step samples none."""
    prompt: Mapping[int, Logprobs[A]] = field(default_factory=dict)
    """Prompt log-probabilities, by row."""
    embeddings: A | None = None
    """float32[B, H]: vectors or scores of an embedding step. None: any other step."""
    runs: tuple[A, A] | None = None
    """For a verification step: the number of accepted and of verified draft tokens of each of B
    requests, int32[B] each. None: no speculation."""
    drafts: A | None = None
    """int32[B, k]: the next draft tokens. None: the host does not read them."""
    hidden: tuple[HiddenRows, A] | None = None
    """The requested hidden states float32[N, H], and their rows. None: none are requested."""
    swaps: StepSwaps[A] | None = None
    """Swap counts of KV entries in host memory. None: there are no such entries."""

    def arrays(self) -> list[A]:
        """Return all arrays that the host reads, in the order that `read` expects."""
        if self.tokens is None:
            return [] if self.embeddings is None else [self.embeddings]
        found = [self.tokens.token_ids, self.tokens.bad_rows]
        for part in (self.tokens.logprobs, *self.prompt.values()):
            if part is not None:
                found += [part.chosen, part.ranks, part.top_ids, part.top]
        found = found if self.runs is None else [*self.runs, *found]
        found = found if self.swaps is None or self.swaps.missed is None else [self.swaps.missed, *found]
        found = found if self.hidden is None else [self.hidden[1], *found]
        return found if self.drafts is None else [self.drafts, *found]

    def read(self, step: int, arrays: Sequence[NDArray]) -> BatchResult:
        """Return the result of step number `step`, from the host copies of `arrays()`."""
        left = iter(arrays)
        drafts = None if self.drafts is None else next(left)
        hidden = {} if self.hidden is None else self.hidden[0].split(next(left))
        missed = None if self.swaps is None or self.swaps.missed is None else next(left)
        runs = None if self.runs is None else (next(left), next(left))
        result = self._read_rows(step, list(left))
        if runs is not None:
            result = accepted_runs(result, *runs)
            hidden = accepted_states(hidden, result.token_offsets)
        if hidden:
            result = replace(result, hidden_states=hidden)
        if self.swaps is not None:
            result = replace(result, swaps=self.swaps.counts(missed))
        return result if drafts is None else replace(result, drafts=drafts)

    def _read_rows(self, step: int, arrays: Sequence[NDArray]) -> BatchResult:
        offsets = self.rows.token_offsets
        if self.tokens is None:
            (embeddings,) = arrays
            bad = np.logical_not(np.isfinite(embeddings).all(axis=1))
            none = np.zeros(0, dtype=np.int32)
            return BatchResult(step, offsets, none, bad, embeddings=embeddings, path=self.path)
        token_ids, bad, *others = arrays
        bad = self.rows.scatter_bad(bad)
        if not others:
            return BatchResult(step, offsets, token_ids, bad, path=self.path)
        parts = iter([TokenLogprobs(*others[first : first + 4]) for first in range(0, len(others), 4)])
        logprobs = None if self.tokens.logprobs is None else next(parts)
        prompt = dict(zip(self.prompt, parts, strict=True))
        return BatchResult(step, offsets, token_ids, bad, logprobs, prompt, path=self.path)
