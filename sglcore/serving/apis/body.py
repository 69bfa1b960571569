"""What all bodies share: strict fields, unknown names refused with the nearest known one, ignored ones told.

Also the shapes that answers of several endpoints hold.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MOST_SEED = 2**64 - 1
MOST_INT32 = 2**31 - 1
LONGEST_NAME = 60
"""Characters of an unknown name that are looked at."""
UNKNOWN_FIELD = "unknown_field"
"""The type of pydantic's error for a name that a body does not know; its context has `field` and `known`."""

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list of a request. The first wrong item ends its reading: an error for each of a million would fill the memory."""


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 16.0 is an integer too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# A bound stands before the validator: behind it, the JSON schema would not know it.
Int = Annotated[int, BeforeValidator(_whole)]
"""An integer of a request."""
Count = Annotated[int, Field(ge=0, le=MOST_INT32), BeforeValidator(_whole)]
"""0 or more."""
Positive = Annotated[int, Field(ge=1, le=MOST_INT32), BeforeValidator(_whole)]
"""1 or more."""
TopK = Annotated[int, Field(ge=-1, le=MOST_INT32), BeforeValidator(_whole)]
"""0 and -1 keep all tokens."""
Seed = Annotated[int, Field(ge=0, json_schema_extra={"maximum": MOST_SEED}), BeforeValidator(_whole)]
"""What `SamplingParams` takes as a seed; it checks the upper bound, which is no 64-bit float."""


def entries(most: int) -> BeforeValidator:
    """An object of at most so many entries; a greater one is refused before they are read."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError("too_many_entries", "an object of at most {most} entries", {"most": most})
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """A part of a request. Values are not converted, names that it does not know are refused.

    `ignored` names fields that clients send and this server has no use for; answers tell which of them were given.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _know_names(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in value if name not in known), None)
        if unknown is None:
            return value
        context = {"field": str(unknown)[:LONGEST_NAME], "known": sorted(known)}
        raise PydanticCustomError(UNKNOWN_FIELD, "the unknown field {field}", context)

    def given(self, *names: str) -> dict[str, Any]:
        """Those of the named fields that have a value: not left out, not null."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def warnings(self) -> tuple[str, ...]:
        """The ignored fields that were given a value."""
        return tuple(sorted(name for name in self.ignored if getattr(self, name) is not None))


class Answer(BaseModel):
    """A part of an answer. Only what was set is sent."""

    model_config = ConfigDict(protected_namespaces=(), json_schema_serialization_defaults_required=False)

    def json_bytes(self) -> bytes:
        """UTF-8 JSON of the fields that were set."""
        return self.model_dump_json(exclude_unset=True).encode()


class ErrorDetail(Answer):
    """What went wrong: `param` is the request's field, `code` a word for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(Answer):
    """Every error of the OpenAI endpoints."""

    error: ErrorDetail


class PromptTokensDetails(Answer):
    """`cached_tokens` of the prompt were taken from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    """Tokens that were proposed: those that are in the answer, and those that were wrong."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Answer):
    """Tokens of a request over all of its prompts and samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class PromptProgress(Answer):
    """How much of a prompt has been computed."""

    total: int
    cached: int
    processed: int


def usage(prompt: int, completion: int, cached: int, proposed: int = 0, accepted: int = 0) -> dict[str, Any]:
    """The `Usage` of token counts."""
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if proposed:
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": proposed - accepted}
        found["completion_tokens_details"] = details
    return found
