"""A request as the scheduler sees it. Its state, never a length, says how a row continues."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sglcore.device.errors import SglcoreError
from sglcore.device.worker import TokenLogprobs
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.output import EngineOutput, FinishReason, TokenLogprob, token_logprobs
from sglcore.schedule.prefix_cache import Node

if TYPE_CHECKING:
    from sglcore.schedule.prefix_proposals import Standing
    from sglcore.schedule.prompt_embeds import PromptEmbeds

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
MAX_TOKEN = 2**31 - 1


class RequestError(SglcoreError, ValueError):
    """A request that can never run here."""


class ContextError(RequestError):
    """A prompt that is longer than the context."""


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


@dataclass(frozen=True, slots=True)
class Awaited:
    """A running request that prefills the first `pages` pages of another request's prompt."""

    request: Request
    pages: int


@dataclass(slots=True, eq=False)
class Request:
    """One generation or embedding, from its arrival to its end.

    The engine makes it and adds it to the scheduler. The first fields are the order, those from
    `output_ids` on the results, and all after `cached_tokens` belong to the scheduler and its
    memory.
    """

    rid: str
    """Its own name, unique among the requests of an engine."""
    prompt_ids: Ints
    """int32[P]: the tokens of the prompt."""
    params: SamplingParams
    """The sampling parameters."""
    seed: int = 0
    """The resolved 64-bit seed."""
    sample_index: int = 0
    """Which sample of `request_id` it is."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the request ("stop") when sampled."""
    task: Literal["generate", "embed"] = "generate"
    """Either "generate", which makes text, or "embed", which makes a vector or scores."""
    token_types: Ints | None = None
    """int32[P] (optional): the segment of each token of a text to embed. None: all are of segment
    0."""
    embeds: PromptEmbeds | None = None
    """Embeddings in place of the prompt's tokens. Its pages are then its own and never shared.
    None: plain tokens."""
    leader: Request | None = None
    """A sibling with the same prompt. This request waits until the sibling's prompt is published.
    None: it waits for no sibling."""
    matcher: Matcher | None = None
    """The state of its grammar, which has accepted all of `output_ids` but a stop token. It is
    dropped when the request ends. None: no grammar."""
    change: LogitChange | None = None
    """The matcher again, where it adds to logits too. None: it does not."""
    drafts: list[int] = field(default_factory=list)
    """The worker's draft tokens after `output_ids`, of a request with a matcher."""
    request_id: str = ""
    """The name of the request of which it is one sample. Empty when made: `rid`."""

    output_ids: list[int] = field(default_factory=list)
    """The sampled tokens, a stop token included."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry of N = 1 for each sampled token, if requested."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Entries that together cover prompt tokens 1..P-1, if requested."""
    embedding: NDArray[np.float32] | None = None
    """float32[hidden]: the result of an "embed" request. None: no result yet, or a "generate"
    request."""
    finish_reason: FinishReason | None = None
    """Why it ended. None: it has not ended."""
    stop_cause: int | str | None = None
    """The id of the stop token, or the stop string that was found. None: it ended for another
    reason."""
    error: str = ""
    """Why it failed; empty: it did not."""
    cached_tokens: int = -1
    """Prompt tokens that the prefix cache had when the request first ran. -1: it has not run
    yet."""

    cached_share: int = 0
    """The share of `cached_tokens` in the prompt, in quarters, rounded up."""
    state: State = State.WAITING
    """Where the request is in its life."""
    arrival: int = -1
    """Its number in the order of arrival. -1: the scheduler does not have it yet."""
    slot: int = 0
    """Its request slot in the device tables. 0: it does not run."""
    num_cells: int = 0
    """KV slots that are written once all submitted steps ran. Of a decode row the scheduler's
    `DecodeRows` has it."""
    target: int = 0
    """Tokens known when it was admitted. It prefills up to here and then samples."""
    final_seq_len: int = 0
    """The `num_cells` with which it samples its last possible token."""
    most_cells: int = 0
    """The most KV slots that it may ever have: `final_seq_len`, and those of a draft tree after
    it."""
    last_step: int = -1
    """The last step that has a row of it. -1: none since it was admitted."""
    pages: list[int] = field(default_factory=list)
    """Its KV pages, in the order of its tokens."""
    sent_pages: int = 0
    """Entries of `pages` that the device has."""
    shared: int = 0
    """Leading entries of `pages` that belong to the prefix cache, found there or published."""
    node: Node | None = None
    """The prefix cache's node of the last of these; the root where there is none. None: it was
    never admitted."""
    leaving: bool = False
    """It gives up its slot and pages at the collect of the last step that has a row of it."""
    prompt_published: bool = False
    """All full pages of its prompt are in the prefix cache."""
    scored_tokens: int = 0
    """Prompt tokens for which `prompt_logprobs` has an entry."""
    is_duplicate: bool = False
    """Another running request has published a page that this one computed too."""
    is_broken: bool = False
    """A step with a row of it failed. Its KV slots may hold anything, however it ended."""
    awaited: Awaited | None = None
    """The running request that computes a prefix for it. None: it waits for none."""
    compared: int = 0
    """The version of the running prompts with which it was compared last."""
    restored: int = 0
    """The state checkpoint with which its state begins. 0: zeros."""
    cuts: set[int] = field(default_factory=set)
    """Lengths in tokens at which it is to leave a state checkpoint for others."""
    snapshots: dict[int, int] = field(default_factory=dict)
    """Its state checkpoints: length in tokens to the checkpoint's number."""
    spare: int = 0
    """The length of the checkpoint that is renewed while it runs. 0: it has none."""
    is_remote: bool = False
    """Another engine computes its prompt."""
    is_lent: bool = False
    """Another engine may read or write its pages. They stay until that engine lets go, even after
    the request ended."""
    window_first: int = 0
    """The index of its first page that `window_pages` has."""
    window_pages: list[int] = field(default_factory=list)
    """Its list of sliding-window pages, from page `window_first` on."""
    sent_window_first: int = 0
    """The `window_first` of the list that the device has."""
    window_ends: set[int] = field(default_factory=set)
    """Numbers of leading pages after which other requests are to continue."""
    kept_windows: dict[int, int] = field(default_factory=dict)
    """Sliding-window pages that left the list and are still to be published: index of the page to
    its number."""
    standing: Standing | None = None
    """Where its text is in the prefix cache, which makes draft tokens from it. None: not looked up
    yet."""

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
        """Whether prompt log-probabilities are still missing, so that cached pages cannot replace
        the prefill.
        """
        return self.params.prompt_logprobs is not None and self.scored_tokens < len(self.prompt_ids) - 1

    def begin_with(self, cells: int) -> None:
        """Record that the request first runs with `cells` prompt tokens from the prefix cache."""
        self.cached_tokens, self.cached_share = cells, -(-4 * cells // len(self.prompt_ids))

    def tokens(self, start: int, end: int) -> Ints:
        """Return the known tokens start..end-1, int32."""
        prompt = len(self.prompt_ids)
        if end <= prompt:
            return self.prompt_ids[start:end]
        outputs = np.array(self.output_ids[max(start - prompt, 0) : end - prompt], dtype=np.int32)
        return np.concatenate([self.prompt_ids[start:], outputs]) if start < prompt else outputs

    def output(self, token_ids: list[int]) -> EngineOutput:
        """Return the output for the newly emitted `token_ids`. The first one also carries the
        results of the prompt.
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
