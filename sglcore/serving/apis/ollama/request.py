"""Converts request bodies of Ollama's protocol to chat requests and prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from sglcore.sampling.grammar_spec import Grammar
from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.checks import own_names, refuse_fields
from sglcore.serving.apis.fill_in_middle import filled
from sglcore.serving.apis.ollama.body import (
    AnswerFields,
    OllamaCall,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
    OllamaTool,
)
from sglcore.serving.apis.request_params import (
    SWITCHES,
    SamplingFields,
    alternatives,
    completed,
    format_grammar,
    sampling_params,
)
from sglcore.serving.chat.run import ChatRequest
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.server_errors import InvalidRequest

_NO_IMAGES = "this server reads only text"
_ABSENT = MappingProxyType(
    {
        "images": _NO_IMAGES,
        "template": "the template is the checkpoint's, or the one that the server was started with",
        "context": "this server keeps conversations as messages, by /api/chat",
    }
)
_OWN_NAMES = MappingProxyType(
    {
        **{name: f"options.{name}" for name in (*SamplingFields.model_fields, "stop")},
        "max_tokens": "options.num_predict",
        "repetition_penalty": "options.repeat_penalty",
    }
)


def chat_request(body: OllamaChatBody, frontend: Frontend) -> ChatRequest:
    """Return the chat request of a body, which must have messages: IndexError otherwise. A last
    message of the assistant with content and without tool calls is continued. Tools are offered
    with `tool_choice` "auto". Raises InvalidRequest, also for images, and SamplingError."""
    messages = _messages(body.messages or ())
    last = messages[-1]
    is_begun = last["role"] == "assistant" and "tool_calls" not in last and bool(last.get("content"))
    tools = [_tool(tool) for tool in body.tools or ()]
    return ChatRequest(
        messages=messages,
        params=params_of(body, frontend),
        tools=tools or None,
        tool_choice="auto" if tools else "none",
        chat_template_kwargs=_template_values(body),
        continue_final_message=is_begun,
        add_generation_prompt=not is_begun,
        form="format",
    )


def text_request(body: OllamaGenerateBody, frontend: Frontend) -> ChatRequest:
    """Return the prompt of /api/generate as a chat request: a message of the user, after the system
    text if the body has one. Raises InvalidRequest, also for a field of Ollama's that this server
    does not support, and SamplingError."""
    _check(body)
    system = [{"role": "system", "content": body.system}] if body.system else []
    return ChatRequest(
        messages=[*system, {"role": "user", "content": body.prompt or ""}],
        params=params_of(body, frontend),
        tool_choice="none",
        chat_template_kwargs=_template_values(body),
        form="format",
    )


def plain_prompt(body: OllamaGenerateBody, frontend: Frontend) -> str | None:
    """Return the prompt of /api/generate that is continued without a chat template: the text with
    `raw`, or with `suffix` the text to fill in. None: the body has neither, and `text_request`
    converts it. Raises InvalidRequest for unsupported fields, for more than one of `raw`, `suffix`
    and `system`, and if the model cannot fill in; TextError for `suffix` if the server runs without
    a tokenizer."""
    _check(body)
    prompt = body.prompt or ""
    if body.suffix:
        return filled(frontend, prompt, body.suffix, param="suffix", instead="leave suffix out")
    return prompt if body.raw else None


def params_of(body: AnswerFields, frontend: Frontend) -> SamplingParams:
    """Return the sampling parameters of a body, its grammar (`format`) included; options left out
    have the checkpoint's defaults.

    Raises InvalidRequest, with the fields by Ollama's names, and SamplingError.
    """
    options = body.options or OllamaOptions.model_validate({})
    _check_penalties(options)
    if options.repeat_penalty is not None:
        options = options.model_copy(update={"repetition_penalty": options.repeat_penalty})
    most = options.num_predict
    with own_names(_OWN_NAMES):
        return sampling_params(
            completed(options, frontend.sampling),
            max_tokens=None if most is None or most < 0 else most,
            logprobs=alternatives(body.logprobs, body.top_logprobs, frontend.config),
            stop=options.stop or None,
            grammar=_grammar(body.format),
        )


def unread(body: AnswerFields, ignored: Sequence[str]) -> list[str]:
    """Return ["think"] if the value of `think` has no effect on the prompt, else []. `ignored`:
    names of template variables that the chat template does not read. True and false have no effect
    if both variables in SWITCHES are ignored; a text has none if `reasoning_effort` is."""
    level = {"reasoning_effort"} if isinstance(body.think, str) else set[str]()
    is_unread = body.think is not None and (set(ignored) >= SWITCHES if not level else set(ignored) >= level)
    return ["think"] if is_unread else []


def _check(body: OllamaGenerateBody) -> None:
    refuse_fields(body.model_dump(include=set(_ABSENT)), _ABSENT)
    given = [name for name, value in (("raw", body.raw), ("suffix", body.suffix)) if value]
    if body.system and given:
        given.append("system")
    if len(given) > 1:
        raise InvalidRequest(f"found {' and '.join(given)}", wanted="one of them", param=given[-1])


def _check_penalties(options: OllamaOptions) -> None:
    """Raise InvalidRequest for a `repeat_last_n` other than -1 together with a penalty that has an
    effect: penalties always count over the prompt and the output. Without such a penalty, any value
    passes."""
    penalties = options.given("repeat_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty")
    neutral = {"repeat_penalty": 1, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    active = [f"options.{name}" for name, value in penalties.items() if value != neutral[name]]
    if options.repeat_last_n not in (None, -1) and active:
        raise InvalidRequest(
            f"options.repeat_last_n is {options.repeat_last_n} with {' and '.join(active)}",
            wanted="-1: penalties count over the prompt and the output",
            remedy="leave it out",
            param="options.repeat_last_n",
            code="unsupported_value",
        )


def _grammar(form: Any) -> Grammar | None:
    if not isinstance(form, dict):
        return format_grammar("json_object", None, "format") if form else None
    return format_grammar("json_schema", form, "format")


def _template_values(body: AnswerFields) -> dict[str, Any] | None:
    if body.think is None:
        return None
    values: dict[str, Any] = dict.fromkeys(sorted(SWITCHES), body.think is not False)
    return {**values, "reasoning_effort": body.think} if isinstance(body.think, str) else values


def _tool(tool: OllamaTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}


def _messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    calls, found = _Calls(), list[dict[str, Any]]()
    for place, message in enumerate(messages):
        refuse_fields({f"messages[{place}].images": message.images}, {f"messages[{place}].images": _NO_IMAGES})
        plain: dict[str, Any] = {"role": message.role, **message.given("content")}
        if message.thinking:
            plain["reasoning_content"] = message.thinking
        if message.tool_calls:
            plain["tool_calls"] = [calls.made(call) for call in message.tool_calls]
        if message.role == "tool":
            plain |= calls.answered(message)
        found.append(plain)
    return found


class _Calls:
    """The tool calls of a conversation that have no answer so far. In this protocol neither calls
    nor answers need an id: missing ids are made from the number of the call, from 1, so that the
    same conversation gives the same prompt."""

    def __init__(self) -> None:
        self._count = 0
        self._open: dict[str, str] = {}
        """The function name of each call, by its id."""

    def made(self, call: OllamaCall) -> dict[str, Any]:
        """Return a call in the form of OpenAI's chat endpoint, with arguments as JSON text, and
        remember it as open."""
        self._count += 1
        name = call.id or f"call{self._count:05d}"  # nine letters and digits, for some templates
        self._open[name] = call.function.name
        arguments = json.dumps(call.function.arguments, ensure_ascii=False)
        return {"id": name, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}

    def answered(self, message: OllamaMessage) -> dict[str, str]:
        """Return `tool_call_id` and `name` (of the function) of the call that a tool message
        answers, and remove the call from the open ones. A key is missing if it is not known: no
        open call fits, and the message does not say it."""
        name = message.tool_call_id or next(
            (name for name, function in self._open.items() if message.tool_name in (None, "", function)), None
        )
        function = self._open.pop(name, message.tool_name) if name is not None else message.tool_name
        return {**({"tool_call_id": name} if name else {}), **({"name": function} if function else {})}
