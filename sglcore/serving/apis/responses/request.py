"""Converts requests of /v1/responses to chat requests: items become messages and tools of the chat
endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.checks import SHOWN, check_limit, refuse_fields, refuse_kind
from sglcore.serving.apis.request_params import format_grammar, sampling_params
from sglcore.serving.apis.responses.body import (
    CallItem,
    CallOutputItem,
    Conversation,
    FunctionTool,
    MessageItem,
    Part,
    ReasoningItem,
    RefusalPart,
    ResponsesRequest,
    SchemaFormat,
    TextPart,
)
from sglcore.serving.apis.shared_body import OtherKind
from sglcore.serving.chat.run import ChatRequest
from sglcore.serving.replicas.server_errors import InvalidRequest

_ABSENT = MappingProxyType(
    {
        "background": "this server answers while the client waits",
        "conversation": "this server keeps responses, not conversations: use previous_response_id",
        "context_management": "this server does not shorten a conversation",
        "prompt": "this server has no stored prompts",
        "moderation": "this server does not judge texts",
    }
)
LOGPROBS = "message.output_text.logprobs"
"""The value in `include` that requests log-probabilities."""


def response_request(body: ResponsesRequest, earlier: Sequence[dict[str, Any]], max_logprobs: int) -> ChatRequest:
    """Return the chat request of a body, with its sampling parameters and grammar; the checkpoint's
    defaults are not applied. `earlier`: the messages of the conversation before it; `max_logprobs`:
    the server's limit. Raises InvalidRequest or SamplingError."""
    check_limit("top_logprobs", body.top_logprobs, max_logprobs)
    form = body.text.format if body.text is not None else None
    schema = form.schema_ if isinstance(form, SchemaFormat) else None
    params = sampling_params(
        body,
        max_tokens=body.max_output_tokens,
        stop=body.stop,
        logprobs=(body.top_logprobs or 0) if _wants_logprobs(body) else None,
        grammar=format_grammar(form.type, schema, "text.format.schema") if form is not None else None,
    )
    return chat_request(body, earlier, params)


def chat_request(body: Conversation, earlier: Sequence[dict[str, Any]], params: SamplingParams) -> ChatRequest:
    """Return the chat request of a conversation that begins with the messages `earlier`; the
    `instructions` of the body come before them, as a system message. Raises InvalidRequest, also
    for fields and items that this server does not support."""
    refuse_fields(body.model_dump(include=set(_ABSENT)), _ABSENT)
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return ChatRequest(
        messages=[*system, *earlier, *_input(body, earlier)],
        tools=[_tool(tool, f"tools[{place}]") for place, tool in enumerate(body.tools or ())] or None,
        tool_choice=_choice(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        params=params,
        chat_template_kwargs=_template_kwargs(body),
        form="text.format.schema",
        thinking_token_budget=body.thinking_token_budget,
    )


def _input(body: Conversation, earlier: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of the body's own input. `earlier`: the messages before it, with tool
    calls that it may answer; they are not in the result. Raises InvalidRequest, also for a missing
    or empty input."""
    if body.input is None or body.input == [] or body.input == "":
        raise InvalidRequest("the field input is missing", wanted="text, or a list of items", param="input")
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    conversation = _Conversation(earlier)
    for place, item in enumerate(body.input):
        conversation.take(item, f"input[{place}]")
    return conversation.messages


class _Conversation:
    """Collects messages from items, in `messages`: reasoning, text and tool calls of one turn of
    the model become one message. `earlier`: messages with calls that an item may answer."""

    def __init__(self, earlier: Sequence[dict[str, Any]]) -> None:
        self.messages: list[dict[str, Any]] = []
        self._calls = {call["id"] for message in earlier for call in message.get("tool_calls") or ()}

    def take(self, item: Any, where: str) -> None:
        """Add one item; `where`: its path in the request, for errors. Raises InvalidRequest for an
        item of a type that this server does not support, and for the result of an unknown call."""
        match item:
            case MessageItem(role="assistant"):
                self._turn("content")["content"] = _text(item.content, f"{where}.content")
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                self.messages.append({"role": role, "content": _content(item.content, f"{where}.content")})
            case ReasoningItem():
                self._reasoning(item, where)
            case CallItem():
                self._call(item, where)
            case CallOutputItem():
                self._output(item, where)
            case OtherKind(type=kind):
                refuse_kind("an item", kind, "message, function_call, function_call_output or reasoning", where)

    def _turn(self, field: str) -> dict[str, Any]:
        """Return the message to which `field` ("reasoning_content", "content" or "tool_calls", in
        this order) of the model's current turn is added: the last message if it is the model's and
        has neither this field nor a later one, else a new message, which is appended."""
        order = ("reasoning_content", "content", "tool_calls")
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and not any(name in last for name in order[order.index(field) :]):
            return last
        self.messages.append({"role": "assistant"})
        return self.messages[-1]

    def _reasoning(self, item: ReasoningItem, where: str) -> None:
        parts = item.content or item.summary or ()
        text = _text(list(parts), f"{where}.content")
        if text:
            self._turn("reasoning_content")["reasoning_content"] = text

    def _call(self, item: CallItem, where: str) -> None:
        call = {
            "id": item.call_id,
            "type": "function",
            "function": {"name": item.name, "arguments": item.arguments or "{}"},
        }
        self._calls.add(item.call_id)
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and "tool_calls" in last:
            last["tool_calls"].append(call)
        else:
            self._turn("tool_calls")["tool_calls"] = [call]

    def _output(self, item: CallOutputItem, where: str) -> None:
        if item.call_id not in self._calls:
            raise InvalidRequest(
                f"{where}: found the output of a call {item.call_id!r} that was not made before it",
                wanted="the function_call item with this call_id first",
                remedy="send it too, or name the response that has it as previous_response_id",
                param=f"{where}.call_id",
            )
        content = _content(item.output, f"{where}.output")
        self.messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})


def unread(body: Conversation, ignored: Sequence[str]) -> list[str]:
    """Return the names of the request's fields that set the template variables `ignored`, those
    which the chat template does not read: such as `reasoning.effort` for `reasoning_effort`."""
    own = body.chat_template_kwargs or {}
    names = {"reasoning_effort": "reasoning.effort", **{name: f"chat_template_kwargs.{name}" for name in own}}
    return [names.get(name, name) for name in ignored]


def _wants_logprobs(body: ResponsesRequest) -> bool:
    """Return whether the request wants log-probabilities in the answer: by `top_logprobs`, even 0,
    or in `include`."""
    return body.top_logprobs is not None or LOGPROBS in (body.include or ())


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, FunctionTool):
        refuse_kind("a tool", tool.type, "function", where)
    return {"type": "function", "function": tool.given("name", "description", "parameters", "strict")}


def _choice(body: Conversation) -> Any:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    if isinstance(choice, OtherKind):
        refuse_kind("a choice", choice.type, "'none', 'auto', 'required' or a function", "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def _template_kwargs(body: Conversation) -> dict[str, Any]:
    effort = body.reasoning.effort if body.reasoning is not None else None
    return {**({"reasoning_effort": effort} if effort else {}), **(body.chat_template_kwargs or {})}


def _content(content: str | list[Part], where: str) -> Any:
    """Return text of a user or a tool in the form of the chat endpoint: a text unchanged, or a list
    of text parts. Raises InvalidRequest for parts that are no text. `where`: its path in the
    request, for errors."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": _part(part, f"{where}[{place}]")} for place, part in enumerate(content)]


def _text(content: str | list[Part], where: str) -> str:
    """Return text of the model, its parts joined without separators, refusals included. Raises
    InvalidRequest for parts that are no text. `where`: its path in the request, for errors."""
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    match part:
        case TextPart():
            return part.text
        case RefusalPart():
            return part.refusal
        case _:
            refuse_kind("a part", part.type, "input_text or output_text", where)


def unused(body: ResponsesRequest) -> list[str]:
    """Return the names of the request's fields, nested ones included, that have no effect with any
    chat template; `unread` returns the others. Names may repeat."""
    notes = [*body.warnings()]
    notes += [f"include {ascii(word)[:SHOWN]}" for word in body.include or () if word != LOGPROBS]
    if body.text is not None and body.text.verbosity is not None:
        notes.append("text.verbosity")
    if body.truncation == "auto":
        notes.append("truncation")
    if body.reasoning is not None:
        notes += [f"reasoning.{name}" for name in body.reasoning.warnings()]
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        notes.append("stream_options.include_obfuscation")
    is_forced = body.tool_choice not in (None, "auto", "none")
    for tool in body.tools or ():
        if isinstance(tool, FunctionTool):
            notes += ["tools.strict"] if tool.strict and not is_forced else []
            notes += [f"tools.{name}" for name in tool.warnings()]
    items = body.input if isinstance(body.input, list) else []
    if any(isinstance(item, ReasoningItem) and item.encrypted_content is not None for item in items):
        notes.append("input.encrypted_content")
    return notes
