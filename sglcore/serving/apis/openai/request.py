"""Converts request bodies of completions and chats to prompts, sampling parameters and chat
requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglcore.config.server_config import ServerConfig
from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.checks import check_limit
from sglcore.serving.apis.openai.body import ChatBody, CompletionBody, Message, TemplateFields, as_prompts
from sglcore.serving.apis.request_params import alternatives, check_streamed, generation_params
from sglcore.serving.chat.run import ChatRequest
from sglcore.serving.replicas.server_errors import InvalidRequest

DEFAULT_MAX_TOKENS = 16
"""The API's default number of tokens for a completion."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Prompts, each a text or token ids, and the sampling parameters of their continuations, which
    all prompts share. `form`: the name of the body's field that constrains the text by a grammar;
    empty: none."""

    prompts: Sequence[str | Sequence[int]]
    params: SamplingParams
    form: str


def completion_request(body: CompletionBody, config: ServerConfig) -> CompletionRequest:
    """Return the prompts and parameters of a body; the checkpoint's defaults are not applied.
    `config`: the server's limits. A `max_tokens` of 0 becomes 1: the writer leaves that token out
    of the answer. Raises InvalidRequest and SamplingError."""
    _check(body)
    check_streamed(body)
    prompts = as_prompts(body.prompt)
    check_limit("prompt", len(prompts), config.max_prompts, "prompts")
    check_limit(
        "n", len(prompts) * (body.n or 1), max(config.max_prompts, config.max_n), "samples of all prompts together"
    )
    check_limit("logprobs", body.logprobs, config.max_logprobs)
    given = body.max_tokens if body.max_tokens is not None else DEFAULT_MAX_TOKENS
    if body.echo and body.logprobs is not None:
        body = body.model_copy(update={"prompt_logprobs": max(body.logprobs, body.prompt_logprobs or 0)})
    params, form = generation_params(body, config, max_tokens=max(given, 1), logprobs=body.logprobs)
    return CompletionRequest(prompts, params, form)


def chat_request(body: ChatBody, config: ServerConfig, request_id: str) -> ChatRequest:
    """Return the chat request of a body; the checkpoint's sampling defaults are not applied.
    `config`: the server's limits; `request_id`: the id under which the engine runs it, which is the
    id of the answer. Raises InvalidRequest and SamplingError."""
    check_streamed(body)
    shown = alternatives(body.logprobs, body.top_logprobs, config)
    params, form = generation_params(body, config, max_tokens=_max_tokens(body), logprobs=shown)
    return replace(
        template_request(body, body.messages),
        params=params,
        tool_choice=_choice_of(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        progress=bool(body.return_progress and body.stream),
        chat_template_kwargs=_template_values(body),
        request_id=request_id,
        form=form,
        thinking_token_budget=body.thinking_token_budget,
    )


def template_request(body: TemplateFields, messages: Sequence[Message]) -> ChatRequest:
    """Return a chat request of these messages and the body's template fields, with default sampling
    parameters: enough to render its prompt. Nothing is rendered or checked yet."""
    adds = body.add_generation_prompt
    return ChatRequest(
        messages=[message.plain() for message in messages],
        params=SamplingParams(),
        tools=[tool.plain() for tool in body.tools] if body.tools else None,
        add_generation_prompt=not body.continue_final_message if adds is None else adds,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _max_tokens(body: ChatBody) -> int | None:
    given = body.given("max_completion_tokens", "max_tokens")
    if len(set(given.values())) > 1:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ", wanted="one of them", param="max_completion_tokens"
        )
    return next(iter(given.values()), None)


def _choice_of(body: ChatBody) -> Any:
    """Return the tool choice, a word or an object as in OpenAI's API; by default "auto" with tools
    and "none" without."""
    if body.tool_choice is None:
        return "auto" if body.tools else "none"
    return body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump()


def _template_values(body: ChatBody) -> dict[str, Any] | None:
    values = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        values.setdefault("reasoning_effort", body.reasoning_effort)
    return values or None


def _check(body: CompletionBody) -> None:
    """Raise InvalidRequest, with the field's name, for a `suffix`, for a `best_of` other than `n`,
    and for `max_tokens` 0 without `echo`."""
    if body.suffix:
        raise InvalidRequest(
            "suffix: this server does not fill in between two texts", remedy="leave suffix out", param="suffix"
        )
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest(
            f"best_of is {body.best_of} and n is {body.n or 1}",
            wanted="the same number: every sample is returned",
            remedy="leave best_of out",
            param="best_of",
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens is 0 without echo", wanted="at least 1", param="max_tokens")
