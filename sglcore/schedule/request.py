"""A request as the scheduler has it. Its state, never a length, says how a row goes on."""

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
    """A prompt that the context does not hold."""


class State(IntEnum):
    """Where a request is. EXTENDING and DECODING are the running states; an ARRIVING one has pages that another engine writes."""

    WAITING = 0
    EXTENDING = 1
    DECODING = 2
    FINISHED = 3
    ARRIVING = 4


class Matcher(Protocol):
    """One request's way through its grammar. It raises nothing: what goes wrong is in `error`."""

    @property
    def error(self) -> str:
        """Why it gave up ("": it did not)."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on by a token that was emitted, or proposed, and is no stop token; False if the grammar does not allow it."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens that were accepted, and whatever went wrong after them."""
        ...

    def fill(self, words: Ints) -> None:
        """Write the tokens that may follow, all bits of words int32[ceil(V / 32)]: lowest bit first, 1 = allowed, stop
        tokens where the output may end. None is allowed once there is an `error`."""
        ...


class LogitChange(Protocol):
    """What is added to logits of a request's next token, beside a mask."""

    def change(self) -> tuple[Ints, Floats]:
        """Token ids int32[N], each once, and what is added to the logit of each, float32[N]."""
        ...


@dataclass(frozen=True, slots=True)
class Awaited:
    """A running request that computes the first `pages` pages of another's prompt."""

    request: Request
    pages: int


@dataclass(slots=True, eq=False)
class Request:
    """One generation or embedding.

    `rid` is its own name, `request_id` that of the request whose sample `sample_index` it is (none given: `rid`). `seed` is
    the resolved 64-bit seed. A sampled token in `stop_ids` ends the request ("stop"). `leader`: a sibling with the same
    prompt, whose published prompt this one waits for. `token_types` int32[P] are the segments of a text to embed that has
    several. `embeds` stand in place of the prompt's tokens; its pages are then its own, and shared with nobody.
    Results: `output_ids` (a stop token included); `logprobs`, one entry of N = 1 per emitted token; `prompt_logprobs`,
    entries that together cover prompt tokens 1..P-1. `stop_cause` is the stop token's id or the stop string found.
    `matcher`: has accepted all of `output_ids` but a stop token, and is dropped when the request ends.
    `change`: the matcher again, where it adds to logits too.
    `drafts`: what the worker proposes after `output_ids`, of a request with a matcher.
    `cached_tokens`: prompt tokens that the prefix cache had when the request first ran (-1: not yet).
    Everything below `cached_tokens` belongs to the scheduler. `cached_share`: quarters of the prompt, begun ones too, that
    these are. `is_broken`: a step that named it failed, so its cells may hold anything, however it ended. `is_duplicate`:
    another running request has published a page that it computed too.
    `restored`: the snapshot with which its state begins. `cuts`: the lengths after which it is to leave a snapshot for
    others. `snapshots`: by length, the places with copies of its state; that of length `spare` is renewed while it runs.
    `is_remote`: another engine computes its prompt. `is_lent`: another engine may read or write its pages, which it outlives.
    `window_pages`: its list of them, of the pages from `window_first` on; the device has it from `sent_window_first` on.
    `window_ends`: numbers of pages after which others are to go on; `kept_windows`: window pages that this takes, by page,
    which have left the list and are not published yet. `standing`: where its text is in the prefix cache, if proposals come from there.
    """

    rid: str
    prompt_ids: Ints
    params: SamplingParams
    seed: int = 0
    sample_index: int = 0
    stop_ids: frozenset[int] = frozenset()
    task: Literal["generate", "embed"] = "generate"
    token_types: Ints | None = None
    embeds: PromptEmbeds | None = None
    leader: Request | None = None
    matcher: Matcher | None = None
    change: LogitChange | None = None
    drafts: list[int] = field(default_factory=list)
    request_id: str = ""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    embedding: NDArray[np.float32] | None = None
    finish_reason: FinishReason | None = None
    stop_cause: int | str | None = None
    error: str = ""
    cached_tokens: int = -1

    cached_share: int = 0
    state: State = State.WAITING
    arrival: int = -1
    slot: int = 0
    num_cells: int = 0
    target: int = 0
    final_seq_len: int = 0
    most_cells: int = 0
    last_step: int = -1
    pages: list[int] = field(default_factory=list)
    sent_pages: int = 0
    shared: int = 0
    node: Node | None = None
    leaving: bool = False
    prompt_published: bool = False
    scored_tokens: int = 0
    is_duplicate: bool = False
    is_broken: bool = False
    awaited: Awaited | None = None
    compared: int = 0
    restored: int = 0
    cuts: set[int] = field(default_factory=set)
    snapshots: dict[int, int] = field(default_factory=dict)
    spare: int = 0
    is_remote: bool = False
    is_lent: bool = False
    window_first: int = 0
    window_pages: list[int] = field(default_factory=list)
    sent_window_first: int = 0
    window_ends: set[int] = field(default_factory=set)
    kept_windows: dict[int, int] = field(default_factory=dict)
    standing: Standing | None = None

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
        """Tokens known: the prompt and what was emitted."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def scores_prompt(self) -> bool:
        """Prompt log-probabilities are still owed, so cached cells can not stand in for the prompt."""
        return self.params.prompt_logprobs is not None and self.scored_tokens < len(self.prompt_ids) - 1

    def begin_with(self, cells: int) -> None:
        """It first runs with so many cells of its prompt from the prefix cache."""
        self.cached_tokens, self.cached_share = cells, -(-4 * cells // len(self.prompt_ids))

    def tokens(self, start: int, end: int) -> Ints:
        """Known tokens start..end-1, int32."""
        prompt = len(self.prompt_ids)
        if end <= prompt:
            return self.prompt_ids[start:end]
        outputs = np.array(self.output_ids[max(start - prompt, 0) : end - prompt], dtype=np.int32)
        return np.concatenate([self.prompt_ids[start:], outputs]) if start < prompt else outputs

    def output(self, token_ids: list[int]) -> EngineOutput:
        """What to tell of tokens that it emitted last; with the first ones, what is known of its prompt."""
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
