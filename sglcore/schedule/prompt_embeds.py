"""Prompts as embeddings, which replace the rows of the model's embedding table for their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglcore.device.worker import Limits
from sglcore.schedule.request import Request, RequestError

if TYPE_CHECKING:
    from sglcore.device.batch import ScheduleBatch

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeds:
    """A prompt of P tokens as embeddings [P, H]: `inputs_embeds` of transformers.

    `token_ids` [P], if known, are used by penalties, prompt log-probabilities and n-grams.
    `positions` [3, P] are the time, height and width positions of a model with three-axis rotary
    embeddings (None: indices in the prompt). Tokens after the prompt continue after the largest
    position.
    """

    embeds: ArrayLike
    token_ids: Sequence[int] | None = None
    positions: ArrayLike | None = None

    def __post_init__(self) -> None:
        """Convert the arrays. Raises RequestError for a wrong shape or type."""
        try:
            embeds = np.ascontiguousarray(self.embeds, np.float32)
            positions = None if self.positions is None else np.ascontiguousarray(self.positions, np.int32)
        except (TypeError, ValueError) as error:
            raise RequestError(f"prompt embeddings can not be read: {error}; give numbers [tokens, hidden]") from None
        object.__setattr__(self, "embeds", embeds)
        object.__setattr__(self, "positions", positions)
        if embeds.ndim != 2 or not len(embeds):
            raise RequestError(f"prompt embeddings have the shape {embeds.shape}; give [tokens, hidden]")
        for name, found, wanted in (
            ("token_ids", None if self.token_ids is None else (len(self.token_ids),), (len(embeds),)),
            ("positions", None if positions is None else positions.shape, (3, len(embeds))),
        ):
            if found not in (None, wanted):
                raise RequestError(
                    f"{name} of a prompt of {len(embeds)} embeddings have the shape {found}; give {wanted}"
                )

    @property
    def ids(self) -> Sequence[int]:
        """The token ids, or zeros if unknown."""
        return self.token_ids if self.token_ids is not None else [0] * len(self.rows)

    @property
    def rows(self) -> NDArray[np.float32]:
        """The embeddings, float32 [P, H]."""
        return np.asarray(self.embeds, np.float32)

    @property
    def axes(self) -> Ints:
        """The positions, int32 [3, P]."""
        plain = np.broadcast_to(np.arange(len(self.rows), dtype=np.int32), (3, len(self.rows)))
        return plain if self.positions is None else np.asarray(self.positions, np.int32)

    @property
    def delta(self) -> int:
        """Offset from the index of a token after the prompt to its position."""
        return int(self.axes.max()) + 1 - len(self.rows)


def check_embeds(request: Request, embeds: PromptEmbeds, limits: Limits) -> None:
    """Raise RequestError for embeddings that a worker with these limits does not accept."""
    if embeds.rows.shape[1] != limits.embed_size:
        wanted = f"{limits.embed_size} numbers a token" if limits.embed_size else "text or token ids"
        raise RequestError(f"the embeddings of this request have {embeds.rows.shape[1]} numbers a token; give {wanted}")
    if embeds.positions is not None and not limits.takes_mrope:
        whose = (
            "proposals are verified by one; start with --speculative off, or"
            if limits.draft_tokens
            else "this model has one;"
        )
        raise RequestError(f"this request has positions by three axes, and {whose} leave the positions out")
    if embeds.axes.min() < 0 or embeds.delta > 0:
        found = f"{embeds.axes.min()}..{embeds.axes.max()}"
        raise RequestError(f"the positions of this request are {found}, wanted 0..{len(embeds.rows) - 1}")
    if embeds.token_ids is None and (request.params.needs_history or request.scores_prompt or limits.reads_history):
        what = (
            "is for a model that reads earlier ids" if limits.reads_history else "asks for penalties or prompt_logprobs"
        )
        raise RequestError(f"this request {what}; give the token_ids beside its embeddings")


def add_embeds(batch: ScheduleBatch, requests: Sequence[Request]) -> None:
    """Add to the batch the embeddings of its prompt tokens, and three-axis positions if a request
    has its own. `requests` are those of its rows.
    """
    given = [(row, request.embeds) for row, request in enumerate(requests) if request.embeds is not None]
    if not given:
        return
    places: list[Ints] = []
    parts: list[NDArray[np.float32]] = []
    axes = np.repeat(batch.prefix_lens - batch.token_offsets[:-1], np.diff(batch.token_offsets))
    axes = np.tile(axes + np.arange(batch.num_tokens, dtype=np.int32), (3, 1))
    for row, embeds in given:
        first, last = batch.token_offsets[row : row + 2].tolist()
        start = int(batch.prefix_lens[row])
        count = max(0, min(last - first, len(embeds.rows) - start))
        places.append(np.arange(first, first + count, dtype=np.int32))
        parts.append(embeds.rows[start : start + count])
        axes[:, first : first + count] = embeds.axes[:, start : start + count]
        axes[:, first + count : last] += embeds.delta
    if sum(map(len, places)):
        batch.embed_rows, batch.prompt_embeds = np.concatenate(places), np.concatenate(parts)
    if any(embeds.positions is not None for _, embeds in given):
        batch.mrope_positions = axes
