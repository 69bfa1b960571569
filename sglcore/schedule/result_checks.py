"""Checks of what enters the scheduler (requests, results), and selection of each request's
log-probabilities.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglcore.core.errors import ConfigError
from sglcore.schedule.cache.shared_pages import least_pages, least_window_pages
from sglcore.schedule.embeds_in_batch import check_embeds
from sglcore.schedule.request import Request
from sglcore.schedule.request_errors import ContextError, RequestError
from sglcore.schedule.returned_states import check_hidden_states
from sglcore.schedule.steps_in_flight import BatchRecord
from sglcore.worker.model_worker import BatchResult, Limits, TokenLogprobs


def check_limits(limits: Limits) -> None:
    """Raise ConfigError if one request of full length does not fit, if there are too few window
    pages for one request and a step's tokens, or if options exclude each other."""
    if limits.generates and limits.capacity < limits.max_model_len:
        raise ConfigError(
            f"the KV pool holds {limits.capacity} tokens and the context is {limits.max_model_len}",
            wanted="room for one request of full length",
            remedy="lower max_model_len or raise kv_cache_memory",
        )
    if limits.sliced_layers and limits.draft_tokens:
        raise ConfigError(
            "a worker drafts tokens and takes prompts in slices", wanted="one of the two", remedy="--prompt-slices off"
        )
    if limits.window_unit and limits.num_pages < (least := least_pages(limits)):
        raise ConfigError(
            f"the KV pool that all layers share holds {limits.num_pages} pages; a context of {limits.max_model_len}"
            f" tokens, with windows of {limits.window} and a step of {limits.max_batch_tokens}, needs {least}",
            wanted="room for one request of full length",
            remedy="lower max_model_len or max_batch_tokens, raise kv_cache_memory, or kv_memory=split",
        )
    if limits.num_window_pages and limits.num_window_pages < (least := least_window_pages(limits)):
        raise ConfigError(
            f"the KV pool of sliding-window layers holds {limits.num_window_pages} pages; a window of {limits.window}"
            f" tokens and a step of {limits.max_batch_tokens} need {least}",
            wanted="room for the window of one request, and for a step's tokens",
            remedy="lower max_batch_tokens or raise kv_cache_memory",
        )


def longest_prompt(limits: Limits, *, embeds: bool = False) -> int:
    """Return the maximum number of prompt tokens. Generation needs room for one output token; with
    `embeds`, a prompt to embed runs in one step.
    """
    return min(limits.max_model_len, limits.max_batch_tokens) if embeds else limits.max_model_len - 1


def check_request(request: Request, limits: Limits) -> None:
    """Raise RequestError if the request can never run on a worker with these limits; ContextError
    if its prompt is too long."""
    length = len(request.prompt_ids)
    if request.prompt_ids.ndim != 1 or length == 0:
        raise RequestError("the prompt of this request is empty; give at least one token")
    if request.task == "embed":
        _check_embedding(request, limits)
    elif not limits.generates:
        raise RequestError("this request wants to generate, but this model only embeds; request an embedding")
    elif length > longest_prompt(limits):
        raise ContextError(
            f"the prompt of this request has {length} tokens and the context holds {limits.max_model_len}, one of"
            f" them for the output; shorten the prompt by {length - limits.max_model_len + 1} or raise "
            "max_model_len, if the checkpoint allows it"
        )
    check_hidden_states(request, limits)
    if request.embeds is not None:
        check_embeds(request, request.embeds, limits)
    if request.matcher is not None and not limits.takes_masks:
        raise RequestError(
            "this request has a grammar, and this device's sampler takes no masks; leave the grammar out or run it"
            " on a device with a sampler that does"
        )
    if request.change is not None and not limits.takes_changes:
        raise RequestError(
            "this request has DRY, and this device's sampler takes no additions to logits; leave dry_multiplier out or"
            " run it on a device with a sampler that does"
        )
    low, high = int(request.prompt_ids.min()), int(request.prompt_ids.max())
    if low < 0 or high >= limits.vocab_size:
        found = low if low < 0 else high
        raise RequestError(
            f"the prompt of this request has token id {found}, wanted 0..{limits.vocab_size - 1};"
            " encode the prompt with this model's tokenizer"
        )


def _check_embedding(request: Request, limits: Limits) -> None:
    most = longest_prompt(limits, embeds=True)
    length = len(request.prompt_ids)
    if length > most:
        name = "max_model_len" if most == limits.max_model_len else "max_batch_tokens"
        raise ContextError(
            f"the prompt of this request has {length} tokens and an embedding runs in one step of at most {most};"
            f" shorten the prompt by {length - most} or raise {name}"
        )


def check_result(record: BatchRecord, result: BatchResult, draft_tokens: int = 0) -> None:
    """Raise ValueError if the result does not fit the step.

    The result must have this step's number and one token for each emitting row, or 1 to
    `draft_tokens` + 1 after a verification; embeddings if the step embeds; the hidden states that
    rows request; and no rows before the last slice of a prompt.
    """
    rows, tokens = (0, 0) if record.is_partial else (len(record.requests), len(record.slots))
    if result.proposed is not None:
        counts = result.token_offsets[1:] - result.token_offsets[:-1]
        tokens = int(result.token_offsets[-1])
        if counts.min(initial=1) < 1 or counts.max(initial=1) > draft_tokens + 1:
            raise ValueError(
                f"rows of step {record.step} emitted {counts} tokens; wanted 1 to {draft_tokens + 1} of each"
            )
    found = (result.step, len(result.token_offsets) - 1, len(result.token_ids), len(result.bad_rows))
    wanted = (record.step, rows, tokens, rows)
    if found != wanted:
        raise ValueError(f"the worker's result has (step, rows, tokens, bad rows) {found}; wanted {wanted}")
    modes = None if record.batch is None else record.batch.hidden_modes
    if modes is not None and not record.is_partial:
        missing = set(np.flatnonzero(modes).tolist()) - set(result.hidden_states)
        if missing:
            raise ValueError(f"the worker's result of step {record.step} lacks the hidden states of rows {missing}")
    if result.embeddings is None and record.requests[0].task == "embed":
        raise ValueError(f"the worker's result of step {record.step} has no embeddings; wanted float32[{rows}, hidden]")


def cut_logprobs(logprobs: TokenLogprobs, start: int, end: int, alternatives: int) -> TokenLogprobs:
    """Return copies of tokens start..end-1 with their first `alternatives` alternatives, so that
    the arrays of the step can be freed.
    """
    return TokenLogprobs(
        logprobs.chosen[start:end].copy(),
        logprobs.ranks[start:end].copy(),
        logprobs.top_ids[start:end, :alternatives].copy(),
        logprobs.top_logprobs[start:end, :alternatives].copy(),
    )


def take_prompt_logprobs(request: Request, logprobs: TokenLogprobs | None, start: int, end: int) -> None:
    """Append to `request.prompt_logprobs` what a chunk over tokens start..end-1 has for tokens
    start+1..end of the prompt, with the requested number of alternatives. Does nothing if the
    request wants none, or has not got those up to token `start`.
    """
    wanted = request.params.prompt_logprobs
    count = min(end, len(request.prompt_ids) - 1) - start
    if wanted is None or logprobs is None or count <= 0 or request.scored_tokens != start:
        return
    request.prompt_logprobs.append(cut_logprobs(logprobs, 0, count, wanted))
    request.scored_tokens += count


def take_drafts(requests: list[Request], drafts: NDArray[np.int32]) -> None:
    """Set `Request.drafts` of the requests with a grammar to their next draft tokens, from `drafts`
    int32[B, k]: k ids, -1 from the end of the draft on.
    """
    for request, own in zip(requests, drafts, strict=True):
        if request.matcher is not None:
            request.drafts = own.tolist()


def up_to_end(request: Request, tokens: list[int]) -> tuple[list[int], int | None]:
    """Return the emitted `tokens` up to the stop token, included, or before the first token that
    the grammar forbids; and that forbidden token, or None. Advances the request's matcher over the
    returned tokens.
    """
    if request.matcher is None and request.stop_ids.isdisjoint(tokens):
        return tokens, None
    kept: list[int] = []
    for token in tokens:
        if request.matcher is not None and not follows(request, token):
            return kept, token
        kept.append(token)
        if token in request.stop_ids:
            break
    return kept, None


def follows(request: Request, token: int) -> bool:
    """Return whether a token may follow, and advance the request's matcher if so. For a request
    with a matcher, or for a stop token. A stop token is always valid and does not advance the
    matcher: the mask allows it only where the output may end, or the request named it as a stop
    token.
    """
    return token in request.stop_ids or (request.matcher is not None and request.matcher.accept(token))


def why_bad(request: Request, step: int) -> str:
    """Return the error text for a row in `BatchResult.bad_rows`: the request's grammar failed, or
    the logits were not finite.
    """
    if request.matcher is not None and request.matcher.error:
        return f"the grammar cannot go on: {request.matcher.error}"
    return f"the logits of step {step} were not finite; check the weights and the dtype"


def has_no_way(request: Request) -> bool:
    """Return whether the request's grammar has failed (`matcher.error`), for example because no
    token may follow. The error is then the caller's, not the engine's.
    """
    return request.matcher is not None and bool(request.matcher.error)


def why_refused(request: Request, token: int) -> str:
    """Return the error text for a sampled token that the request's grammar forbids."""
    assert request.matcher is not None
    return f"token {token} does not follow the grammar: {request.matcher.error or 'the device did not apply the mask'}"
