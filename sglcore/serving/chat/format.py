"""The chat format of a checkpoint: how a conversation becomes a prompt, and how answers are parsed.

Chosen once, from evidence in the template and the tokenizer; every parser that is used has passed
its self-test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglcore.core.ledger import Row
from sglcore.engine.tokenizers.chat_template import ChatTemplate, Message, TextError
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.sampling.grammar_spec import Grammar, Thinking
from sglcore.serving.chat.call_grammar import call_grammar
from sglcore.serving.chat.conversation import MessageForm, as_template_reads
from sglcore.serving.chat.parser_choice import Choice, choose_reasoning, choose_tools, content_form, special_texts
from sglcore.serving.chat.parsers.families import ToolFamily
from sglcore.serving.chat.parsers.parser import DeltaParser, ReasoningFamily
from sglcore.serving.chat.self_test import Sample, new_ids

Tools = Sequence[Mapping[str, Any]]

CUT = "\x02cut\x03"
"""A mark that is added to the last message before rendering, to find where the answer continues
it."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text. `ignored`: names of chat_template_kwargs that the template does not read,
    sorted."""

    text: str
    reasoning_open: bool = False
    """Whether the prompt ends inside a block of reasoning."""
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatFormat:
    """How conversations of a checkpoint become prompts and how its answers are parsed; `detect`
    makes it, once for a server. It does not change."""

    template: ChatTemplate
    """The chat template."""
    form: MessageForm
    """The form of messages that the template needs."""
    tool_parser: str | None
    """The name of the parser of tool calls. None: tools are off."""
    tool_reason: str
    """Why this parser of tool calls was chosen, or why tools are off."""
    reasoning_parser: str | None
    """The name of the parser of reasoning. None: reasoning is not separated from content."""
    reasoning_reason: str
    """Why this parser of reasoning was chosen, or why there is none."""
    rows: tuple[Row, ...]
    """The ledger's rows about both parsers."""
    skip_special_tokens: bool
    """Whether answers are decoded without special tokens. False if markers of a parser are special
    tokens."""
    _tools: ToolFamily | None = None
    """The format of tool calls. None: tools are off."""
    _reasoning: ReasoningFamily | None = None
    """The format of reasoning. None: reasoning is not recognised."""
    _sample: Sample | None = None
    """Calls that the template wrote in the parser's test. None: no test was passed."""
    _controls: tuple[str, ...] = ()
    """Special tokens other than markers, which are removed from answers if these are decoded with
    special tokens."""
    _added: Mapping[str, int] = field(default_factory=dict)
    """Ids of the tokenizer's added tokens, by their text."""

    @classmethod
    def detect(cls, codec: TextCodec, *, tool_parser: str = "auto", reasoning_parser: str = "auto") -> ChatFormat:
        """Choose and test the parsers for a tokenizer and template. `tool_parser` and
        `reasoning_parser`: a name, "auto" to choose by evidence, or "off". Raises ConfigError if a
        parser requested by name is unknown or fails its test; with "auto" there is no parser then,
        and `rows` says why."""
        reasoning = choose_reasoning(codec, reasoning_parser)
        form = content_form(codec.template)
        tools = choose_tools(codec, tool_parser, reasoning.family, form)
        marks = (*(tools.family.marks if tools.family else ()), *(reasoning.family.marks if reasoning.family else ()))
        special = special_texts(codec)
        has_special = bool(special & set(marks))
        return cls(
            template=codec.template,
            form=tools.sample.form if tools.sample else form,
            tool_parser=tools.family.name if tools.family else None,
            tool_reason=tools.reason,
            reasoning_parser=reasoning.family.name if reasoning.family else None,
            reasoning_reason=reasoning.reason,
            rows=(_row("tool parser", tool_parser, tools), _row("reasoning parser", reasoning_parser, reasoning)),
            skip_special_tokens=not has_special,
            _tools=tools.family,
            _reasoning=reasoning.family,
            _sample=tools.sample,
            _controls=tuple(sorted(special - set(marks))) if has_special else (),
            _added={token.content: number for number, token in codec.tokenizer.get_added_tokens_decoder().items()},
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids of tokens that end the model's turn in this format, in addition to the checkpoint's
        end tokens; empty if tools are off or the format has none."""
        stops = self._tools.stops if self._tools else ()
        return tuple(self._added[text] for text in stops if text in self._added)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        tool_choice: Any = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Return the prompt of a conversation. `tools`: in OpenAI's form, hidden from the template
        with `tool_choice` "none"; `continue_final_message`: the answer continues the last message's
        content, and `add_generation_prompt` must be False. The messages are converted to the form
        that the template reads. Raises TextError if the template refuses the messages, or if tools
        are requested but off."""
        offered = self._offered(tools, tool_choice)
        if offered and self._tools is None:
            raise TextError(f"tools are off: {self.tool_reason}", remedy="ask without tools", field="tools")
        variables = dict(chat_template_kwargs or {})
        known = self.template.variables(tools=bool(offered))
        ignored = tuple(sorted(variables.keys() - known))
        listed = self._readable(messages)
        if continue_final_message:
            text, is_open = self._continued(listed, offered, add_generation_prompt, variables)
            return Rendered(text, is_open, ignored)
        text = self.template.render(
            listed, tools=offered, add_generation_prompt=add_generation_prompt, variables=variables
        )
        return Rendered(text, self._is_open(text), ignored)

    def stream(self, *, tools: Tools | None, reasoning_open: bool, tool_choice: Any = "auto") -> DeltaParser:
        """Return a new parser for the text of one answer. Without tools, with `tool_choice` "none",
        or if tools are off, text that looks like a call is content. `reasoning_open`: from
        `Rendered`, whether the prompt ends inside reasoning."""
        offered = self._offered(tools, tool_choice)
        return DeltaParser(
            calls=self._tools.calls if self._tools and offered else None,
            tools=offered or (),
            reasoning=self._reasoning,
            reasoning_open=reasoning_open,
            controls=self._controls,
            new_id=new_ids(self._tools),
        )

    def tool_grammar(
        self,
        tools: Tools,
        tool_choice: Any,
        *,
        follows_reasoning: bool = False,
        parallel: bool = True,
        answer: Grammar | None = None,
    ) -> Grammar | None:
        """Return a grammar that forces calls: of any tool for `tool_choice` "required", or of the
        function that it names. For other choices: a grammar of calls or the `answer`; without an
        `answer`, None.

        `follows_reasoning`: white space may come first; `parallel`: several calls are allowed,
        except of a named function. If calls may occur within reasoning and none is forced, `answer`
        itself is returned. Calls are written as the checkpoint's template writes them. Raises
        TextError if tools are off or the named function is not in `tools`, and GrammarError for
        parameters that cannot be enforced.
        """
        name = _chosen_name(tool_choice)
        is_forced = name is not None or tool_choice == "required"
        if not is_forced and (answer is None or (self._reasoning and self._reasoning.opening)):
            return answer
        if self._tools is None or self._sample is None:
            raise TextError(f"tools are off: {self.tool_reason}", remedy="ask without tools", field="tools")
        functions = [tool.get("function", tool) for tool in tools]
        forced = [function for function in functions if name in (None, function["name"])]
        if not forced:
            raise TextError(
                f"tool_choice names {name!r}", wanted=f"one of {', '.join(each['name'] for each in functions)}"
            )
        return call_grammar(
            self._tools,
            self._sample,
            forced,
            self._added,
            is_parallel=parallel and name is None,
            follows_reasoning=follows_reasoning,
            answer=None if is_forced else answer,
        )

    def thinking(
        self,
        rendered: Rendered,
        *,
        is_bound: bool,
        may_call: bool = False,
        must_call: bool = False,
        budget: int | None = None,
    ) -> Thinking | None:
        """Return the constraint for the reasoning before an answer that a grammar constrains
        (`is_bound`) or that has a token `budget` for its reasoning. `may_call`, `must_call`:
        whether calls are allowed or forced. None: neither applies, there is no reasoning, or tokens
        do not separate it from the answer."""
        family = self._reasoning
        if family is None or not (is_bound or budget is not None):
            return None
        start, end = family.marks
        if family.opening and not must_call:
            # Reasoning and calls may be anywhere before the channel of the answer. Each begins with
            # its own channel.
            closing = end + family.resume + family.opening
            channel = next((text for text in self._added if text and family.opening.startswith(text)), "")
            begin = "" if rendered.reasoning_open else channel
            return Thinking(family.opening, closing, begin, budget, may_stop=may_call or not is_bound)
        end += family.resume
        if rendered.reasoning_open:
            return Thinking(end, end, budget=budget, may_stop=not is_bound)
        if start not in self._added or rendered.text.rstrip().endswith(end):
            return None
        return Thinking(end, end, start, budget, may_stop=not is_bound)

    def _readable(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages in the form that the template needs, as new objects. Raises TextError
        for calls that it cannot write, and for messages of a wrong form."""
        listed = as_template_reads(messages, self.form)
        has_calls = any(message.get("tool_calls") for message in listed)
        if has_calls and "tool_calls" not in (self.template.source(tools=True) or ""):
            raise TextError("messages hold tool calls", wanted=f"none: {self.tool_reason}")
        return listed

    def _continued(
        self, messages: list[dict[str, Any]], tools: Tools | None, add_prompt: bool, variables: Mapping[str, Any]
    ) -> tuple[str, bool]:
        """Return the prompt up to the end of the last message's content, and whether it ends inside
        reasoning. Raises TextError if the message cannot be continued."""
        if add_prompt:
            raise TextError(
                "continue_final_message and add_generation_prompt are both true",
                remedy="set the second one to false",
                field="add_generation_prompt",
            )
        last = messages[-1] if messages else {}
        content = last.get("content")
        if self.form.parts and content:
            marked: Any = [*content[:-1], {**content[-1], "text": content[-1]["text"] + CUT}]
        elif isinstance(content, str):
            marked = content + CUT
        else:
            raise TextError("the last message has no content that could go on")
        text = self.template.render(
            [*messages[:-1], {**last, "content": marked}], tools=tools, add_generation_prompt=False, variables=variables
        )
        text, found, _ = text.rpartition(CUT)
        if not found:
            raise TextError("the chat template leaves out the end of the last message", remedy="end with another one")
        return text, self._is_open(text, str(content))

    def _is_open(self, text: str, content: str = "") -> bool:
        """Return whether a prompt ends inside a block of reasoning: after its start marker, or
        inside `content`, the content of the last message, if the answer continues it ("": it does
        not)."""
        if self._reasoning is None:
            return False
        start, end = self._reasoning.marks
        return text.rstrip().endswith(start) or content.rfind(start) > content.rfind(end)

    def _offered(self, tools: Tools | None, tool_choice: Any) -> Tools | None:
        return self.form.tools(tools) if tools and tool_choice != "none" else None


def _chosen_name(tool_choice: Any) -> str | None:
    """Return the name of the function that a `tool_choice` object names, with or without OpenAI's
    `function` around it; None for a word such as "auto", or if it names none."""
    if not isinstance(tool_choice, Mapping):
        return None
    function = tool_choice.get("function", tool_choice)
    return function.get("name") if isinstance(function, Mapping) else None


def _row(topic: str, requested: str, choice: Choice) -> Row:
    effective = choice.family.name if choice.family else "off"
    remedy = f"--{topic.replace(' ', '-')} NAME tests one by name" if choice.is_failure else ""
    return Row(topic, requested, effective, choice.reason, remedy, downgrade=choice.is_failure)
