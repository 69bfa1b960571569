"""The known formats of tool calls and reasoning as data: the evidence for each, its markers, and
its parser."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglcore.serving.chat.parsers import harmony as channels
from sglcore.serving.chat.parsers import json_calls as calls
from sglcore.serving.chat.parsers import notated_calls, xml_calls
from sglcore.serving.chat.parsers.json_calls import Marked
from sglcore.serving.chat.parsers.notated_calls import Notation
from sglcore.serving.chat.parsers.parser import ReasoningFamily, ToolScan


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """One format of tool calls: its name and aliases for `--tool-parser`, the texts of templates
    that are evidence for it, its markers, its parser (`calls`), and perhaps a function that writes
    calls. TOOLS has all known ones, as constants."""

    name: str
    """The name of its parser, as `--tool-parser` gives it."""
    evidence: tuple[str, ...]
    """Texts of chat templates. A template that contains all of them may use this format."""
    opening: tuple[str, ...]
    """Texts with which a call may begin."""
    marks: tuple[str, ...]
    """Markers of a well-formed call, which no client should see."""
    calls: ToolScan
    """The parser of the content and calls of an answer, after its reasoning."""
    aliases: tuple[str, ...] = ()
    """Names of this parser in other engines, which `--tool-parser` accepts too."""
    has_short_ids: bool = False
    """Whether ids of calls must be nine letters and digits."""
    has_numbered_ids: bool = False
    """Whether ids of calls must be `functions.NAME:NUMBER`, from which the template reads the
    name."""
    write: Callable[[Sequence[Mapping[str, Any]]], str] | None = None
    """Writes calls as text, for templates that write none. None: this format needs a template that
    does."""
    stops: tuple[str, ...] = ()
    """Texts of tokens that end the model's turn, in addition to the checkpoint's end tokens."""


def _tagged(name: str, tags: xml_calls.Tags, *aliases: str) -> ToolFamily:
    return ToolFamily(name, (tags.function[0], tags.key[0]), tags.opening, tags.marks, tags, aliases)


def _marked(name: str, calls: Marked | Notation, *aliases: str, writes: bool = False) -> ToolFamily:
    write = calls.write if writes else None
    return ToolFamily(name, (calls.begin,), (calls.begin,), calls.marks, calls, aliases, write=write)


TOOLS = (
    ToolFamily(
        name="harmony",
        evidence=(f"{channels.CHANNEL}commentary", channels.MESSAGE),
        opening=(channels.RECIPIENT, f"{channels.CHANNEL}commentary{channels.RECIPIENT}"),
        marks=(channels.START, channels.CHANNEL, channels.MESSAGE, channels.END, channels.CONSTRAIN),
        calls=channels.harmony,
        aliases=("openai", "gpt-oss", "gpt_oss"),
        stops=(channels.CALL,),
    ),
    _tagged("qwen3_coder", xml_calls.QWEN3_CODER, "qwen3_xml", "nemotron_v3"),
    _tagged("glm", xml_calls.GLM, "glm45", "glm47"),
    _tagged("minimax", xml_calls.MINIMAX, "minimax-m2", "minimax_m2"),
    ToolFamily(
        name="deepseek",
        evidence=(calls.BEGIN, calls.SEPARATOR),
        opening=(calls.BEGIN,),
        marks=(calls.BEGIN, calls.END, calls.ONE_BEGIN, calls.ONE_END, calls.SEPARATOR),
        calls=calls.deepseek,
        aliases=("deepseek_v3", "deepseekv3", "deepseek_v31", "deepseekv31"),
    ),
    ToolFamily(
        name="mistral",
        evidence=(calls.TOOL_CALLS,),
        opening=(calls.TOOL_CALLS,),
        marks=(calls.TOOL_CALLS, calls.ARGS, calls.CALL_ID),
        calls=calls.mistral,
        has_short_ids=True,
    ),
    ToolFamily(
        name="kimi",
        evidence=(calls.SECTION, calls.ARGUMENT),
        opening=(calls.SECTION,),
        marks=(calls.SECTION, calls.CALL_BEGIN, calls.ARGUMENT, calls.CALL_DONE, calls.SECTION_END),
        calls=calls.kimi,
        aliases=("kimi_k2",),
        has_numbered_ids=True,
    ),
    _marked("granite", calls.GRANITE, "phi4_mini_json", writes=True),
    _marked("nemotron", calls.NEMOTRON, "nemotron_json"),
    _marked("lfm2", notated_calls.LFM2, "pythonic", writes=True),
    _marked("lfm2_json", calls.LFM2),
    _marked("gemma", notated_calls.GEMMA, "gemma4"),
    _marked("functiongemma", notated_calls.FUNCTION_GEMMA),
    _marked("hermes", calls.HERMES, "qwen", "qwen25", "granite4"),
    ToolFamily(
        name="llama3",
        evidence=('"parameters"',),
        opening=(calls.PYTHON_TAG, "{"),
        marks=(calls.PYTHON_TAG,),
        calls=calls.llama3,
        aliases=("llama3_json", "llama4_json"),
    ),
)
"""The known formats of tool calls, the more specific ones first: the first with evidence that
passes its test is chosen."""

REASONING = (
    ReasoningFamily(name="granite", marks=("<think>", "</think>"), hidden=("<response>", "</response>")),
    ReasoningFamily(
        name="think",
        marks=("<think>", "</think>"),
        aliases=("qwen3", "deepseek_r1", "deepseek-r1", "deepseek_v3", "qwen3-thinking"),
    ),
    ReasoningFamily(name="mistral", marks=("[THINK]", "[/THINK]")),
    ReasoningFamily(name="gemma", marks=("<|channel>thought", "<channel|>"), aliases=("gemma4",)),
    ReasoningFamily(
        name="harmony",
        marks=(f"{channels.CHANNEL}analysis{channels.MESSAGE}", channels.END),
        aliases=("openai_gptoss", "gpt-oss", "gpt_oss"),
        resume=f"{channels.START}assistant",
        opening=f"{channels.CHANNEL}final{channels.MESSAGE}",
        answer=channels.harmony,
    ),
)

OFF = frozenset({"off", "none"})
