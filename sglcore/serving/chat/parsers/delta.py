"""The meaning of the parts of a model's text: reasoning, content, and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["reasoning", "content", "tool_start", "tool_arguments"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of an answer, of the kind `kind`. A tool call begins with one `tool_start`, without
    text, then `tool_arguments` follow; their texts together are the arguments' JSON. `index`: the
    number of the call in the answer, from 0; 0 for reasoning and content."""

    kind: Kind
    text: str = ""
    index: int = 0
    name: str = ""
    """The function's name, in `tool_start`."""
    call_id: str = ""
    """The call's id, in `tool_start`."""


@dataclass(frozen=True, slots=True)
class Call:
    """A whole tool call: the function's name, `arguments` as JSON text as the model wrote it (of a
    cut answer: incomplete), and the call's id."""

    name: str
    arguments: str
    call_id: str = ""


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Return the deltas in a new list, with adjacent ones of one kind and call joined, so that the
    result does not depend on how the text was split. Starts of calls are not joined."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if last and delta.kind != "tool_start" and (last.kind, last.index) == (delta.kind, delta.index):
            result[-1] = replace(last, text=last.text + delta.text)
        else:
            result.append(delta)
    return result


def text_of(deltas: Iterable[Delta], kind: Kind) -> str:
    """Return the text of all deltas of one kind, joined; "" if there are none."""
    return "".join(delta.text for delta in deltas if delta.kind == kind)


def calls_of(deltas: Iterable[Delta]) -> list[Call]:
    """Return the tool calls in order. Raises ValueError for a call that starts twice or out of
    order, and for arguments of a call that has not started."""
    found: list[Call] = []
    for delta in deltas:
        if delta.kind == "tool_start":
            if delta.index != len(found):
                raise ValueError(f"call {delta.index} starts after {len(found)} calls")
            found.append(Call(delta.name, "", delta.call_id))
        elif delta.kind == "tool_arguments":
            if delta.index >= len(found):
                raise ValueError(f"arguments of call {delta.index} come before it starts")
            call = found[delta.index]
            found[delta.index] = replace(call, arguments=call.arguments + delta.text)
    return found
