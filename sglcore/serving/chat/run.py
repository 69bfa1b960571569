"""A chat in progress: messages become a prompt, and the model's text becomes reasoning, content and
tool calls.

The endpoints of all protocols convert their requests to `ChatRequest` and their answers from
`ChatEvent`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from sglcore.engine.outputs import Completion, PromptProgress, RequestOutput, TextDelta
from sglcore.engine.structured_output.guidance_schema import LeftOut
from sglcore.engine.structured_output.schema_loosening import loosened
from sglcore.sampling.grammar_spec import GrammarError, Thinking
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_output import FinishReason, TokenLogprob
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.chat.format import ChatFormat, Rendered
from sglcore.serving.chat.parsers.delta import Call, Delta, calls_of, text_of
from sglcore.serving.replicas.runs import Runs, check_answered, start_runs
from sglcore.serving.replicas.server_errors import InvalidRequest, blame
from sglcore.serving.replicas.unenforced_schemas import Unenforced, unenforced

ChatFinish = Literal[FinishReason, "tool_calls"]
ToolChoice = str | Mapping[str, Any]
LONG_TALK, LONG_TEXT = 100, 100_000
"""Number of messages and tools (LONG_TALK), or of characters (LONG_TEXT), above which a prompt is
rendered in a thread outside the event loop: a template may take a million steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation and the requested answer, in the form of OpenAI's chat endpoint, into which
    every protocol's requests are converted: messages, sampling parameters, tools and their choice,
    variables of the chat template, and the reasoning budget. Nothing is checked or rendered when it
    is made."""

    messages: Sequence[Mapping[str, Any]]
    """The messages of the conversation."""
    params: SamplingParams
    """The sampling parameters, without what the chat format adds."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """The tools that the model may call. None: none."""
    tool_choice: ToolChoice = "auto"
    """One of "none", "auto", "required", or `{"type": "function", "function": {"name": ...}}`."""
    parallel_tool_calls: bool = True
    """Whether an answer may have several calls. False: only its first call is kept."""
    progress: bool = False
    """Whether the run also yields the progress of the prompt."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Further variables of the chat template. None: none."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the beginning of an assistant's answer."""
    continue_final_message: bool = False
    """Whether the answer continues the content of the last message."""
    request_id: str | None = None
    """The id of the request. None: a new one."""
    form: str = "response_format"
    """The name of the field of the client's request that constrains the answer, for errors and
    warnings."""
    thinking_token_budget: int | None = None
    """Maximum number of reasoning tokens. None: no limit."""


@dataclass(frozen=True, slots=True)
class ChatEvent:
    """New data of sample number `index`: a delta, log-probabilities and ids of new tokens, and with
    the last event of the sample its `finish_reason`, all of them perhaps in one event; or the
    progress of the prompt (`progress`), alone and with `index` 0. `logprobs` None: not requested,
    or in an earlier event."""

    index: int
    delta: Delta | None = None
    finish_reason: ChatFinish | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    progress: PromptProgress | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class ChatMessage:
    """One sample of an answer: its deltas so far, and how it ended (None: it has not). `logprobs`:
    one record for each token (None: not requested)."""

    deltas: list[Delta] = field(default_factory=list)
    finish_reason: ChatFinish | None = None
    logprobs: list[TokenLogprob] | None = None

    @property
    def content(self) -> str:
        """The text of its content, "" if it has none."""
        return text_of(self.deltas, "content")

    @property
    def reasoning(self) -> str:
        """The text of its reasoning, "" if it has none."""
        return text_of(self.deltas, "reasoning")

    @property
    def tool_calls(self) -> list[Call]:
        """Its tool calls, in order; arguments as JSON text."""
        return calls_of(self.deltas)


class TextParser(Protocol):
    """Parses the text of one sample, part by part: `DeltaParser` or `_Content`."""

    def push(self, text: str) -> list[Delta]:
        """Parse more text; returns the deltas that it adds, perhaps none."""
        ...

    def finish(self) -> list[Delta]:
        """End the text; returns the deltas of text that was held back."""
        ...


class ChatRun(Runs):
    """The run of one prompt, as an async iterator of `ChatEvent`, for one consumer: events that
    were read are gone. Iterating raises the error that ended the run from outside. Use it as an
    async context manager, which ends the run."""

    def __init__(
        self, runs: Runs, request: ChatRequest, parsers: Sequence[TextParser], ignored: Sequence[str] = ()
    ) -> None:
        """`runs`: the generation of the one prompt, which this run takes over; `parsers`: one for
        each sample. `ignored`: names of chat_template_kwargs, and of other fields, that have no
        effect."""
        super().__init__(runs.generations, runs.held, runs.form, runs.check)
        self.request, self.ignored = request, tuple(ignored)
        parallel = request.parallel_tool_calls
        keeps = self.check is not None
        self._samples = [_Sample(index, parser, parallel, keeps=keeps) for index, parser in enumerate(parsers)]

    @property
    def output(self) -> RequestOutput:
        """The engine's output of the prompt so far; it grows in place."""
        return self.outputs[0]

    @property
    def first_token_at(self) -> float | None:
        """Time of the first token, by `time.perf_counter`; None: there is none yet."""
        return self.generations[0].first_token_at

    async def __aiter__(self) -> AsyncIterator[ChatEvent]:
        async for _, item in self._items():
            if isinstance(item, PromptProgress):
                yield ChatEvent(0, progress=item)
                continue
            sample = self.output.outputs[item.index]
            for event in self._samples[item.index].take(item, sample.stop_cause):
                if event.finish_reason is not None:
                    await self._look(sample)
                yield event

    async def _look(self, sample: Completion) -> None:
        """Check a finished sample for violations of schema parts that are not enforced: the
        arguments of its calls, or its content if it has no calls. Findings are appended to
        `sample.warnings`; nothing is raised."""
        if self.check is None:
            return
        deltas = self._samples[sample.index].kept
        calls = calls_of(deltas)
        for call in calls:
            place = next((place for place, name in enumerate(_names(self.request)) if name == call.name), None)
            await self.check.look(sample, f"tools[{place}]", call.arguments)
        if not calls:
            await self.check.look(sample, self.request.form, text_of(deltas, "content"))

    async def begin(self) -> tuple[ChatEvent, AsyncIterator[ChatEvent]]:
        """Return the first event and an iterator of the others; waits for the first. Raises an
        error that ended the run before it, and Unanswered if the run ended without an event,
        because an operator aborted it."""
        events = aiter(self)
        first = await anext(events, None)
        if first is None:
            check_answered(self.outputs)
        assert first is not None
        return first, events


class _Sample:
    """The parser of one sample, and what is remembered of its text: the arguments of its last tool
    call, and in `kept` its deltas."""

    def __init__(self, index: int, parser: TextParser, parallel: bool, *, keeps: bool) -> None:
        """`parallel` False: calls after the first are dropped; `keeps`: collect all deltas in
        `kept`."""
        self.kept: list[Delta] = []
        self._index, self._parser, self._parallel, self._keeps = index, parser, parallel, keeps
        self._arguments: str | None = None
        """Arguments of its last call; None: it has no calls."""
        self._unsent: tuple[int, ...] = ()

    def take(self, text: TextDelta, stop_cause: int | str | None) -> list[ChatEvent]:
        """Return the events of new text, perhaps none: token ids and log-probabilities are in the
        first event, the finish reason in the last. Ids without an event are kept for the next one.
        `stop_cause`: the stop string, pattern or token id that ended the sample (None: none)."""
        deltas = self._parser.push(text.text) if text.text else []
        if text.finish_reason is not None:
            deltas = [*deltas, *self._parser.finish()]
        kept = [delta for delta in deltas if self._parallel or not _is_later_call(delta)]
        if self._keeps:
            self.kept += kept
        for delta in kept:
            if delta.kind == "tool_start":
                self._arguments = ""
            elif delta.kind == "tool_arguments":
                self._arguments = (self._arguments or "") + delta.text
        self._unsent += text.token_ids
        if text.logprobs is None and text.finish_reason is None and not kept:
            return []
        ids, self._unsent = self._unsent, ()
        end = None if text.finish_reason is None else self._reason(text.finish_reason, stop_cause)
        if len(kept) < 2:
            return [ChatEvent(self._index, kept[0] if kept else None, end, text.logprobs, None, ids)]
        first, *others, last = kept
        return [
            ChatEvent(self._index, first, logprobs=text.logprobs, token_ids=ids),
            *(ChatEvent(self._index, delta) for delta in others),
            ChatEvent(self._index, last, end),
        ]

    def _reason(self, reason: FinishReason, stop_cause: int | str | None) -> ChatFinish:
        """Return the finish reason for the client: "tool_calls" for a sample that ended by "stop"
        after a call, but "stop" if a stop string cut the call's arguments; other reasons
        unchanged."""
        if reason != "stop" or self._arguments is None:
            return reason
        return "stop" if isinstance(stop_cause, str) and not _is_json(self._arguments) else "tool_calls"


async def start_chat(frontend: ChatFrontend, request: ChatRequest) -> ChatRun:
    """Render the prompt, send it to an engine and return the run; waits for that, not for the
    answer.

    Raises InvalidRequest if the template refuses the messages, if tools are requested but off, or
    if a call is forced without tools; SamplingError; and as `Frontend.generate`.
    """
    form, tools = frontend.format, tools_in_play(request)
    must_call = _must_call(request, tools)
    with blame("messages"):
        rendered = await render(frontend, request)
    params = _params(form, request, rendered, tools, must_call=must_call)
    is_free = params.grammar is None and params.thinking is None
    runs = await start_runs(
        frontend,
        [rendered.text],
        params,
        special=False,
        progress=request.progress,
        name=request.request_id,
        field="messages",
        form="" if is_free else "tools" if must_call else request.form,
        parts=_unenforced(request, must_call=must_call),
    )
    is_bound_at_once = request.params.grammar is not None and params.thinking is None and not tools
    parsers = [
        _Content()
        if is_bound_at_once
        else form.stream(tools=tools, reasoning_open=rendered.reasoning_open, tool_choice=request.tool_choice)
        for _ in range(params.n)
    ]
    has_no_use = request.thinking_token_budget is not None and params.thinking is None
    ignored = (*rendered.ignored, "thinking_token_budget") if has_no_use else rendered.ignored
    return ChatRun(runs, request, parsers, ignored)


def plain_run(runs: Runs, params: SamplingParams, form: str) -> ChatRun:
    """Return `runs`, of one prompt that is no conversation, as a chat: the whole text is content,
    which the field `form` of the request constrains (empty: none does). Nothing is started."""
    return ChatRun(runs, ChatRequest(messages=(), params=params, form=form), [_Content() for _ in range(params.n)])


def _unenforced(request: ChatRequest, *, must_call: bool) -> list[Unenforced]:
    """Return the parts of the request's schemas that are not enforced: of the answer's, and if a
    call is forced, of the tools'. Empty if all are enforced."""
    found = unenforced(request.form, request.params.grammar)
    for place, tool in enumerate(request.tools or () if must_call else ()):
        schema = tool.get("function", tool).get("parameters")
        if names := loosened(schema).left_out:
            found.append(Unenforced(f"tools[{place}]", LeftOut(json.dumps(schema, ensure_ascii=False), names)))
    return found


def _names(request: ChatRequest) -> list[str]:
    """Return the names of the request's tools, in order; "" for a tool without one."""
    return [tool.get("function", tool).get("name", "") for tool in request.tools or ()]


def _params(
    form: ChatFormat,
    request: ChatRequest,
    rendered: Rendered,
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    must_call: bool,
) -> SamplingParams:
    """Return the request's sampling parameters with the additions of the chat format: reasoning,
    calls, special tokens, end tokens. `tools`: those that the prompt shows (None: none);
    `must_call`: the answer must be a call. Raises InvalidRequest about `tools` or `tool_choice`."""
    params = replace(request.params, thinking=_thinking(form, request, rendered, must_call=must_call))
    if tools:
        with blame("tool_choice"), blame("tools", GrammarError):
            grammar = form.tool_grammar(
                tools,
                request.tool_choice,
                follows_reasoning=params.thinking is not None,
                parallel=request.parallel_tool_calls,
                answer=params.grammar,
            )
        params = replace(params, grammar=grammar)
    if not form.skip_special_tokens and params.skip_special_tokens:
        params = replace(params, skip_special_tokens=False)
    if form.stop_token_ids and not params.ignore_eos:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *form.stop_token_ids))
    return params


async def count_prompt(frontend: ChatFrontend, request: ChatRequest, param: str) -> int:
    """Return the number of tokens of a chat's prompt; waits for the template and the tokenizer,
    needs no engine. Raises InvalidRequest about the request's field `param`."""
    with blame(param):
        return len(await frontend.tokenize((await render(frontend, request)).text, special=False))


async def render(frontend: ChatFrontend, request: ChatRequest) -> Rendered:
    """Return the prompt of a chat; waits, and renders a long one in a thread. Raises TextError if
    the template refuses the messages, if tools are requested but off, or if the server runs without
    a tokenizer."""
    frontend.codec.need_text("a chat")
    return await asyncio.to_thread(_render, frontend, request) if _is_long(request) else _render(frontend, request)


def _is_long(request: ChatRequest) -> bool:
    if len(request.messages) + len(request.tools or ()) > LONG_TALK:
        return True
    texts = (message.get("content") or "" for message in request.messages)
    sizes = (
        len(text) if isinstance(text, str) else sum(len(part.get("text") or "") for part in text) for text in texts
    )
    return sum(sizes) > LONG_TEXT


def _render(frontend: ChatFrontend, request: ChatRequest) -> Rendered:
    return frontend.format.render(
        request.messages,
        tools=tools_in_play(request),
        tool_choice=request.tool_choice,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
    )


async def collect_chat(run: ChatRun) -> list[ChatMessage]:
    """Return all samples as whole messages, by their index; waits until each has ended. A sample
    that failed has its `finish_reason`; an error that ended the run from outside is raised."""
    await run.ended()
    messages = [ChatMessage() for _ in run.output.outputs]
    async for event in run:
        if event.progress is not None:
            continue
        message = messages[event.index]
        message.finish_reason = event.finish_reason
        if event.delta is not None:
            message.deltas.append(event.delta)
        if event.logprobs is not None:
            message.logprobs = message.logprobs or []
            message.logprobs += event.logprobs
    return messages


def tools_in_play(request: ChatRequest) -> Sequence[Mapping[str, Any]] | None:
    """Return the tools that the prompt shows, in OpenAI's form; None if there are none, or if
    `tool_choice` is "none"."""
    return request.tools if request.tools and request.tool_choice != "none" else None


def _must_call(request: ChatRequest, tools: Sequence[Mapping[str, Any]] | None) -> bool:
    """Return whether the answer must be a call: `tool_choice` is neither "none" nor "auto".
    `tools`: those that the prompt shows. Raises InvalidRequest if a call is required and there are
    no tools."""
    if request.tool_choice in ("none", "auto"):
        return False
    if not tools:
        raise InvalidRequest("tool_choice requires a call", wanted="tools", remedy="give tools", param="tool_choice")
    return True


def _thinking(form: ChatFormat, request: ChatRequest, rendered: Rendered, *, must_call: bool) -> Thinking | None:
    """Return the constraint for the reasoning before an answer that a grammar constrains, or for
    reasoning with a budget; None if neither applies or there is no reasoning.

    None also if the answer continues a message in which the reasoning has ended.
    """
    if request.continue_final_message and not rendered.reasoning_open:
        return None
    return form.thinking(
        rendered,
        is_bound=must_call or request.params.grammar is not None,
        may_call=tools_in_play(request) is not None,
        must_call=must_call,
        budget=request.thinking_token_budget,
    )


class _Content:
    """The parser of an answer without reasoning and calls: the whole text is content."""

    def push(self, text: str) -> list[Delta]:
        """Return the text itself as one delta of content."""
        return [Delta("content", text)]

    def finish(self) -> list[Delta]:
        """Return an empty list: no text is held back."""
        return []


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_later_call(delta: Delta) -> bool:
    return delta.kind in ("tool_start", "tool_arguments") and delta.index > 0
