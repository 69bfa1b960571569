"""The fields by which every generating request says what samples it wants, and the forms an answer can be bound to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sglcore.serving.apis.body import Body, Count, Items, Positive, Seed, TopK, entries

MOST_STOPS, LONGEST_STOP = 64, 1024
"""Stop strings of a request and characters of each: all are looked for with every token."""
MOST_IDS = 4096
"""Token ids that a request may name."""

Stop = Annotated[str, Field(max_length=LONGEST_STOP)]
Stops = Annotated[Items[Stop], Field(max_length=MOST_STOPS)]
Bias = Annotated[dict[str, float], Field(max_length=MOST_IDS), entries(MOST_IDS)]


class SamplingFields(Body):
    """How tokens are sampled, in every dialect: each field is a parameter of the same name. Those that a dialect's own
    protocol lacks are this server's."""

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: TopK | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    seed: Seed | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None


class StreamOptions(Body):
    """`include_usage` adds a last chunk with the token counts."""

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Body):
    """A JSON schema that the answer must hold; it is always enforced, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What form the answer takes."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """One way to bind the answer: a JSON schema, any JSON object, a regular expression, a grammar, or a list to choose from.

    A grammar with `::=` is read as EBNF, any other as Lark.
    """

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Items[str] | None = Field(None, min_length=1)


class GenerationFields(SamplingFields):
    """What completions and chats share."""

    model: str | None = None
    n: Positive | None = None
    logit_bias: Bias | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: Annotated[Items[Count], Field(max_length=MOST_IDS)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Count | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_progress: bool | None = None
    user: str | None = None
