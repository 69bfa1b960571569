"""Models of the request bodies of llama-server's own endpoints, and their sampling parameters."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from sglcore.config.server_config import ServerConfig
from sglcore.sampling.grammar_spec import Grammar
from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.checks import check_limit, own_names
from sglcore.serving.apis.openai.body import Message, Prompts, TemplateFields
from sglcore.serving.apis.request_params import MOST_IDS, Bias, SamplingFields, Stop, Stops, bias_of, sampling_params
from sglcore.serving.apis.shared_body import Body, Count, CountOrAll, Ignored, Int, Items
from sglcore.serving.replicas.server_errors import InvalidRequest, blame

NEVER = -1e30
"""The logit bias that forbids a token."""
_OWN_NAMES = MappingProxyType(
    {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs"}
)

Pair = Annotated[Items[Count | float | Literal[False]], Field(min_length=2, max_length=2)]


class LlamaFields(SamplingFields):
    """How a text is continued, by llama-server's names; None: not given.

    An `n_predict` of -1 or None means up to the end of the context. `logit_bias` is an object of
    token ids and numbers, or a list of pairs of a token id and a number, or false to forbid the
    token. `n_probs`: number of most likely tokens shown with each token (0 or None: no
    log-probabilities). `grammar` is EBNF; at most one of it and `json_schema`, which `llama_params`
    checks. `return_tokens`: the whole answer has token ids; parts of a stream always have them.
    """

    model: str | None = None
    n_predict: CountOrAll | None = None
    repeat_penalty: float | None = Field(None, gt=0)
    logit_bias: Bias | Annotated[Items[Pair], Field(max_length=MOST_IDS)] | None = None
    stop: Stop | Stops | None = None
    n_probs: Count | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    return_tokens: bool | None = None
    stream: bool | None = None
    cache_prompt: Ignored[bool] = None
    id_slot: Ignored[Int] = None
    response_fields: Ignored[Items[str]] = None
    timings_per_token: Ignored[bool] = None


class LlamaCompletionBody(LlamaFields):
    """The body of /completion: a request to continue one prompt or several, each a text or token
    ids."""

    prompt: Prompts


class Extra(Body):
    """A file that gives context; its name and text, each on lines of its own, are put before the
    prompt."""

    filename: str | None = None
    text: str


class InfillBody(LlamaFields):
    """The body of /infill: a request for the text between `input_prefix` and `input_suffix`, after
    the files `input_extra`; `prompt` is the beginning of the text to generate, which the answer
    does not repeat."""

    input_prefix: str
    input_suffix: str
    input_extra: Items[Extra] | None = None
    prompt: str | None = None


class ApplyTemplateBody(TemplateFields):
    """The body of /apply-template: a request to render a conversation as its prompt, without
    running the model."""

    messages: Items[Message] = Field(min_length=1)


def llama_params(body: LlamaFields, config: ServerConfig) -> tuple[SamplingParams, str]:
    """Return the sampling parameters of a body, its grammar included, and the name of the field
    that constrains the text, "grammar" or "json_schema" (empty: none). `config`: the server's
    limits. The checkpoint's defaults are not applied. Raises InvalidRequest, with the fields by
    llama-server's names."""
    check_limit("n_probs", body.n_probs, config.max_logprobs)
    form, grammar = _form(body)
    if body.repeat_penalty is not None:
        body = body.model_copy(update={"repetition_penalty": body.repeat_penalty})
    with own_names(_OWN_NAMES):
        params = sampling_params(
            body,
            max_tokens=None if body.n_predict in (None, -1) else body.n_predict,
            logprobs=body.n_probs or None,
            stop=body.stop or None,
            grammar=grammar,
            logit_bias=_bias(body.logit_bias),
        )
    return params, form


def _form(body: LlamaFields) -> tuple[str, Grammar | None]:
    if body.grammar and body.json_schema is not None:
        raise InvalidRequest("found grammar and json_schema", wanted="one of them", param="grammar")
    if body.json_schema is not None:
        with blame("json_schema"):
            return "json_schema", Grammar("json_schema", json.dumps(body.json_schema, ensure_ascii=False))
    if body.grammar:
        with blame("grammar"):
            return "grammar", Grammar("ebnf", body.grammar)
    return "", None


def _bias(given: Any) -> dict[int, float] | None:
    if not isinstance(given, list):
        return bias_of(given or {}) or None
    wrong = next((token for token, _ in given if token is False or token < 0 or token != int(token)), None)
    if wrong is not None:
        raise InvalidRequest(f"logit_bias has the token {wrong!r:.40}", wanted="a token id", param="logit_bias")
    return {int(token): NEVER if value is False else float(value) for token, value in given}
