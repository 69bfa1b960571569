"""From a request's fields to `SamplingParams`, within the server's limits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sglcore.device.server_config import ServerConfig
from sglcore.sampling.grammar import Grammar, GrammarKind
from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.sampling import GenerationFields, ResponseFormat, SamplingFields, StructuredOutputs
from sglcore.serving.replicas.errors import InvalidRequest, blame

_SAME = (*SamplingFields.model_fields, "skip_special_tokens", "include_stop_str_in_output", "n", "prompt_logprobs")

SWITCH = "x-guidance"
"""What changes how a schema inside a Lark grammar is enforced."""


def sampling_params(
    body: GenerationFields, config: ServerConfig, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The parameters that a request asks for. `logprobs`: alternatives of each token, None for no log-probabilities.

    Raises InvalidRequest or SamplingError, which name the field.
    """
    check_limit("n", body.n, config.max_n)
    check_limit("prompt_logprobs", body.prompt_logprobs, config.max_logprobs)
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs does not stream", remedy="leave stream out", param="prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("found stream_options without stream", wanted="stream true", param="stream_options")
    values: dict[str, Any] = body.given(*_SAME)
    if body.stop is not None:
        values["stop"] = body.stop
    if body.stop_token_ids is not None:
        values["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias is not None:
        values["logit_bias"] = _bias(body.logit_bias)
    form = form_of(body)
    if form is not None:
        values["grammar"] = form[1]
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **values)


def check_limit(field: str, found: int | None, most: int, what: str = "") -> None:
    """Raise InvalidRequest if a number is over this server's limit; `what` it counts, if it is not the field's value."""
    if found is not None and found > most:
        raise InvalidRequest(
            f"{field} has {found} {what}" if what else f"{field} is {found}",
            wanted=f"at most {most}",
            remedy=f"lower {field}, or raise the limit where the server is started",
            param=field,
            code="limit_exceeded",
        )


def form_of(body: GenerationFields) -> tuple[str, Grammar] | None:
    """The field by which a request binds its answer, and the grammar; None if the text is free."""
    found = {
        **_of_format(body.response_format),
        **_of_structured(body.structured_outputs),
        **_of_structured(_guided(body), "guided_"),
    }
    if len(found) > 1:
        names = " and ".join(found)
        raise InvalidRequest(f"found {names}", wanted="one form of the answer", param=next(iter(found)))
    return next(iter(found.items()), None)


def form_field(body: GenerationFields) -> str:
    """The name of that field; empty if there is none."""
    form = form_of(body)
    return form[0] if form is not None else ""


def format_grammar(kind: str, schema: Mapping[str, Any] | None, param: str) -> Grammar | None:
    """The grammar of OpenAI's formats "text", "json_object" and "json_schema"; `param` is blamed for a missing schema."""
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object", "")
    if schema is None:
        raise InvalidRequest("the format json_schema has no schema", wanted="a JSON schema", param=param)
    with blame(param):
        return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))


def _of_format(found: ResponseFormat | None) -> dict[str, Grammar]:
    if found is None:
        return {}
    schema = found.json_schema.schema_ if found.json_schema is not None else None
    grammar = format_grammar(found.type, schema, "response_format.json_schema.schema")
    return {} if grammar is None else {"response_format": grammar}


def _guided(body: GenerationFields) -> StructuredOutputs:
    return StructuredOutputs.model_validate(
        {
            "json": body.guided_json,
            "regex": body.guided_regex,
            "grammar": body.guided_grammar,
            "choice": body.guided_choice,
        }
    )


def _of_structured(found: StructuredOutputs | None, prefix: str = "structured_outputs.") -> dict[str, Grammar]:
    if found is None:
        return {}
    bound: dict[str, tuple[GrammarKind, str]] = {}
    if found.json_ is not None:
        bound["json"] = ("json_schema", _schema_text(found.json_, f"{prefix}json"))
    if found.json_object:
        bound["json_object"] = ("json_object", "")
    if found.regex is not None:
        bound["regex"] = ("regex", found.regex)
    if found.grammar is not None:
        bound["grammar"] = ("ebnf" if "::=" in found.grammar else "lark", found.grammar)
    if found.choice is not None:
        bound["choice"] = ("regex", "|".join(map(_literal, found.choice)))
    return {prefix + name: _grammar(prefix + name, *given) for name, given in bound.items()}


def _grammar(param: str, kind: GrammarKind, text: str) -> Grammar:
    if kind == "lark" and SWITCH in text:
        raise InvalidRequest(f"{param} sets {SWITCH}", remedy="leave it out: it would switch checks off", param=param)
    with blame(param):
        return Grammar(kind, text)


def _schema_text(schema: Mapping[str, Any] | str, param: str) -> str:
    if not isinstance(schema, str):
        return json.dumps(schema, ensure_ascii=False)
    try:
        json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{param} is text that is not JSON: {error}", wanted="a JSON schema", param=param
        ) from None
    return schema


def _literal(text: str) -> str:
    """A regular expression for the text itself, with no escapes beyond those that every engine reads alike."""
    return re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequest(f"logit_bias has the key {key[:40]!r}", wanted="a token id", param="logit_bias")
        bias[int(key)] = value
    return bias
