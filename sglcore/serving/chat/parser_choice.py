"""Chooses the parsers of tool calls and reasoning for a checkpoint: by evidence in its template and
tokenizer, then by their self-tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from sglcore.core.errors import ConfigError
from sglcore.engine.tokenizers.chat_template import ChatTemplate, TextError
from sglcore.engine.tokenizers.skipped_tokenizer import SKIPPED
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.serving.chat.conversation import MessageForm
from sglcore.serving.chat.parsers.families import OFF, REASONING, TOOLS, ToolFamily
from sglcore.serving.chat.parsers.parser import ReasoningFamily
from sglcore.serving.chat.self_test import Candidate, Failed, Sample, check_reasoning, check_tools

F = TypeVar("F", ToolFamily, ReasoningFamily)


@dataclass(frozen=True, slots=True)
class Choice(Generic[F]):
    """The chosen family (None: no parser) and the reason, a text for the ledger. `sample`: calls
    from its passed test, for tool calls (None: for reasoning, or no parser)."""

    family: F | None
    reason: str
    sample: Sample | None = None
    is_failure: bool = False
    """Whether there was evidence of a format, but the parser failed its test."""


def special_texts(codec: TextCodec) -> set[str]:
    """Return the texts of the special tokens, which decoding may leave out."""
    return {token.content for token in codec.tokenizer.get_added_tokens_decoder().values() if token.special}


def content_form(template: ChatTemplate) -> MessageForm:
    """Return the message form for the template with only `parts` decided: whether it reads content
    as a string, which is preferred, or as a list of parts. A template that shows neither gets
    strings."""
    for parts in (False, True):
        content = [{"type": "text", "text": "probe"}] if parts else "probe"
        try:
            if "probe" in template.render([{"role": "user", "content": content}]):
                return MessageForm(parts=parts)
        except TextError:
            continue
    return MessageForm()


def choose_tools(
    codec: TextCodec, name: str, reasoning: ReasoningFamily | None, form: MessageForm
) -> Choice[ToolFamily]:
    """Return the first family of tool calls that has evidence and passes its test, or the family
    with the name or alias `name`, if it is not "auto". No family, with the reason, for "off" or
    "none", without a tokenizer, and if none passes. `reasoning`: the chosen family of reasoning
    (None: none); `form`: as `content_form` returns it. Raises ConfigError if a family requested by
    name is unknown or fails."""
    if name in OFF:
        return Choice(None, "turned off")
    absent = _no_tools(codec.template) if codec.reads_text else SKIPPED
    if name != "auto":
        return _named_tools(codec, _known(name, TOOLS, "tool parser"), reasoning, form, absent)
    if absent:
        return Choice(None, absent)
    failures: list[str] = []
    for family in _candidates(codec):
        try:
            sample = _test(codec, family, reasoning, form)
            writer = "this server" if sample.form.write else "the chat template"
            return Choice(family, f"{writer} writes {family.evidence[0]}; its calls were read back", sample)
        except Failed as error:
            failures.append(f"{family.name} failed its test: {error}")
    known = ", ".join(family.name for family in TOOLS)
    nothing = f"the chat template does not write calls in a known format ({known})"
    if not _writes_calls(codec):
        nothing = "this checkpoint's chat template writes no tool calls"
    return Choice(None, "; ".join(failures) or nothing, is_failure=bool(failures))


def choose_reasoning(codec: TextCodec, name: str) -> Choice[ReasoningFamily]:
    """Return the first family of reasoning with markers in the template or the tokenizer, or the
    family with the name or alias `name`, if it is not "auto". No family, with the reason, for "off"
    or "none", without a tokenizer, without markers, and if that first family fails its test: no
    other is tried. Raises ConfigError if a family requested by name is unknown or fails."""
    if name in OFF:
        return Choice(None, "turned off")
    if name != "auto":
        family = _known(name, REASONING, "reasoning parser")
        if not codec.reads_text:
            raise ConfigError(f"the reasoning parser {family.name} cannot be used: {SKIPPED}")
        try:
            _test_reasoning(codec, family)
        except Failed as error:
            raise ConfigError(f"the reasoning parser {family.name} failed its test: {error}") from None
        return Choice(family, "requested; its test passed")
    if not codec.reads_text:
        return Choice(None, SKIPPED)
    for family in REASONING:
        source = _evidence(codec, family)
        if not source:
            continue
        try:
            _test_reasoning(codec, family)
        except Failed as error:
            return Choice(None, f"{family.name} failed its test: {error}", is_failure=True)
        return Choice(family, f"{source} has {' and '.join(family.marks)}; its test passed")
    return Choice(None, "neither the chat template nor the tokenizer has markers of reasoning")


def _named_tools(
    codec: TextCodec, family: ToolFamily, reasoning: ReasoningFamily | None, form: MessageForm, absent: str
) -> Choice[ToolFamily]:
    if not (absent or family.write or _writes_calls(codec)):
        absent = "this checkpoint's chat template writes no tool calls"
    if absent:
        raise ConfigError(f"the tool parser {family.name} cannot be used: {absent}")
    try:
        sample = _test(codec, family, reasoning, form)
    except Failed as error:
        raise ConfigError(f"the tool parser {family.name} failed its test: {error}") from None
    return Choice(family, "requested; the chat template's calls were read back", sample)


def _test(codec: TextCodec, family: ToolFamily, reasoning: ReasoningFamily | None, form: MessageForm) -> Sample:
    marks = (*family.marks, *(reasoning.marks if reasoning else ()))
    write = None if _writes_calls(codec) else family.write
    form = replace(form, numbered=family.has_numbered_ids, write=write)
    return check_tools(Candidate(codec, family, reasoning, not special_texts(codec) & set(marks)), form)


def _test_reasoning(codec: TextCodec, family: ReasoningFamily) -> None:
    check_reasoning(codec, family, not special_texts(codec) & set(family.marks))


def _no_tools(template: ChatTemplate) -> str:
    """Return the reason why a template cannot offer tools to the model; "" if it can."""
    source = template.source(tools=True)
    if source is None:
        return "this checkpoint has no chat template"
    try:
        names = template.variables(tools=True)
    except TextError as error:
        return str(error)
    if "tools" not in names:
        return "this checkpoint's chat template has no place for tools"
    return ""


def _writes_calls(codec: TextCodec) -> bool:
    """Return whether the template writes the calls of earlier turns: whether its source reads
    `tool_calls`."""
    return "tool_calls" in (codec.template.source(tools=True) or "")


def _candidates(codec: TextCodec) -> list[ToolFamily]:
    """Return the families of tool calls, in the order of TOOLS, with all evidence in the template.
    If the template writes no calls: only families that can write calls themselves, with evidence in
    the template or the tokenizer's added tokens."""
    found = codec.template.literals(tools=True)
    if _writes_calls(codec):
        return [family for family in TOOLS if all(mark in found for mark in family.evidence)]
    found += "\n".join(_added(codec))
    return [family for family in TOOLS if family.write and all(mark in found for mark in family.evidence)]


def _evidence(codec: TextCodec, family: ReasoningFamily) -> str:
    """Return what has all markers of a family, "the chat template" or "the tokenizer" (as added
    tokens); "" if neither has."""
    try:
        literals = codec.template.literals()
    except TextError:
        literals = ""
    # Marks around content count only if they are adjacent; apart they may be those of a tool's
    # answer.
    if all(mark in literals for mark in (*family.marks, "".join(family.hidden))):
        return "the chat template"
    return "the tokenizer" if _added(codec).issuperset(family.marks + family.hidden) else ""


def _added(codec: TextCodec) -> set[str]:
    return {token.content for token in codec.tokenizer.get_added_tokens_decoder().values()}


def _known(name: str, families: tuple[F, ...], what: str) -> F:
    for family in families:
        if name in (family.name, *family.aliases):
            return family
    names = ", ".join(["auto", "off", *(family.name for family in families)])
    raise ConfigError(f"there is no {what} {name!r}", wanted=f"one of {names}")
