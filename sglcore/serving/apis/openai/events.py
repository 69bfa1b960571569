"""Makes OpenAI's answers to completions and chats: the whole answer, or the events of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

from sglcore.engine.outputs import Completion, PromptProgress, RequestOutput, TextDelta
from sglcore.serving.apis.answer import DONE, cut_of, encode, error_body, event, warnings_of
from sglcore.serving.apis.logprob_records import CompletionLogprobs, chat_logprobs, prompt_scores
from sglcore.serving.apis.openai.body import ChatBody, CompletionBody
from sglcore.serving.apis.request_params import GenerationFields
from sglcore.serving.apis.shown_states import shown_states
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.apis.writer import Run, Writer
from sglcore.serving.chat.parsers.delta import Delta
from sglcore.serving.chat.run import ChatEvent, ChatMessage, ChatRun, collect_chat
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.runs import Runs, check_answered, failure_of


class _Writer(Writer[Run]):
    """The common part of the writers of completions and of chats; one serves one request. `id`: the
    id of the answer."""

    def __init__(self, frontend: Frontend, texts: TokenTexts, body: GenerationFields, prefix: str, chunk: str) -> None:
        """`prefix`: the beginning of the answer's id; `chunk`: the field `object` of a stream's
        events. Raises InvalidRequest if the body's model is not served, and NotReady."""
        super().__init__(frontend, body.model)
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self._texts, self._chunk = texts, chunk
        self._about = {"created": int(time.time()), "model": self.model}
        wanted = body.stream_options
        self._counts_along = wanted is not None and bool(wanted.continuous_usage_stats)
        self._tells_usage = self._counts_along or (wanted is not None and bool(wanted.include_usage))

    def _frame(self, kind: str) -> dict[str, Any]:
        """Return the first fields of the answer, or of a stream's event, as a new dict: id, object
        (`kind`), created, model and fingerprint."""
        return {"id": self.id, "object": kind, **self._about, "system_fingerprint": self.fingerprint}

    def _chunks(self, runs: Runs) -> Callable[[dict[str, Any]], bytes]:
        """Return a function that encodes the varying fields of a chunk (at least one) as an event.
        The constant fields are encoded once, with the first chunk: only then is the engine's
        fingerprint known. The usage of `runs` so far is added to each chunk if the request wants
        it."""
        is_empty = self._tells_usage and not self._counts_along
        begin = b""

        def chunk(rest: dict[str, Any]) -> bytes:
            nonlocal begin
            if not begin:
                constant = event({**self._frame(self._chunk), **({"usage": None} if is_empty else {})})
                begin = constant[:-3] + b","  # without the end of the object and of the event
            if self._counts_along:
                rest = {**rest, "usage": self._usage(runs.outputs)}
            return begin + encode(rest)[1:] + b"\n\n"

        return chunk

    def _last(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the bytes of the last events of a stream: the usage if requested, and DONE. Raises
        Unanswered if every sample failed."""
        check_answered(outputs)
        usage = {**self._frame(self._chunk), "choices": [], "usage": self._usage(outputs)}
        return (event(usage) if self._tells_usage else b"") + DONE

    def _usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        samples = [sample for output in outputs for sample in output.outputs]
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        made = sum(len(sample.token_ids) for sample in samples)
        found: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs)},
        }
        proposed = sum(sample.proposed_tokens for sample in samples)
        accepted = sum(sample.accepted_tokens for sample in samples)
        details: dict[str, int] = {}
        if proposed:
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": proposed - accepted}
        if (cut := cut_of(outputs)) is not None:
            details["max_tokens"] = cut
        return {**found, "completion_tokens_details": details} if details else found


class ChatWriter(_Writer[ChatRun]):
    """Writes the answer to one chat request, as a whole or as a stream. One writer serves one
    run."""

    def __init__(self, frontend: Frontend, texts: TokenTexts, body: ChatBody) -> None:
        super().__init__(frontend, texts, body, "chatcmpl", "chat.completion.chunk")
        self._body = body

    async def answer(self, run: ChatRun) -> dict[str, Any]:
        """Return the whole answer; waits for all samples. Raises Unanswered if all failed."""
        messages, body = await collect_chat(run), self._body
        output = run.output
        check_answered([output])
        answer = {
            **self._frame("chat.completion"),
            "choices": [
                {**self._choice(*found), **await shown_states(found[1], body.return_hidden_states)}
                for found in zip(messages, output.outputs, strict=True)
            ],
            "usage": self._usage([output]),
        }
        if body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_scores(self._texts, output.prompt_logprobs, body.prompt_logprobs)
        return answer

    async def events(self, run: ChatRun) -> AsyncGenerator[bytes, None]:
        """Yield all encoded events as they happen; the last one is DONE. If every sample failed,
        Unanswered is raised in its place; the failure of some is in their last chunk."""
        chunk, begun = self._chunks(run), set[int]()
        async for found in run:
            if found.progress is not None:
                yield chunk({"choices": [], "prompt_progress": _progress(found.progress)})
                continue
            if found.index not in begun:
                begun.add(found.index)
                yield chunk(self._first(found.index, run.output))
            part = self._part(found, run.output)
            if found.finish_reason is not None:
                part |= await shown_states(run.output.outputs[found.index], self._body.return_hidden_states)
            yield chunk({"choices": [part]})
        yield self._last([run.output])

    def _choice(self, message: ChatMessage, sample: Completion) -> dict[str, Any]:
        calls = message.tool_calls
        found: dict[str, Any] = {"role": "assistant", "content": message.content or (None if calls else "")}
        if message.reasoning:
            found["reasoning_content"] = message.reasoning
        if calls:
            found["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        choice = {
            "index": sample.index,
            "message": found,
            "logprobs": self._logprobs(message.logprobs),
            **_ending(sample, message.finish_reason, self._body),
        }
        return {**choice, "token_ids": sample.token_ids} if self._body.return_token_ids else choice

    def _first(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """Return the varying fields of the first chunk of sample number `index`, which has the role
        and no text; with `return_token_ids` also the prompt's ids."""
        delta = {"role": "assistant", "content": ""}
        first: dict[str, Any] = {"choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}
        if self._body.return_token_ids:
            first["prompt_token_ids"] = output.prompt_token_ids
        return first

    def _part(self, found: ChatEvent, output: RequestOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": found.index,
            "delta": {} if found.delta is None else _delta(found.delta),
            "logprobs": self._logprobs(found.logprobs),
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = found.token_ids
        if found.finish_reason is not None:
            choice |= _ending(output.outputs[found.index], found.finish_reason, self._body)
        return choice

    def _logprobs(self, found: Any) -> dict[str, Any] | None:
        return None if found is None else chat_logprobs(self._texts, found, self._body.top_logprobs or 0)


class CompletionWriter(_Writer[Runs]):
    """Writes the answer to one request for completions, as a whole or as a stream. One writer
    serves one request."""

    def __init__(self, frontend: Frontend, texts: TokenTexts, body: CompletionBody) -> None:
        super().__init__(frontend, texts, body, "cmpl", "text_completion")
        self._codec, self._body = frontend.codec, body
        self._gives_ids = body.return_token_ids or not frontend.codec.reads_text
        self._shows_special = body.skip_special_tokens is False

    async def answer(self, runs: Runs) -> dict[str, Any]:
        """Return the whole answer; waits for all samples. Raises Unanswered if all failed."""
        outputs = await runs.wait()
        check_answered(outputs)
        samples = [(output, sample) for output in outputs for sample in output.outputs]
        return {
            **self._frame(self._chunk),
            "choices": [
                {**self._choice(place, *found), **await shown_states(found[1], self._body.return_hidden_states)}
                for place, found in enumerate(samples)
            ],
            "usage": self._usage(outputs),
        }

    async def events(self, runs: Runs) -> AsyncGenerator[bytes, None]:
        """Yield all encoded events as they happen; the last one is DONE. If every sample failed,
        Unanswered is raised in its place; the failure of some is in their last chunk."""
        chunk, records = self._chunks(runs), dict[int, CompletionLogprobs]()
        async for place, item in runs.read():
            if isinstance(item, PromptProgress):
                yield chunk({"choices": [], "prompt_progress": _progress(item)})
                continue
            part = self._part(place * (self._body.n or 1) + item.index, runs.outputs[place], item, records)
            if part is not None and item.finish_reason is not None:
                sample = runs.outputs[place].outputs[item.index]
                part |= await shown_states(sample, self._body.return_hidden_states)
            if part is not None:
                yield chunk({"choices": [part]})
        yield self._last(runs.outputs)

    def _usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the usage; with `max_tokens` 0, which only scores the prompt, without output
        tokens."""
        found = super()._usage(outputs)
        if self._body.max_tokens == 0:
            found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return found

    def _choice(self, place: int, output: RequestOutput, sample: Completion) -> dict[str, Any]:
        body = self._body
        is_scored_only = body.max_tokens == 0
        choice: dict[str, Any] = {
            "index": place,
            "text": self._echoed(output) + ("" if is_scored_only else sample.text),
            "logprobs": self._logprobs(output, sample) if body.logprobs is not None else None,
            **_ending(
                sample, "length" if is_scored_only and sample.finish_reason == "stop" else sample.finish_reason, body
            ),
        }
        if self._gives_ids:
            choice["token_ids"] = [] if is_scored_only else sample.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_scores(self._texts, output.prompt_logprobs, body.prompt_logprobs)
        return choice

    def _logprobs(self, output: RequestOutput, sample: Completion) -> dict[str, list[Any]]:
        ids, found = ([], []) if self._body.max_tokens == 0 else (sample.token_ids, sample.logprobs or [])
        if self._body.echo:
            ids, found = output.prompt_token_ids + ids, [*(output.prompt_logprobs or []), *found]
        return self._record(0).record(ids, found, self._body.logprobs or 0)

    def _part(
        self, index: int, output: RequestOutput, delta: TextDelta, records: dict[int, CompletionLogprobs]
    ) -> dict[str, Any] | None:
        """Return the object of choice number `index` (over all prompts) with its new part, `delta`;
        None if there is nothing to show yet. Its first part begins with the prompt if `echo` is
        set.

        `records` makes the log-probabilities of each choice that has begun; an entry is added for a
        new one.
        """
        is_first, ids = index not in records, self._gives_ids
        if self._body.max_tokens == 0:
            reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
            delta = replace(
                delta, text="", token_ids=(), logprobs=() if delta.logprobs is not None else None, finish_reason=reason
            )
        text, read, found = delta.text, delta.token_ids, delta.logprobs
        if is_first:
            echoed = self._echoed(output)
            text = echoed + text
            shows_prompt = self._body.echo and found is not None
            records[index] = self._record(0 if shows_prompt else len(echoed))
            if shows_prompt:
                read = (*output.prompt_token_ids, *read)
                found = (*(output.prompt_logprobs or ()), *(found or ()))
        if not (text or delta.finish_reason or found or (ids and read)):
            return None
        part: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if found is not None:
            part["logprobs"] = records[index].record(read, found, self._body.logprobs or 0)
        if ids:
            part["token_ids"] = delta.token_ids
            if is_first:
                part["prompt_token_ids"] = output.prompt_token_ids
        if delta.finish_reason is not None:
            part |= _ending(output.outputs[delta.index], delta.finish_reason, self._body)
        return part

    def _record(self, offset: int) -> CompletionLogprobs:
        return CompletionLogprobs(self._texts, offset=offset, shows_special=self._shows_special)

    def _echoed(self, output: RequestOutput) -> str:
        """Return the text of the prompt if `echo` is set, decoded if it was sent as token ids; else
        empty."""
        if not self._body.echo:
            return ""
        if output.prompt is not None:
            return output.prompt
        return self._codec.decode(output.prompt_token_ids, skip_special_tokens=not self._shows_special)


def _ending(sample: Completion, reason: str | None, body: GenerationFields) -> dict[str, Any]:
    """Return the fields about the end of a sample: `reason` as `finish_reason`, the stop string or
    requested stop token that ended it (None: another reason, or the model's own end token), the
    seed that reproduces it, the parts of its schema that it violates (left out: none), and the
    error if it failed."""
    cause = sample.stop_cause
    asked = cause if isinstance(cause, str) or cause in (body.stop_token_ids or ()) else None
    about = {"finish_reason": reason, "stop_reason": asked, "seed_used": sample.seed}
    found: dict[str, Any] = {**about, **warnings_of(sample)}
    failed = failure_of(sample)
    return found if failed is None else {**found, **error_body(failed)}


def _progress(item: PromptProgress) -> dict[str, int]:
    """Return the field `prompt_progress` of a chunk."""
    return {"total": item.total, "cached": item.cached, "processed": item.processed}


def _delta(delta: Delta) -> dict[str, Any]:
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    if delta.kind == "tool_arguments":
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
    function = {"name": delta.name, "arguments": ""}
    return {"tool_calls": [{"index": delta.index, "id": delta.call_id, "type": "function", "function": function}]}
