"""Converts requests of Anthropic's API to chat requests: blocks become messages and tools of the
chat endpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.anthropic.body import (
    UNTHREADED,
    Block,
    CountRequest,
    CustomTool,
    Message,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from sglcore.serving.apis.checks import own_names, refuse_fields, refuse_kind
from sglcore.serving.apis.request_params import SWITCHES, format_grammar, sampling_params
from sglcore.serving.chat.run import ChatRequest
from sglcore.serving.replicas.server_errors import InvalidRequest

_ABSENT = MappingProxyType(
    {"mcp_servers": "this server calls no other servers", "container": "this server has no containers"}
)
_CHOICES = MappingProxyType({"auto": "auto", "any": "required", "none": "none"})
_OWN_NAMES = MappingProxyType({"stop": "stop_sequences"})


def message_request(body: MessagesRequest) -> ChatRequest:
    """Return the chat request of a body for /v1/messages, with its sampling parameters and grammar.
    The checkpoint's defaults are not applied. Raises InvalidRequest or SamplingError, with the
    fields by Anthropic's names."""
    if body.thread is not None:
        raise InvalidRequest(
            "thread: this server keeps no conversations of this protocol",
            remedy="send the whole conversation without it",
            param="thread",
            code=UNTHREADED,
        )
    with own_names(_OWN_NAMES):
        stop, grammar = body.stop_sequences or None, _grammar(body)
        return chat_request(body, sampling_params(body, max_tokens=body.max_tokens, stop=stop, grammar=grammar))


def chat_request(body: CountRequest, params: SamplingParams) -> ChatRequest:
    """Return the chat request of a conversation with these sampling parameters. A last message of
    the assistant is continued; one that ends with a tool call is refused. Raises InvalidRequest,
    also for blocks and tools of kinds that this server does not support, and results of unknown
    calls."""
    refuse_fields(body.model_dump(include=set(_ABSENT)), _ABSENT)
    messages = _system(body.system)
    for place, message in enumerate(body.messages):
        _add(messages, message, f"messages[{place}]")
    is_begun = messages[-1]["role"] == "assistant"
    if is_begun and "tool_calls" in messages[-1]:
        raise InvalidRequest(
            "messages: the last one ends with tool_use",
            wanted="a user message with the tool_result blocks of its calls",
            param=f"messages[{len(body.messages) - 1}]",
        )
    return ChatRequest(
        messages=messages,
        tools=[_tool(tool, f"tools[{place}]") for place, tool in enumerate(body.tools or ())] or None,
        tool_choice=_choice(body),
        parallel_tool_calls=not (body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use),
        params=params,
        chat_template_kwargs=_template_kwargs(body),
        continue_final_message=is_begun,
        add_generation_prompt=not is_begun,
        form="output_config.format.schema",
        thinking_token_budget=body.thinking.budget_tokens if body.thinking is not None else None,
    )


def unread(body: CountRequest, ignored: Sequence[str]) -> list[str]:
    """Return the names of the request's fields that have no effect on the prompt. `ignored`: names
    of template variables that the request sets and the chat template does not read. `thinking` is
    not among them if the template reads one of SWITCHES and `chat_template_kwargs` does not set it;
    then `thinking.budget_tokens` is, if the budget has no effect."""
    own = body.chat_template_kwargs or {}
    names = [f"chat_template_kwargs.{name}" for name in ignored if name in own]
    if body.thinking is not None and set(ignored) >= SWITCHES - own.keys():
        names.append("thinking")
    elif body.thinking is not None and "thinking_token_budget" in ignored:
        names.append("thinking.budget_tokens")
    return [*names, "output_config.effort"] if "reasoning_effort" in set(ignored) - own.keys() else names


def _system(system: str | list[Texts] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    return [{"role": "system", "content": _content(system, "system")}]


def _add(messages: list[dict[str, Any]], message: Message, where: str) -> None:
    """Append a message of the body to `messages` in the form of the chat endpoint: tool results
    become messages of their own; consecutive messages of the user, or of the assistant, are joined.
    `where`: its place, for errors."""
    if message.role == "assistant":
        turn = _answer(message.content, f"{where}.content")
        _join(messages, turn) if messages and messages[-1]["role"] == "assistant" else messages.append(turn)
        return
    texts: list[dict[str, Any]] = []
    for place, block in enumerate(_blocks(message.content)):
        at = f"{where}.content[{place}]"
        if isinstance(block, ToolResultBlock):
            _flush(messages, message.role, texts)
            messages.append(_result(block, messages, at))
        else:
            texts.append(_user_part(block, at))
    if texts or not message.content:
        _flush(messages, message.role, texts or [{"type": "text", "text": ""}])


def _flush(messages: list[dict[str, Any]], role: str, texts: list[dict[str, Any]]) -> None:
    if not texts:
        return
    if messages and messages[-1]["role"] == role == "user":
        messages[-1]["content"] = [*messages[-1]["content"], *texts]
    else:
        messages.append({"role": role, "content": list(texts)})
    texts.clear()


def _answer(content: str | list[Block], where: str) -> dict[str, Any]:
    """Return the message of an assistant in the form of the chat endpoint: its texts, and its
    reasoning, are each joined without separators; tool calls are listed; redacted reasoning is
    dropped. Raises InvalidRequest for other blocks. `where`: its path in the request, for
    errors."""
    turn: dict[str, Any] = {"role": "assistant"}
    for place, block in enumerate(_blocks(content)):
        match block:
            case TextBlock():
                turn["content"] = turn.get("content", "") + block.text
            case ThinkingBlock():
                turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
            case ToolUseBlock():
                turn.setdefault("tool_calls", []).append(_call(block))
            case RedactedThinkingBlock():
                pass
            case _:
                refuse_kind("a block", block.type, "text, thinking or tool_use", f"{where}[{place}]")
    return turn if len(turn) > 1 else {**turn, "content": ""}


def _join(messages: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    last = messages[-1]
    for name in ("reasoning_content", "content", "tool_calls"):
        if name in turn:
            last[name] = last[name] + turn[name] if name in last else turn[name]


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _result(block: ToolResultBlock, messages: Sequence[dict[str, Any]], where: str) -> dict[str, Any]:
    made = {call["id"] for message in messages for call in message.get("tool_calls") or ()}
    if block.tool_use_id not in made:
        raise InvalidRequest(
            f"{where}: found the result of a call {block.tool_use_id!r} that was not made before it",
            wanted="a tool_use block with this id in an earlier assistant message",
            param=f"{where}.tool_use_id",
        )
    content = _content(block.content, f"{where}.content") if block.content is not None else ""
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _user_part(block: Any, where: str) -> dict[str, Any]:
    if not isinstance(block, TextBlock):
        refuse_kind("a block", block.type, "text or tool_result", where)
    return {"type": "text", "text": block.text}


def _content(content: str | list[Texts], where: str) -> Any:
    if isinstance(content, str):
        return content
    return [_user_part(block, f"{where}[{place}]") for place, block in enumerate(content)]


def _blocks(content: str | list[Block]) -> Sequence[Any]:
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)] if content else []
    return content


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, CustomTool):
        refuse_kind("a tool", tool.type, "custom", where)
    return {
        "type": "function",
        "function": {**tool.given("name", "description", "strict"), "parameters": tool.input_schema},
    }


def _choice(body: CountRequest) -> Any:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise InvalidRequest("tool_choice has no name", wanted="the name of a tool", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _template_kwargs(body: CountRequest) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if body.thinking is not None and body.thinking.type != "adaptive":
        thinks = body.thinking.type == "enabled"
        found |= dict.fromkeys(sorted(SWITCHES), thinks)
    if body.output_config is not None and body.output_config.effort is not None:
        found["reasoning_effort"] = body.output_config.effort
    return {**found, **(body.chat_template_kwargs or {})}


def _grammar(body: CountRequest) -> Any:
    configured = body.output_config.format if body.output_config is not None else None
    form = configured or body.output_format
    return None if form is None else format_grammar("json_schema", form.schema_, "output_config.format.schema")


def unused(body: MessagesRequest) -> list[str]:
    """Return the names of the request's fields, nested ones included, that have no effect with any
    chat template; `unread` returns the others. Names may repeat."""
    notes = [*body.warnings()]
    is_forced = body.tool_choice is not None and body.tool_choice.type in ("any", "tool")
    notes += [f"thinking.{name}" for name in body.thinking.warnings()] if body.thinking is not None else []
    for tool in body.tools or ():
        if isinstance(tool, CustomTool):
            notes += [f"tools.{name}" for name in tool.warnings()]
            notes += ["tools.strict"] if tool.strict and not is_forced else []
    blocks = [block for message in body.messages for block in _blocks(message.content)]
    blocks += body.system if isinstance(body.system, list) else []
    if any(isinstance(block, TextBlock | ToolUseBlock | ToolResultBlock) and block.cache_control for block in blocks):
        notes.append("content.cache_control")
    if any(isinstance(block, ToolResultBlock) and block.is_error for block in blocks):
        notes.append("content.is_error")
    if any(isinstance(block, RedactedThinkingBlock) for block in blocks):
        notes.append("content.redacted_thinking")
    return notes
