"""POST /generate, in the form of SGLang."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Response
from pydantic import Field

from sglcore.engine.outputs import Completion, PromptProgress, RequestOutput
from sglcore.sampling.grammar_spec import Grammar
from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.answer import DONE, Stream, documented, event, warnings_of
from sglcore.serving.apis.checks import check_limit, own_names
from sglcore.serving.apis.logprob_records import finite
from sglcore.serving.apis.openai.body import Ids, as_prompts
from sglcore.serving.apis.request_params import (
    MOST_IDS,
    HiddenStates,
    SamplingFields,
    Stop,
    Stops,
    completed,
    sampling_params,
)
from sglcore.serving.apis.shared_body import Body, Count, Items, Positive, Seed
from sglcore.serving.apis.shown_states import native_states
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.apis.writer import Writer
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.replicas.runs import Runs, check_answered, start_runs
from sglcore.serving.replicas.server_errors import InvalidRequest, blame

DEFAULT_MAX_TOKENS = 128
"""SGLang's default of `max_new_tokens`."""
_FORMS = MappingProxyType({name: name for name in ("json_schema", "regex", "ebnf", "structural_tag")})
_OWN_NAMES = MappingProxyType(
    {
        "max_tokens": "sampling_params.max_new_tokens",
        "min_tokens": "sampling_params.min_new_tokens",
        "logprobs": "top_logprobs_num",
    }
)


class SglangSampling(SamplingFields):
    """Sampling parameters by SGLang's names; None: not given. `max_new_tokens` is 128 by default.
    `min_new_tokens` and `sampling_seed` count before `min_tokens` and `seed`. At most one of
    `json_schema`, `regex`, `ebnf` and `structural_tag` is accepted, which `_params` checks.
    `no_stop_trim`: the text includes the stop string."""

    max_new_tokens: Positive | None = None
    min_new_tokens: Count | None = None
    sampling_seed: Seed | None = None
    n: Positive | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: Annotated[Items[Count], Field(max_length=MOST_IDS)] | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class GenerateBody(Body):
    """The body of /generate: a request to continue one prompt or several, each a text or a list of
    token ids.

    `return_hidden_states`: true or "all" for a list of the hidden states of the prompt, followed by
    those of the output's tokens but the last; "last" for the one from which the last token was
    drawn.
    """

    sampled: ClassVar[Mapping[str, type[Body]]] = MappingProxyType({"sampling_params": SglangSampling})

    text: str | Annotated[Items[str], Field(min_length=1)] | None = None
    input_ids: Ids | Annotated[Items[Ids], Field(min_length=1)] | None = None
    sampling_params: SglangSampling | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Count | None = None
    return_hidden_states: HiddenStates | None = None
    return_hidden_states_before_norm: bool | None = None
    stream: bool | None = None
    rid: Annotated[str, Field(min_length=1, max_length=128)] | None = None

    @property
    def is_list(self) -> bool:
        """Whether the answer is a list: for a list of prompts, even of one, or for several samples
        (`n` above 1)."""
        samples = self.sampling_params.n if self.sampling_params is not None else None
        return isinstance(self.text, list) or isinstance((self.input_ids or [0])[0], list) or (samples or 1) > 1


def add_routes(router: APIRouter, frontend: ChatFrontend) -> None:
    """Add POST /generate to the router."""
    texts = TokenTexts(frontend.codec)

    @router.post(
        "/generate",
        tags=["sglang"],
        responses=documented(
            said="The text; with `stream`, events that each have the whole text so far",
            events="",
            form=("object", "array"),
        ),
    )
    async def generate(body: GenerateBody) -> Response | Stream:
        """Continue one prompt or several."""
        writer = _Writer(frontend, texts, body)
        prompts = _prompts(body)
        check_limit("text", len(prompts), frontend.config.max_prompts, "prompts")
        check_limit("top_logprobs_num", body.top_logprobs_num, frontend.config.max_logprobs)
        params, form = _params(body, frontend)
        check_limit("sampling_params.n", params.n, frontend.config.max_n)
        name, field = body.rid or secrets.token_hex(16), "input_ids" if body.text is None else "text"
        runs = await start_runs(frontend, prompts, params, name=name, field=field, form=form)
        return await writer.respond(runs, body.stream, body.warnings())


class _Writer(Writer[Runs]):
    """Writes the answer to one request, as a whole (a list for a list of prompts, or for several
    samples) or as a stream of server-sent events."""

    def __init__(self, frontend: ChatFrontend, texts: TokenTexts, body: GenerateBody) -> None:
        super().__init__(frontend)
        self._texts, self._is_list, self._began = texts, body.is_list, time.perf_counter()
        self._reads_text = frontend.codec.reads_text
        self._wanted = body.return_hidden_states

    async def answer(self, run: Runs) -> Any:
        """Return the whole answer, an object for each sample, ordered by prompt and then by sample:
        a bare object unless the answer is a list. Waits for all samples. Raises Unanswered if all
        failed."""
        outputs = await run.wait()
        check_answered(outputs)
        found = [await self._shown(output, sample) for output in outputs for sample in output.outputs]
        return found if self._is_list else found[0]

    def _sample(self, output: RequestOutput, sample: Completion) -> dict[str, Any]:
        """Return the answer's object of a sample, as far as it has been generated: `text`,
        `output_ids` and `meta_info` (counts, latency in seconds, finish reason, None while it runs,
        and the log-probabilities if requested)."""
        about: dict[str, Any] = {
            "id": output.request_id,
            "finish_reason": _ending(sample),
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(sample.token_ids),
            "cached_tokens": output.cached_tokens,
            "e2e_latency": time.perf_counter() - self._began,
            "seed": sample.seed,
            **warnings_of(sample),
        }
        if sample.logprobs is not None:
            about["output_token_logprobs"] = [
                [finite(one.logprob), one.token_id, self._text(one.token_id)] for one in sample.logprobs
            ]
            about["output_top_logprobs"] = [
                [[finite(value), token, self._text(token)] for token, value in one.top] for one in sample.logprobs
            ]
        return {"text": sample.text, "output_ids": sample.token_ids, "meta_info": about}

    async def _shown(self, output: RequestOutput, sample: Completion) -> dict[str, Any]:
        """Return the object of a sample, with its hidden states if it has ended."""
        found = self._sample(output, sample)
        if self._wanted:
            found["meta_info"] |= await native_states(sample, self._wanted, len(output.prompt_token_ids))
        return found

    def _text(self, token_id: int) -> str | None:
        return self._texts.text(token_id) if self._reads_text else None

    async def events(self, run: Runs) -> AsyncGenerator[bytes, None]:
        """Yield an encoded event for each new part of a sample, with the whole sample so far, and
        its `index` if the answer is a list; the last event is DONE. If all samples failed,
        Unanswered is raised in its place."""
        async for place, item in run.read():
            if isinstance(item, PromptProgress):
                continue
            output = run.outputs[place]
            sample = output.outputs[item.index]
            extra = {"index": place * len(output.outputs) + item.index} if self._is_list else {}
            yield event({**await self._shown(output, sample), **extra})
        check_answered(run.outputs)
        yield DONE


def _ending(sample: Completion) -> dict[str, Any] | None:
    if sample.finish_reason is None:
        return None
    if sample.finish_reason == "length":
        return {"type": "length", "length": len(sample.token_ids)}
    return {"type": sample.finish_reason, **({} if sample.stop_cause is None else {"matched": sample.stop_cause})}


def _prompts(body: GenerateBody) -> list[Any]:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("found neither or both of text and input_ids", wanted="one of them", param="text")
    return as_prompts(body.input_ids if body.text is None else body.text)


def _params(body: GenerateBody, frontend: ChatFrontend) -> tuple[SamplingParams, str]:
    """Return the sampling parameters of a body, with the checkpoint's defaults and its grammar, and
    the name of the field that constrains the text, such as "sampling_params.regex" (empty: none).
    Raises InvalidRequest, with the fields by SGLang's names, also for several such fields."""
    given = body.sampling_params or SglangSampling.model_validate({})
    bound = given.given(*_FORMS)
    if len(bound) > 1:
        raise InvalidRequest(f"found {' and '.join(bound)}", wanted="one of them", param="sampling_params")
    form, grammar = "", None
    for name, text in bound.items():
        form = f"sampling_params.{name}"
        with blame(form):
            grammar = Grammar(_FORMS[name], text if isinstance(text, str) else json.dumps(text, ensure_ascii=False))  # pyright: ignore[reportArgumentType]
    named = {"min_tokens": given.min_new_tokens, "seed": given.sampling_seed}
    fields = completed(given, frontend.sampling)
    fields = fields.model_copy(update={name: value for name, value in named.items() if value is not None})
    with own_names(_OWN_NAMES):
        params = sampling_params(
            fields,
            max_tokens=given.max_new_tokens or DEFAULT_MAX_TOKENS,
            logprobs=(body.top_logprobs_num or 0) if body.return_logprob else None,
            stop=given.stop or None,
            stop_token_ids=tuple(given.stop_token_ids or ()),
            include_stop_str_in_output=given.no_stop_trim,
            grammar=grammar,
            return_hidden_states=body.return_hidden_states,
            return_hidden_states_before_norm=body.return_hidden_states_before_norm,
            **given.given("n", "skip_special_tokens"),
        )
    return params, form
