"""The sampling fields of request bodies, and the one place that converts them to
`SamplingParams`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from sglcore.config.server_config import ServerConfig
from sglcore.sampling.grammar_spec import Grammar, GrammarKind, TokenRules
from sglcore.sampling.params import (
    MAX_BREAKER_TEXT,
    MAX_BREAKERS,
    MAX_PATTERN_TEXT,
    MAX_STOP_PATTERNS,
    SamplingParams,
)
from sglcore.serving.apis.checks import check_limit
from sglcore.serving.apis.shared_body import (
    Body,
    Count,
    CountOrAll,
    Ignored,
    Items,
    Positive,
    Priority,
    Seed,
    TopK,
    entries,
)
from sglcore.serving.replicas.server_errors import InvalidRequest, blame

MOST_STOPS, LONGEST_STOP = 64, 1024
"""Maximum number of stop strings (and banned words) of a request, and of characters in each: all
are searched after every token."""
MOST_IDS = 4096
"""Maximum number of token ids in one field of a request."""
STRUCTURED = "structured_outputs."
SWITCH = "x-guidance"
"""The keyword of a schema inside a Lark grammar that would change how the schema is enforced; it is
refused."""
SWITCHES = frozenset({"enable_thinking", "thinking"})
"""Names of the variable by which chat templates turn reasoning on or off."""

Stop = Annotated[str, Field(max_length=LONGEST_STOP)]
BadWord = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Stops = Annotated[Items[Stop], Field(max_length=MOST_STOPS)]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_TEXT)]
Patterns = Annotated[Items[Pattern], Field(max_length=MAX_STOP_PATTERNS)]
Breaker = Annotated[str, Field(min_length=1, max_length=MAX_BREAKER_TEXT)]
HiddenStates = bool | Literal["last", "all"]
"""Which hidden states the answer has; what true stands for depends on the endpoint."""
Bias = Annotated[dict[str, float], Field(max_length=MOST_IDS), entries(MOST_IDS)]


class SamplingFields(Body):
    """Sampling fields of every protocol: each field is a sampling parameter of the same name; None:
    not given. Fields that a protocol does not have are extensions of this server."""

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: TopK | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    xtc_probability: float | None = Field(None, ge=0, le=1)
    xtc_threshold: float | None = Field(None, ge=0, le=1)
    dry_multiplier: float | None = Field(None, ge=0, le=1000)
    dry_base: float | None = Field(None, ge=1, le=1000)
    dry_allowed_length: Positive | None = None
    dry_penalty_last_n: CountOrAll | None = None
    dry_sequence_breakers: Annotated[Items[Breaker], Field(max_length=MAX_BREAKERS)] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    seed: Seed | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_regex: Pattern | Patterns | None = None


Fields = TypeVar("Fields", bound=SamplingFields)


class StreamOptions(Body):
    """`include_usage` adds a last chunk with the token counts; with `continuous_usage_stats` every
    chunk has the counts so far. `include_obfuscation` has no effect."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(Body):
    """A JSON schema that the answer must satisfy; it is always enforced, whatever `strict` says,
    except for parts that a header of the answer names."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of the answer.

    A schema is in `json_schema`, or in the field `schema`, which llama-server also accepts with
    `json_object`. Structural tags are `structures` and `triggers`, or a `format`. This model does
    not check that the fields fit the type; `generation_params` does.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    structures: Items[dict[str, Any]] | None = None
    triggers: Items[str] | None = None
    format: dict[str, Any] | None = None


PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "text": (),
        "json_object": ("schema",),
        "json_schema": ("json_schema", "schema"),
        "structural_tag": ("structures", "triggers", "format"),
    }
)
"""The other fields that a response format may have, by its type."""


class StructuredOutputs(Body):
    """One way to constrain the answer: a JSON schema (an object, or its JSON text), any JSON object
    (`json_object` true), a regular expression, a grammar, a list of texts to choose from, or
    structural tags. `generation_params` refuses none and more than one, not this model.

    A grammar with `::=` is read as EBNF, any other as Lark.
    """

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Items[str] | None = Field(None, min_length=1)
    structural_tag: dict[str, Any] | str | None = None


class GenerationFields(SamplingFields):
    """The fields that completions and chats share.

    `return_hidden_states`: true or "last" for the hidden state from which the last token was drawn,
    "all" for those of all tokens of the prompt and the output but the last.
    """

    model: str | None = None
    n: Positive | None = None
    logit_bias: Bias | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: Annotated[Items[Count], Field(max_length=MOST_IDS)] | None = None
    priority: Priority | None = None
    bad_words: Annotated[Items[BadWord], Field(max_length=MOST_STOPS)] | None = None
    allowed_token_ids: Annotated[Items[Count], Field(min_length=1, max_length=MOST_IDS)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Count | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_hidden_states: HiddenStates | None = None
    return_hidden_states_before_norm: bool | None = None
    return_progress: bool | None = None
    user: Ignored[str] = None

    def warnings(self) -> tuple[str, ...]:
        """Return the names of the fields that the request sets without effect, sorted: the ignored
        fields, `return_progress` if the answer does not stream, and a true
        `stream_options.include_obfuscation`, because no padding is ever added."""
        names = [*super().warnings()]
        if self.return_progress and not self.stream:
            names.append("return_progress")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            names.append("stream_options.include_obfuscation")
        return tuple(sorted(names))


def completed(body: Fields, defaults: Mapping[str, float]) -> Fields:
    """Return a copy of the body in which sampling fields that are missing or null in the request
    have the values of `defaults`: sampling field -> the checkpoint's value."""
    return body.model_copy(update={name: value for name, value in defaults.items() if name not in body.given(name)})


def sampling_params(body: SamplingFields, *, max_tokens: int | None, **others: Any) -> SamplingParams:
    """Return the sampling parameters in the `SamplingFields` of a body, and those of `others` that
    are not None. A seed of -1 counts as not given. Fields that are not given get the defaults of
    `SamplingParams`, not the checkpoint's: `completed` sets those before.

    A `max_tokens` of None means up to the end of the context. Raises SamplingError for invalid
    values.
    """
    values = {name: value for name, value in others.items() if value is not None}
    given = body.given(*SamplingFields.model_fields)
    if given.get("seed") == -1:
        del given["seed"]
    return SamplingParams(max_tokens=max_tokens, **given, **values)


def alternatives(logprobs: bool | None, top_logprobs: int | None, config: ServerConfig) -> int | None:
    """Return the number of most likely tokens to show at each position, in addition to the chosen
    one (0: only the chosen one); None: no log-probabilities. Raises InvalidRequest above the limit
    in `config`, and for a `top_logprobs` above 0 without `logprobs`."""
    check_limit("top_logprobs", top_logprobs, config.max_logprobs)
    if logprobs:
        return top_logprobs or 0
    if top_logprobs:
        raise InvalidRequest("top_logprobs without logprobs", wanted="logprobs true", param="top_logprobs")
    return None


def check_streamed(body: GenerationFields) -> None:
    """Raise InvalidRequest for `prompt_logprobs` in a stream, and for `stream_options` without a
    stream."""
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs does not stream", remedy="leave stream out", param="prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("found stream_options without stream", wanted="stream true", param="stream_options")


def generation_params(
    body: GenerationFields, config: ServerConfig, *, max_tokens: int | None, logprobs: int | None
) -> tuple[SamplingParams, str]:
    """Return the sampling parameters of a completion or a chat, and the name of the field that
    constrains its answer by a grammar, such as "response_format" (empty: none). The grammar is in
    the parameters.

    `max_tokens`: None for up to the end of the context; `config`: the server's limits; `logprobs`:
    number of alternatives at each position, None for no log-probabilities. Raises InvalidRequest
    or SamplingError, which name the field.
    """
    check_limit("n", body.n, config.max_n)
    check_limit("prompt_logprobs", body.prompt_logprobs, config.max_logprobs)
    form, grammar = _form(body)
    params = sampling_params(
        body,
        max_tokens=max_tokens,
        logprobs=logprobs,
        grammar=grammar,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        token_rules=_token_rules(body),
        return_hidden_states="last" if body.return_hidden_states is True else body.return_hidden_states,
        return_hidden_states_before_norm=body.return_hidden_states_before_norm,
        logit_bias=bias_of(body.logit_bias or {}),
        **body.given("n", "stop", "priority", "skip_special_tokens", "include_stop_str_in_output", "prompt_logprobs"),
    )
    return params, form


def _form(body: GenerationFields) -> tuple[str, Grammar | None]:
    """Return the name of the field by which a request constrains its answer, and the grammar; empty
    and None for free text. Raises InvalidRequest for more than one, or if one is invalid."""
    found = {
        **_of_format(body.response_format),
        **_of_structured(body.structured_outputs),
        **_of_structured(_guided(body), "guided_"),
        **_of_own_names(body),
    }
    if len(found) > 1:
        names = " and ".join(found)
        raise InvalidRequest(f"found {names}", wanted="one response format", param=next(iter(found)))
    return next(iter(found.items()), ("", None))


def format_grammar(kind: str, schema: Mapping[str, Any] | None, param: str) -> Grammar | None:
    """Return the grammar of OpenAI's formats "text" (None), "json_object" and "json_schema"
    (`kind`). Raises InvalidRequest about the field `param` if the schema is missing or invalid."""
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
    parts = found.given("json_schema", "schema_", "structures", "triggers", "format")
    names = [name.removesuffix("_") for name in parts]
    other = next((name for name in names if name not in PARTS[found.type]), None)
    if other is not None or (len(names) > 1 and found.type == "json_schema"):
        raise InvalidRequest(
            f"response_format of the type {found.type} has {' and '.join(names)}",
            wanted=" or ".join(PARTS[found.type]) or "no field but type",
            param=f"response_format.{other or 'schema'}",
        )
    if found.type == "structural_tag":
        with blame("response_format"):
            return {"response_format": Grammar("structural_tag", json.dumps(parts, ensure_ascii=False))}
    if found.schema_ is not None:
        with blame("response_format.schema"):
            return {"response_format": Grammar("json_schema", json.dumps(found.schema_, ensure_ascii=False))}
    schema = found.json_schema.schema_ if found.json_schema is not None else None
    grammar = format_grammar(found.type, schema, "response_format.json_schema.schema")
    return {} if grammar is None else {"response_format": grammar}


def _of_own_names(body: GenerationFields) -> dict[str, Grammar]:
    """Return the grammars in the fields `json_schema`, `grammar` (llama-server), `regex` and `ebnf`
    (SGLang), by field; empty fields are left out. Raises InvalidRequest for an invalid one."""
    schema = "" if body.json_schema is None else _schema_text(body.json_schema, "json_schema")
    grammar = body.grammar or ""
    given: dict[str, tuple[GrammarKind, str]] = {
        "json_schema": ("json_schema", schema),
        "regex": ("regex", body.regex or ""),
        "grammar": ("ebnf" if "::=" in grammar else "lark", grammar),
        "ebnf": ("ebnf", body.ebnf or ""),
    }
    return {name: _grammar(name, kind, text) for name, (kind, text) in given.items() if text}


def _guided(body: GenerationFields) -> StructuredOutputs:
    return StructuredOutputs.model_validate(
        {
            "json": body.guided_json,
            "regex": body.guided_regex,
            "grammar": body.guided_grammar,
            "choice": body.guided_choice,
        }
    )


def _of_structured(found: StructuredOutputs | None, prefix: str = STRUCTURED) -> dict[str, Grammar]:
    if found is None:
        return {}
    if prefix == STRUCTURED and not found.given(*StructuredOutputs.model_fields):
        kinds = ", ".join(field.alias or name for name, field in StructuredOutputs.model_fields.items())
        raise InvalidRequest(
            "structured_outputs has no kind that this server supports",
            wanted=f"one of {kinds}",
            param="structured_outputs",
        )
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
    if found.structural_tag is not None:
        bound["structural_tag"] = ("structural_tag", _schema_text(found.structural_tag, f"{prefix}structural_tag"))
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
    """Return a regular expression that matches exactly this text, with only those escapes that
    every grammar backend reads in the same way."""
    return re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text)


def _token_rules(body: GenerationFields) -> TokenRules | None:
    """Return the allowed tokens and banned words; None if there are none."""
    if not (body.allowed_token_ids or body.bad_words):
        return None
    return TokenRules(tuple(body.allowed_token_ids or ()), tuple(body.bad_words or ()))


def bias_of(given: Mapping[str, float]) -> dict[int, float]:
    """Return logit biases by token id; the keys of `given` are ids as text. Raises InvalidRequest
    for a key that is not 1 to 9 digits; whether the model has the token is not checked here."""
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequest(f"logit_bias has the key {key[:40]!r}", wanted="a token id", param="logit_bias")
        bias[int(key)] = value
    return bias
