"""A request as the scheduler sees it. Its state, never a length, says how a row continues."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sglcore.sampling.params import SamplingParams
from sglcore.schedule.cache.request_pages import Held
from sglcore.schedule.prompt_embeds import PromptEmbeds
from sglcore.schedule.request_errors import RequestError
from sglcore.schedule.request_output import EngineOutput, FinishReason, TokenLogprob, token_logprobs
from sglcore.schedule.run_state import RunState
from sglcore.worker.model_worker import TokenLogprobs

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
MAX_TOKEN = 2**31 - 1


class State(IntEnum):
    """The state of a request. EXTENDING (prefill) and DECODING are the running states. Another
    engine writes the pages of an ARRIVING request.
    """

    WAITING = 0
    EXTENDING = 1
    DECODING = 2
    FINISHED = 3
    ARRIVING = 4


class Matcher(Protocol):
    """The progress of one request through its grammar. It raises nothing: a failure is
    in `error`.
    """

    @property
    def error(self) -> str:
        """Why the matcher failed ("": it did not)."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance by an emitted token or a draft token that is no stop token. Returns False if the
        grammar does not allow it.
        """
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens, and any failure after them."""
        ...

    def fill(self, words: Ints) -> None:
        """Write the allowed next tokens into all bits of `words` int32[ceil(V / 32)]: lowest bit
        first, 1 = allowed; stop tokens are allowed where the output may end. After an `error` no
        token is allowed.
        """
        ...


class LogitChange(Protocol):
    """Additions to the logits of a request's next token, applied with its mask."""

    def change(self) -> tuple[Ints, Floats]:
        """Return distinct token ids int32[N] and the value to add to the logit of each,
        float32[N].
        """
        ...


@dataclass(slots=True, eq=False)
class Request:
    """One generation or embedding, from its arrival to its end.

    The engine makes it and adds it to the scheduler. The fields before `output_ids` are its inputs,
    those from `output_ids` to `num_hidden` its results, those from `state` to `is_lent` its state.
    `held` and `run` are records of the memory and of the scheduler.
    """

    rid: str
    """Name, unique among the requests of an engine."""
    prompt_ids: Ints
    """int32[P]: the tokens of the prompt."""
    params: SamplingParams
    """The sampling parameters."""
    seed: int = 0
    """The resolved 64-bit seed."""
    sample_index: int = 0
    """Index of this sample among the samples of `request_id`."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the request ("stop") when sampled."""
    task: Literal["generate", "embed"] = "generate"
    """"generate" returns text, "embed" returns a vector or scores."""
    token_types: Ints | None = None
    """int32[P] (optional): the segment of each token of a text to embed. None: segment 0."""
    embeds: PromptEmbeds | None = None
    """Embeddings in place of the prompt's tokens. The request's pages are then never shared. None:
    plain tokens."""
    leader: Request | None = None
    """A sibling with the same prompt. This request waits until the sibling's prompt is published.
    None: there is no such sibling."""
    matcher: Matcher | None = None
    """The progress in the request's grammar. It has accepted all of `output_ids` except a stop
    token. It is dropped when the request ends. None: no grammar."""
    change: LogitChange | None = None
    """The matcher, if it also adds to logits. None: it does not."""
    drafts: list[int] = field(default_factory=list)
    """The worker's draft tokens after `output_ids`, for a request with a matcher."""
    request_id: str = ""
    """Name of the request that this is a sample of. If empty, it is set to `rid`."""

    output_ids: list[int] = field(default_factory=list)
    """The sampled tokens, a stop token included."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry with N = 1 for each sampled token, if requested."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Entries that together cover prompt tokens 1..P-1, if requested."""
    hidden_states: list[NDArray[np.float32]] = field(default_factory=list)
    """float32[n, hidden] each: the hidden states that no output has brought yet, if requested."""
    embedding: NDArray[np.float32] | None = None
    """float32[hidden]: the result of "embed". None: no result yet, or the task is "generate"."""
    finish_reason: FinishReason | None = None
    """Why the request ended. None: it has not ended."""
    stop_cause: int | str | None = None
    """Id of the stop token, or the stop string that was found. None: another reason."""
    error: str = ""
    """Why the request failed; empty: it did not fail."""
    cached_tokens: int = -1
    """Number of prompt tokens that the prefix cache had at the first run. -1: not run yet."""
    cached_share: int = 0
    """`cached_tokens` as a share of the prompt, in quarters, rounded up."""
    scored_tokens: int = 0
    """Number of prompt tokens that `prompt_logprobs` covers."""
    num_hidden: int = 0
    """Number of the request's first tokens with hidden states that were collected, for "all"."""

    state: State = State.WAITING
    """State of the request."""
    arrival: int = -1
    """Number in the order of arrival. -1: not yet added to the scheduler."""
    is_remote: bool = False
    """Another engine prefills the prompt."""
    is_lent: bool = False
    """Another engine may read or write the pages. They stay allocated until that engine releases
    them, even after the request has ended."""
    held: Held = field(default_factory=Held, init=False)
    """What the memory holds for the request: pages, window pages, snapshots."""
    run: RunState = field(default_factory=RunState, init=False)
    """Its request slot, limits and last step while it runs."""

    def __post_init__(self) -> None:
        self.request_id = self.request_id or self.rid
        ids = np.asarray(self.prompt_ids)
        if ids.size and ids.dtype.kind not in "iu":
            raise RequestError(f"the prompt of {self.rid!r} holds {ids.dtype}; give integer token ids")
        if ids.size and ids.dtype != np.int32 and not 0 <= ids.min() <= ids.max() <= MAX_TOKEN:
            raise RequestError(
                f"the prompt of {self.rid!r} has token ids {ids.min()}..{ids.max()}, wanted at least 0 and below the"
                " vocabulary size; encode the prompt with this model's tokenizer"
            )
        self.prompt_ids = np.ascontiguousarray(ids, dtype=np.int32)

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: the prompt and the emitted tokens."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt log-probabilities are still missing."""
        return self.params.prompt_logprobs is not None and self.scored_tokens < len(self.prompt_ids) - 1

    @property
    def needs_prefill(self) -> bool:
        """Whether results of the prompt's tokens are still missing, log-probabilities or hidden
        states, so that cached pages cannot replace the prefill.
        """
        is_captured = self.params.return_hidden_states == "all" and self.num_hidden < len(self.prompt_ids)
        return is_captured or self.scores_prompt

    def begin_with(self, cells: int) -> None:
        """Record that the request first runs with `cells` prompt tokens from the prefix cache."""
        self.cached_tokens, self.cached_share = cells, -(-4 * cells // len(self.prompt_ids))

    def tokens(self, start: int, end: int) -> Ints:
        """Return the known tokens start..end-1, int32, perhaps as a view; fewer if not all are
        known.
        """
        prompt = len(self.prompt_ids)
        if end <= prompt:
            return self.prompt_ids[start:end]
        outputs = np.array(self.output_ids[max(start - prompt, 0) : end - prompt], dtype=np.int32)
        return np.concatenate([self.prompt_ids[start:], outputs]) if start < prompt else outputs

    def output(self, token_ids: list[int]) -> EngineOutput:
        """Return the output for the newly emitted `token_ids`, which must already be the last of
        `output_ids`. The request's first output also has the results of the prompt.
        """
        output = EngineOutput(self.request_id, self.sample_index, token_ids)
        if len(self.output_ids) == len(token_ids):
            output.cached_tokens = self.cached_tokens
            if self.params.prompt_logprobs is not None and not self.scores_prompt:
                output.prompt_logprobs = self._prompt_records(self.params.prompt_logprobs)
        return output

    def _prompt_records(self, wanted: int) -> list[TokenLogprob]:
        records: list[TokenLogprob] = []
        for found in self.prompt_logprobs:
            first = len(records) + 1
            ids = self.prompt_ids[first : first + len(found.chosen)].tolist()
            records += token_logprobs(ids, found, wanted)
        return records
