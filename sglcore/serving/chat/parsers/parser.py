"""The parser of one answer: reasoning first, then content and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from sglcore.serving.chat.parsers.delta import Delta, joined
from sglcore.serving.chat.parsers.json_calls import Tools
from sglcore.serving.chat.parsers.scanner import Scan, Scanner

ToolScan = Callable[[Scanner, Tools], Scan[None]]


class AnswerScan(Protocol):
    """A function that returns the `Scan`, a parsing step to run, of a whole answer, in a format
    where reasoning is not one block at the beginning, such as Harmony."""

    def __call__(self, s: Scanner, tools: Tools, *, reads_calls: bool, is_open: bool) -> Scan[None]:
        """Parse the text of `s`. Without `reads_calls` a call is content. `is_open`: the prompt
        ends inside reasoning."""
        ...


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """One format of reasoning: its `name`, as `--reasoning-parser` gives it, with `aliases` for the
    names in other engines; the markers before and after it (`marks`), and what surrounds it."""

    name: str
    marks: tuple[str, str]
    aliases: tuple[str, ...] = ()
    resume: str = ""
    """Text between the end marker of reasoning and what follows."""
    opening: str = ""
    """Text with which content begins, if reasoning and calls may come before it in any order.
    Empty: content needs none."""
    hidden: tuple[str, ...] = ()
    """Markers around content, which clients must not see either."""
    answer: AnswerScan | None = None
    """Parses the whole answer, calls included, if reasoning may be anywhere in it. None: it is one
    block at the beginning."""


class DeltaParser:
    """Parses the text of one answer, part by part, into deltas. The joined deltas do not depend on
    how the text was split. Make a new one for each answer."""

    def __init__(
        self,
        *,
        calls: ToolScan | None = None,
        tools: Tools = (),
        reasoning: ReasoningFamily | None = None,
        reasoning_open: bool = False,
        controls: Iterable[str] = (),
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """`calls`: the parser of what follows the reasoning (None: text that looks like a call is
        content); `tools`: the request's, in OpenAI's form; `reasoning`: its format (None: reasoning
        is content). `reasoning_open`: the prompt has the mark that begins reasoning; `controls`:
        texts to remove; `new_id`: makes ids of calls that have none in the text (None:
        `long_id`)."""
        hidden = reasoning.hidden if reasoning else ()
        self._scanner = Scanner(new_id or long_id, (*controls, *hidden))
        self._steps = _answer(self._scanner, calls, tools, reasoning, reasoning_open)
        self._is_over = False

    def push(self, text: str) -> list[Delta]:
        """Parse more text of the answer; returns the deltas that it adds, as far as their meaning
        is certain, perhaps none. Text that may be the beginning of a marker is held back."""
        self._scanner.push(text)
        return self._read()

    def finish(self) -> list[Delta]:
        """End the answer; returns the deltas of text that was held back. Call it once, after the
        last `push`."""
        self._scanner.end()
        return self._read()

    def whole(self, text: str) -> list[Delta]:
        """Parse a whole answer at once and end it, with a parser that got no text yet; returns the
        joined deltas."""
        return joined([*self.push(text), *self.finish()])

    def _read(self) -> list[Delta]:
        if not self._is_over:
            self._is_over = next(self._steps, True) is True
        return joined(self._scanner.taken())


def long_id() -> str:
    """Return a new random id of a call in OpenAI's form: `call_` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Return a new random id of a call with nine letters and digits, which Mistral's templates
    require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _answer(
    s: Scanner, calls: ToolScan | None, tools: Tools, reasoning: ReasoningFamily | None, reasoning_open: bool
) -> Scan[None]:
    if reasoning and reasoning.answer:
        yield from reasoning.answer(s, tools, reads_calls=calls is not None, is_open=reasoning_open)
        return
    if reasoning:
        yield from _reasoning(s, *reasoning.marks, reasoning_open)
    if calls:
        yield from calls(s, tools)
    else:
        yield from s.pass_until((), "content")


def _reasoning(s: Scanner, start: str, end: str, is_open: bool) -> Scan[None]:
    """Parse a block of reasoning at the beginning, between the markers `start` and `end`; with
    `is_open`, the start marker may be missing. Without either, nothing is read. The markers, and
    white space inside and after them, are not part of the deltas."""
    if not (yield from s.take(start)) and not is_open:
        return
    s.border()
    yield from s.pass_until((end,), "reasoning")
    s.border()
