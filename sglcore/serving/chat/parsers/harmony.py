"""Harmony, the format of gpt-oss: messages on channels, each with a header of special tokens.

`<|channel|>analysis<|message|>...<|end|>` is reasoning, a message `to=functions.NAME` is a call,
everything else is content: `final` is the answer, and `commentary` is text before a call. Sources:
the model card of gpt-oss, its chat template, and the format's published guide.
"""

from __future__ import annotations

import re

from sglcore.serving.chat.parsers.delta import Kind
from sglcore.serving.chat.parsers.json_calls import LONGEST_NAME, Tools
from sglcore.serving.chat.parsers.scanner import Malformed, Scan, Scanner

START, CHANNEL, MESSAGE, END, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"
CALL = "<|call|>"
"""Ends a call and the model's turn: the client has to send the call's result."""
RECIPIENT = " to=functions."

_TO = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


def harmony(s: Scanner, tools: Tools, *, reads_calls: bool = True, is_open: bool = False) -> Scan[None]:
    """Parse a whole answer, reasoning included; it serves as an `AnswerScan` and as a `ToolScan`.
    Without `reads_calls` a call is content. `is_open`: the prompt ends inside reasoning."""
    kind: Kind = "reasoning" if is_open else "content"
    last: Kind | None = None
    if is_open:
        s.border()
    header = None if is_open else (yield from s.attempt(_first_header(s)))
    while True:
        if header is not None:
            found = _CHANNEL.search(header)
            kind = "reasoning" if found and found.group(1) == "analysis" else "content"
            s.border("\n\n" if kind == last else "")
            last = kind
            if reads_calls:
                yield from _call(s, header, tools)
        mark = yield from s.pass_until((START, CHANNEL, END), kind)
        if not mark:
            return
        kind, header = "content", None
        if mark != END:
            rest = yield from s.attempt(_header(s))
            header = mark + rest if rest is not None else None


def _first_header(s: Scanner) -> Scan[str]:
    """Parse a header that begins in the prompt and names its recipient before its channel, and
    return it from its `to=` on. Raises Malformed if the text does not begin with `to=`, or for a
    header that does not end."""
    yield from s.literal("to=")
    rest = yield from _header(s)
    if rest is None:
        raise Malformed
    return f"to={rest}"


def _header(s: Scanner) -> Scan[str | None]:
    """Parse the rest of a header, up to its message mark, and return it without that mark.

    None if another mark, or the end of the text, ends it: then the header is not shown. Raises
    Malformed if it is longer than LONGEST_NAME.
    """
    parts: list[str] = []
    mark = yield from s.hand_on((MESSAGE, START, END, CALL), parts.append)
    if sum(map(len, parts)) > LONGEST_NAME:
        raise Malformed
    if mark == MESSAGE:
        return "".join(parts)
    s.unread(len(mark))
    return None


def _call(s: Scanner, header: str, tools: Tools) -> Scan[None]:
    """Parse the JSON object after `header` as the arguments of a call, if the header names a
    recipient: `functions.NAME` with any name, or the bare name of one of `tools`. Otherwise, and if
    no object follows, nothing is read."""
    found = _TO.search(header)
    recipient = found.group(1) if found else ""
    name = recipient.removeprefix("functions.")
    known = {tool.get("function", tool).get("name") for tool in tools}
    if not name or (name == recipient and name not in known):
        return
    if (yield from s.starts("{")):
        yield from s.json_object(s.arguments(s.start_call(name)))
