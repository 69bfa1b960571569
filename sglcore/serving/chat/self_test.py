"""The self-test of a parser on its checkpoint: it must read back the calls that the chat template
writes, however the text is split."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from sglcore.engine.tokenizers.chat_template import TextError
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.serving.chat.conversation import MessageForm, as_template_reads
from sglcore.serving.chat.parsers.delta import Call, Delta, calls_of, joined, text_of
from sglcore.serving.chat.parsers.families import ToolFamily
from sglcore.serving.chat.parsers.parser import DeltaParser, ReasoningFamily, ToolScan, long_id, short_id

QUESTION = MappingProxyType({"role": "user", "content": "What is to be done?"})
CALL_IDS = ("Pr0beCa11", "Pr0beCa12")
"""Ids of nine letters and digits, which every template accepts."""


class Failed(Exception):
    """A parser did not read back what the template wrote; the message says what differs."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a chat template appends to a prompt for an answer with `calls`, and whether the text
    begins inside reasoning. `calls` and `footer` are as the parser read them, and empty before."""

    text: str
    reasoning_open: bool
    calls: tuple[Call, ...] = ()
    footer: str = ""
    """Text after the last call, which ends the turn."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The result of a passed test: the form of messages that the template needs, the turn with one
    call, and the turn with two (None: the template writes one call only)."""

    form: MessageForm
    one: Turn
    two: Turn | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A family of tool calls to test on a checkpoint, with the chosen family of reasoning (None:
    none). `skip_special_tokens`: whether answers are decoded without special tokens."""

    codec: TextCodec
    family: ToolFamily
    reasoning: ReasoningFamily | None
    skip_special_tokens: bool

    def parser(self, turn: Turn) -> DeltaParser:
        """Return a new parser for the text of a turn, with the family's calls. Ids that it makes
        are all equal, so that two parsers give equal deltas."""
        return self.reader(turn, calls=self.family.calls)

    def reader(self, turn: Turn, *, calls: ToolScan | None = None) -> DeltaParser:
        """Return a new parser for a turn that parses calls by `calls`; None: calls are content."""
        return DeltaParser(
            calls=calls,
            tools=probe_tools(),
            reasoning=self.reasoning,
            reasoning_open=turn.reasoning_open,
            new_id=lambda: "id",
        )


def probe_tools() -> list[dict[str, Any]]:
    """Return two tools for the test, in OpenAI's form, as new objects, with names that no client
    uses."""
    properties = {
        "place": {"type": "string", "description": "Where"},
        "count": {"type": "integer", "description": "How many"},
        "exact": {"type": "boolean", "description": "Whether"},
        "detail": {"type": "object", "description": "What else"},
    }
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"The tool {name}",
                "parameters": {"type": "object", "properties": properties, "required": ["place"]},
            },
        }
        for name in ("probe_alpha", "probe_beta")
    ]


def probe_calls() -> tuple[Call, Call]:
    """Return a call of each probe tool, with fixed ids. The arguments of the first contain quotes,
    braces, a line break and characters that are not ASCII."""
    first = {"place": 'Zürich "}]\n東', "count": 3, "exact": True, "detail": {"list": [1.5, None, "a\\b"], "{": {}}}
    return (
        Call("probe_alpha", json.dumps(first, ensure_ascii=False), CALL_IDS[0]),
        Call("probe_beta", json.dumps({"place": "b"}), CALL_IDS[1]),
    )


def check_tools(candidate: Candidate, form: MessageForm) -> Sample:
    """Test a family of tool calls with four forms of messages, starting from `form` (arguments as
    objects or text, missing content as "" or None), and return the first passed test. Raises Failed
    with the reason of the first form if none passes."""
    reasons: list[str] = []
    for arguments in (True, False):
        for empty in (False, True):
            try:
                sample = _check_form(candidate, replace(form, arguments=arguments, empty=empty))
                return replace(sample, form=_completed(candidate.codec, sample.form))
            except (Failed, TextError) as error:
                reasons.append(str(error))
    raise Failed(reasons[0])


def check_reasoning(codec: TextCodec, family: ReasoningFamily, skip_special_tokens: bool) -> None:
    """Test a family of reasoning on a text with its markers, closed and already open, split at
    every position and from its tokens. `skip_special_tokens`: how answers are decoded. Raises
    Failed if a reading is wrong; else returns nothing."""
    start, end = family.marks
    end += family.resume + family.opening
    for is_open in (False, True):
        text = f"{'' if is_open else start}\nSince 東.\n{end}\n\nSo."

        def parser(is_open: bool = is_open) -> DeltaParser:
            return DeltaParser(reasoning=family, reasoning_open=is_open)

        ids = codec.encode(text, special=False)
        tokens = parser().whole(codec.decode(ids, skip_special_tokens=skip_special_tokens))
        readings = [*_splits(text, parser, range(len(text) + 1)), ("from its tokens", tokens)]
        for name, deltas in readings:
            found = (text_of(deltas, "reasoning"), text_of(deltas, "content"))
            if found != ("Since 東.", "So."):
                raise Failed(f"it reads {found[0]!r} and {found[1]!r} from {text!r} {name}")


def new_ids(family: ToolFamily | None) -> Callable[[], str]:
    """Return the function that makes ids of calls for a family, `short_id` or `long_id` (also for
    None: no tools)."""
    return short_id if family and family.has_short_ids else long_id


def _check_form(candidate: Candidate, form: MessageForm) -> Sample:
    """Test one form of messages, and return its sample: the turn with the most calls is split at
    every position, the other turn only by characters. If the template writes one call only, the
    sample's form has `single` set. Raises Failed, and TextError if the template refuses the
    messages."""
    calls = probe_calls()
    one = _turn(candidate, form, calls[:1])
    try:
        two = _turn(candidate, form, calls)
    except TextError:
        two = one
    if two == one:
        alone = replace(form, single=True)
        return Sample(alone, _read_back(candidate, one, calls[:1], range(len(one.text))), None)
    one = _read_back(candidate, one, calls[:1], range(0))
    return Sample(form, one, _read_back(candidate, two, calls, range(len(two.text))))


def _completed(codec: TextCodec, form: MessageForm) -> MessageForm:
    """Return the form with `described` and `joined` set if the template needs them: for tools
    without a description, and for calls after content and reasoning."""

    def rendered(form: MessageForm, tools: Sequence[Mapping[str, Any]], *answer: Mapping[str, Any]) -> str:
        try:
            messages = as_template_reads([QUESTION, *answer], form)
            return codec.template.render(messages, tools=form.tools(tools), add_generation_prompt=not answer)
        except TextError:
            return ""

    bare = [{"type": "function", "function": {"name": "probe_alpha"}}]
    described = replace(form, described=True)
    if not rendered(form, bare) and rendered(described, bare):
        form = described
    calls = [_as_sent(call) for call in probe_calls()[:1]]
    answer = {"role": "assistant", "content": CALL_IDS[1], "reasoning_content": "Since.", "tool_calls": calls}
    joined = replace(form, joined=True)
    if not rendered(form, probe_tools(), answer) and CALL_IDS[1] in rendered(joined, probe_tools(), answer):
        form = joined
    return form


def _turn(candidate: Candidate, form: MessageForm, calls: Sequence[Call]) -> Turn:
    """Return the text that the template adds to the prompt for an answer with these calls, as a
    `Turn` in which `calls` and `footer` are still empty. Raises TextError if the template refuses
    the messages."""
    template, tools = candidate.codec.template, probe_tools()
    answer = {"role": "assistant", "content": None, "tool_calls": [_as_sent(call) for call in calls]}
    question = as_template_reads([QUESTION], form)
    answered = as_template_reads([QUESTION, answer], form)
    before = template.render(question, tools=tools, add_generation_prompt=True)
    after = template.render(answered, tools=tools, add_generation_prompt=False)
    # The common beginning is the prompt, but never the beginning of a marker.
    cut = next((place for place, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    marks = candidate.family.opening + (candidate.reasoning.marks if candidate.reasoning else ())
    cut -= max(
        (size for mark in marks for size in range(1, len(mark)) if _straddles(after, cut, mark, size)), default=0
    )
    start = candidate.reasoning.marks[0] if candidate.reasoning else ""
    return Turn(after[cut:], bool(start) and after[:cut].rstrip().endswith(start))


def _straddles(text: str, cut: int, mark: str, size: int) -> bool:
    return cut >= size and text.startswith(mark, cut - size)


def _as_sent(call: Call) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _read_back(candidate: Candidate, turn: Turn, calls: Sequence[Call], places: Iterable[int]) -> Turn:
    whole = candidate.parser(turn).whole(turn.text)
    _verify(candidate, turn, whole, calls)
    for name, deltas in _splits(turn.text, lambda: candidate.parser(turn), places):
        if deltas != whole:
            raise Failed(f"it reads {turn.text!r:.80} differently {name}")
    _verify(candidate, turn, candidate.parser(turn).whole(_decoded(candidate, turn.text)), calls)
    footer = whole[-1].text if whole[-1].kind == "content" else ""
    return replace(turn, calls=tuple(calls_of(whole)), footer=footer)


def _splits(text: str, parser: Callable[[], DeltaParser], places: Iterable[int]) -> Iterator[tuple[str, list[Delta]]]:
    """Yield how the text was split, and the joined deltas: first one character at a time, then in
    two parts at each of `places`. `parser` makes a new parser."""
    reader = parser()
    yield "one character at a time", joined([*(d for mark in text for d in reader.push(mark)), *reader.finish()])
    for place in places:
        reader = parser()
        parts = [*reader.push(text[:place]), *reader.push(text[place:]), *reader.finish()]
        yield f"split after {place} characters", joined(parts)


def _decoded(candidate: Candidate, text: str) -> str:
    """Return the text after it was encoded and decoded again, as an answer would be: special tokens
    may be lost."""
    ids = candidate.codec.encode(text, special=False)
    return candidate.codec.decode(ids, skip_special_tokens=candidate.skip_special_tokens)


def _verify(candidate: Candidate, turn: Turn, deltas: Sequence[Delta], calls: Sequence[Call]) -> None:
    try:
        found = calls_of(deltas)
    except ValueError as error:
        raise Failed(f"its calls have no order: {error}") from None
    names = [call.name for call in found]
    if names != [call.name for call in calls]:
        raise Failed(f"it reads calls of {names} where the template wrote {len(calls)}: {turn.text!r:.120}")
    for call, wanted in zip(found, calls, strict=True):
        if _value(call.arguments) != _value(wanted.arguments):
            raise Failed(f"it reads arguments {call.arguments!r:.80} where the template wrote {wanted.arguments!r:.80}")
    _verify_content(candidate, turn, deltas)


def _verify_content(candidate: Candidate, turn: Turn, deltas: Sequence[Delta]) -> None:
    """Raise Failed unless content is the text before the first call and after the last one, without
    any part of a marker. `deltas`: the parser's reading of the turn, with at least one call."""
    marks = candidate.family.marks
    places = [place for place, delta in enumerate(deltas) if delta.kind.startswith("tool")]
    before, between, after = (
        text_of(part, "content").strip()
        for part in (deltas[: places[0]], deltas[places[0] : places[-1]], deltas[places[-1] :])
    )
    first = min(place for mark in candidate.family.opening if (place := turn.text.find(mark)) >= 0)
    if before != text_of(candidate.reader(turn).whole(turn.text[:first]), "content").strip() or "None" in before:
        raise Failed(f"it reads content {before!r:.60} before the calls of {turn.text!r:.80}")
    text = turn.text.rstrip()
    starts = [text.rfind(mark) for mark in marks]
    is_cut = any(at < len(text) - len(after) < at + len(mark) for at, mark in zip(starts, marks, strict=True))
    leaked = [mark for mark in marks if mark in after] or ([after] if is_cut or not text.endswith(after) else [])
    if between or leaked:
        raise Failed(f"it leaves {(between or leaked[0])!r:.60} in the content")


def _value(text: str) -> str | None:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return None
