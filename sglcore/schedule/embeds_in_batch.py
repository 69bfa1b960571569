"""Prompts as embeddings in requests and batches: what a worker accepts, and the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglcore.schedule.prompt_embeds import PromptEmbeds
from sglcore.schedule.request import Request
from sglcore.schedule.request_errors import RequestError
from sglcore.worker.model_worker import Limits
from sglcore.worker.schedule_batch import ScheduleBatch

Ints = NDArray[np.int32]


def check_embeds(request: Request, embeds: PromptEmbeds, limits: Limits) -> None:
    """Raise RequestError for embeddings that a worker with these limits does not accept: of another
    size per token, with three-axis positions that it does not take or that are out of range, or
    without token ids that the request needs."""
    if embeds.rows.shape[1] != limits.embed_size:
        wanted = f"{limits.embed_size} numbers per token" if limits.embed_size else "text or token ids"
        raise RequestError(
            f"the embeddings of this request have {embeds.rows.shape[1]} numbers per token; give {wanted}"
        )
    if embeds.positions is not None and not limits.takes_mrope:
        whose = (
            "draft tokens are verified with one axis; start with --speculative off, or"
            if limits.draft_tokens
            else "this model has one axis;"
        )
        raise RequestError(f"this request has three-axis positions, and {whose} leave the positions out")
    if embeds.axes.min() < 0 or embeds.delta > 0:
        found = f"{embeds.axes.min()}..{embeds.axes.max()}"
        raise RequestError(f"the positions of this request are {found}, wanted 0..{len(embeds.rows) - 1}")
    if embeds.token_ids is None and (request.params.needs_history or request.scores_prompt or limits.reads_history):
        what = (
            "is for a model that reads earlier token ids"
            if limits.reads_history
            else "has penalties or prompt_logprobs"
        )
        raise RequestError(f"this request {what}; give the token_ids with its embeddings")


def add_embeds(batch: ScheduleBatch, requests: Sequence[Request]) -> None:
    """Add to the batch the embeddings of its prompt tokens (`embed_rows`, `prompt_embeds`), and
    three-axis positions of all its tokens if a request has its own (`mrope_positions`). `requests`
    has the request of each row.
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
