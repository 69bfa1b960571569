"""POST /completion, /infill and /apply-template, GET /props and /slots, in the form of
llama-server."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Response

from sglcore import __version__
from sglcore.engine.outputs import Completion, PromptProgress, RequestOutput, TextDelta
from sglcore.schedule.request_output import TokenLogprob
from sglcore.serving.apis.answer import Answer, Stream, as_json, documented, event, warnings_of
from sglcore.serving.apis.checks import check_generates, check_limit
from sglcore.serving.apis.fill_in_middle import filled
from sglcore.serving.apis.logprob_records import chat_logprobs
from sglcore.serving.apis.openai.body import as_prompts
from sglcore.serving.apis.openai.request import template_request
from sglcore.serving.apis.others.llama_body import (
    ApplyTemplateBody,
    InfillBody,
    LlamaCompletionBody,
    LlamaFields,
    llama_params,
)
from sglcore.serving.apis.request_params import completed
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.apis.writer import Writer
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.chat.run import render
from sglcore.serving.replicas.ipc import unpack_params
from sglcore.serving.replicas.prompt_generation import Generation
from sglcore.serving.replicas.runs import Runs, check_answered, start_runs
from sglcore.serving.replicas.server_errors import blame

_ONE_OR_MORE = ("object", "array")


class PromptAnswer(Answer):
    """The answer of /apply-template: the prompt of a conversation as text, by the chat template."""

    prompt: str


def add_routes(router: APIRouter, frontend: ChatFrontend) -> None:
    """Add the five endpoints to the router. /props and /slots do not wait; they raise NotReady
    until requests are accepted."""
    texts = TokenTexts(frontend.codec)

    async def run(body: LlamaFields, prompts: list[Any]) -> Response | Stream:
        writer = _Writer(frontend, body, texts)
        check_limit("prompt", len(prompts), frontend.config.max_prompts, "prompts")
        if body.n_probs:
            frontend.codec.need_text("n_probs", "n_probs")
        params, form = llama_params(completed(body, frontend.sampling), frontend.config)
        runs = await start_runs(frontend, prompts, params, form=form)
        return await writer.respond(runs, body.stream, body.warnings())

    said = documented(said="The text; with `stream`, events with its parts", events="", form=_ONE_OR_MORE)

    @router.post("/completion", tags=["llama-server"], responses=said)
    async def completion(body: LlamaCompletionBody) -> Response | Stream:
        """Continue one prompt or several."""
        return await run(body, as_prompts(body.prompt))

    @router.post("/infill", tags=["llama-server"], responses=said)
    async def infill(body: InfillBody) -> Response | Stream:
        """Generate the text between two texts."""
        files = "".join(f"{each.filename or ''}\n{each.text}\n" for each in body.input_extra or ())
        given = (body.input_prefix, body.input_suffix)
        prompt = filled(frontend, *given, param="input_suffix", instead="use /completion")
        return await run(body, [f"{files}{prompt}{body.prompt or ''}"])

    @router.post("/apply-template", tags=["llama-server"], responses=documented(PromptAnswer))
    async def apply_template(body: ApplyTemplateBody) -> Response:
        """Render a conversation as its prompt, without running the model."""
        with blame("messages"):
            rendered = await render(frontend, template_request(body, body.messages))
        return as_json({"prompt": rendered.text}, body.warnings())

    _add_state(router, frontend)


def _add_state(router: APIRouter, frontend: ChatFrontend) -> None:
    said: Any = documented(statuses=(503,))

    @router.get("/props", tags=["llama-server"], responses=said)
    async def props() -> Response:
        """Return the properties of the server and its model."""
        check_generates(frontend)
        assert frontend.info is not None
        special = frontend.codec.template.special_tokens
        return as_json(
            {
                "default_generation_settings": {
                    "n_ctx": frontend.info.max_model_len,
                    "params": dict(frontend.sampling),
                },
                "total_slots": frontend.info.limits["max_requests"] * len(frontend.supervisor.replicas),
                "model_alias": frontend.names[0],
                "model_path": str(frontend.model_path),
                "modalities": {"vision": False, "audio": False},
                "chat_template": frontend.codec.template.source() or "",
                "bos_token": special.get("bos_token") or "",
                "eos_token": special.get("eos_token") or "",
                "build_info": f"sglcore {__version__}",
            }
        )

    @router.get("/slots", tags=["llama-server"], responses=documented(form="array", statuses=(503,)))
    async def slots() -> Response:
        """List the request slots and the newest known state of each."""
        check_generates(frontend)
        return as_json(_slots(frontend))


def _slots(frontend: ChatFrontend) -> list[dict[str, Any]]:
    """Return an entry for each place where a sample can run in any engine, in llama-server's form;
    the first entries have the samples that run, the rest have `is_processing` false. The position
    says nothing about the place in an engine.

    Samples with tokens run for certain; of the others, so many are listed that the sum equals the
    number of running requests that the engines reported last.
    """
    assert frontend.info is not None
    open_ones = [
        (generation, sample)
        for generation in frontend.supervisor.generations
        for sample in generation.output.outputs
        if sample.finish_reason is None
    ]
    open_ones.sort(key=lambda found: not found[1].token_ids)
    begun = sum(bool(sample.token_ids) for _, sample in open_ones)
    tasks = open_ones[: max(begun, frontend.stats().running)]
    places = frontend.info.limits["max_requests"] * len(frontend.supervisor.replicas)
    found = [{"id": place, "n_ctx": frontend.info.max_model_len, "is_processing": False} for place in range(places)]
    for slot, task in zip(found, tasks, strict=False):
        slot |= _task(*task)
    return found


def _task(generation: Generation, sample: Completion) -> dict[str, Any]:
    output, made, params = generation.output, len(sample.token_ids), unpack_params(generation.request.params)
    new = len(output.prompt_token_ids) - output.cached_tokens
    remain = -1 if params.max_tokens is None else params.max_tokens - made
    return {
        "is_processing": True,
        "request_id": generation.request_id,
        "n_prompt_tokens": len(output.prompt_token_ids),
        "n_prompt_tokens_processed": new if made else 0,
        "n_prompt_tokens_cache": output.cached_tokens,
        "params": {"seed": sample.seed, "n_predict": params.max_tokens or -1, "temperature": params.temperature},
        "next_token": [{"has_next_token": True, "n_remain": remain, "n_decoded": made}],
    }


class _Writer(Writer[Runs]):
    """Writes the answer to one request, as a whole (a list if there are several prompts) or as a
    stream of server-sent events."""

    def __init__(self, frontend: ChatFrontend, body: LlamaFields, texts: TokenTexts) -> None:
        super().__init__(frontend, body.model)
        self._body, self._texts = body, texts
        self._gives_ids = body.return_tokens or not frontend.codec.reads_text
        self._began = time.perf_counter()

    async def answer(self, run: Runs) -> Any:
        """Return the whole answer, an object for each prompt: bare for one prompt, a list for
        several. Waits for all prompts. Raises Unanswered if all failed."""
        outputs = await run.wait()
        check_answered(outputs)
        found = [self._end(place, output) for place, output in enumerate(outputs)]
        return found[0] if len(found) == 1 else found

    async def events(self, run: Runs) -> AsyncGenerator[bytes, None]:
        """Yield the encoded parts of the texts, each with its prompt's `index`, and for each prompt
        a last event with counts and without text. Raises Unanswered after these if all prompts
        failed."""
        async for place, item in run.read():
            if isinstance(item, PromptProgress):
                continue
            output = run.outputs[place]
            if item.text or item.token_ids:
                yield event(self._part(place, item, output))
            if item.finish_reason is not None:
                yield event({**self._end(place, output), "content": "", "tokens": []})
        check_answered(run.outputs)

    def _end(self, place: int, output: RequestOutput) -> dict[str, Any]:
        """Return the whole answer to prompt number `place` (from 0) in llama-server's form; of a
        stream, its last event has the same fields with text and tokens emptied."""
        sample, prompt = output.outputs[0], len(output.prompt_token_ids)
        made, seconds = len(sample.token_ids), max(time.perf_counter() - self._began, 1e-9)
        return {
            "index": place,
            "content": sample.text,
            "tokens": sample.token_ids if self._gives_ids else [],
            "id_slot": 0,
            "stop": True,
            "model": self.model,
            "tokens_predicted": made,
            "tokens_evaluated": prompt,
            "tokens_cached": output.cached_tokens,
            "truncated": False,
            **_stop(sample),
            **warnings_of(sample),
            **self._probabilities(sample.logprobs),
            "generation_settings": {"seed": sample.seed, "n_predict": self._body.n_predict or -1},
            "timings": {
                "prompt_n": prompt - output.cached_tokens,
                "cache_n": output.cached_tokens,
                "predicted_n": made,
                "predicted_ms": seconds * 1000,
                "predicted_per_second": made / seconds,
            },
        }

    def _part(self, place: int, delta: TextDelta, output: RequestOutput) -> dict[str, Any]:
        return {
            "index": place,
            "content": delta.text,
            "tokens": delta.token_ids,
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": len(output.outputs[0].token_ids),
            "tokens_evaluated": len(output.prompt_token_ids),
            **self._probabilities(delta.logprobs),
        }

    def _probabilities(self, found: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        """Return the field `completion_probabilities` with an entry for each token of `found`
        (None: no entries); empty if the request does not set `n_probs`."""
        if not self._body.n_probs:
            return {}
        shown = chat_logprobs(self._texts, found or (), self._body.n_probs)["content"]
        listed = [{"id": item.token_id, **one} for item, one in zip(found or (), shown, strict=True)]
        return {"completion_probabilities": listed}


def _stop(sample: Completion) -> dict[str, Any]:
    """Return the fields that say how a text ended. `stop_type`: "word" for a stop string or stop
    pattern, which is then the `stopping_word` (otherwise empty), "eos" for the model's end token or
    a stop token id, "limit" for the token limit, "none" for any other ending."""
    word = sample.stop_cause if isinstance(sample.stop_cause, str) else ""
    kind = "word" if word else {"stop": "eos", "length": "limit"}.get(sample.finish_reason or "", "none")
    return {"stop_type": kind, "stopping_word": word}
