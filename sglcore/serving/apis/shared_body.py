"""Common parts of all bodies: strict fields, collected unknown names, reported ignored fields.

Also unions by a `type` word, with a member for every type that this server does not support: such a
value is read completely, so that the error can name its type.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from sglcore.serving.apis.unknown import UnknownFields

MOST_SEED = 2**64 - 1
MOST_INT32 = 2**31 - 1
UNUSED = object()
"""Marks a field that clients send and that this server does not use."""
OTHER = "other"
"""The tag of a type that this server does not support."""

T = TypeVar("T")
Ignored = Annotated[T | None, UNUSED]
"""The type of such a field; answers report which of them were given."""
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list of a request. Reading stops at the first wrong item: an error for each of a million items
would fill the memory."""


def _whole(value: Any) -> Any:
    """Convert a whole float to an integer: JSON has one kind of number, so 16.0 is an integer
    too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# The bound comes before the validator; after it, the JSON schema would not have the bound.
Int = Annotated[int, BeforeValidator(_whole)]
"""An integer of a request."""
Count = Annotated[int, Field(ge=0, le=MOST_INT32), BeforeValidator(_whole)]
"""0 or more."""
Positive = Annotated[int, Field(ge=1, le=MOST_INT32), BeforeValidator(_whole)]
"""1 or more."""
TopK = Annotated[int, Field(ge=-1, le=MOST_INT32), BeforeValidator(_whole)]
"""An integer; 0 and -1 keep all tokens."""
Seed = Annotated[int, Field(ge=-1, json_schema_extra={"maximum": MOST_SEED}), BeforeValidator(_whole)]
"""A seed for `SamplingParams`, or -1 for any. That class checks the upper bound, which no 64-bit
float can represent."""


def entries(most: int) -> BeforeValidator:
    """Return a validator for an object of at most `most` entries; a larger one is refused before
    its entries are read."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError("too_many_entries", "an object of at most {most} entries", {"most": most})
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """A part of a request. Values are not converted; names that it does not know go to the
    validation's context, if that is an UnknownFields."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())
    known: ClassVar[frozenset[str]]
    """Names that a request may use for its fields."""
    ignored: ClassVar[frozenset[str]]
    """Names of the `Ignored` fields."""
    sampled: ClassVar[Mapping[str, type[Body]]] = MappingProxyType({})
    """Fields that hold sampling parameters, and the class that reads them."""

    @classmethod
    def __pydantic_init_subclass__(cls, **given: Any) -> None:
        fields = cls.model_fields.items()
        cls.known = frozenset(field.alias or name for name, field in fields)
        cls.ignored = frozenset(name for name, field in fields if UNUSED in field.metadata)

    @model_validator(mode="before")
    @classmethod
    def _know_names(cls, value: Any, info: ValidationInfo) -> Any:
        found = info.context
        if isinstance(value, dict) and isinstance(found, UnknownFields) and not cls.known.issuperset(value):
            found.take(cls, value, cls.known)
        return value

    def given(self, *names: str) -> dict[str, Any]:
        """Return the named fields that have a value: not missing, not null."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def warnings(self) -> tuple[str, ...]:
        """Return the ignored fields that were given a value."""
        return tuple(sorted(name for name in self.ignored if getattr(self, name) is not None))


class OtherKind(BaseModel):
    """An object of a kind that this server does not support."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str


def kind_of(value: Any, default: str = "") -> str:
    """Return the `type` word of a raw or parsed value; `default` if it has none."""
    fields = dict(value) if isinstance(value, Mapping | BaseModel) else {}
    found = fields.get("type")
    return found if isinstance(found, str) else default


def by_kind(words: Mapping[str, str], default: str = OTHER) -> Discriminator:
    """Return a discriminator: `words` maps `type` words to tags; a value without the word gets the
    tag `default`."""

    def choose(value: Any) -> str:
        kind = kind_of(value)
        return words.get(kind, OTHER) if kind else default

    return Discriminator(choose)


Other = Annotated[OtherKind, Tag(OTHER)]
