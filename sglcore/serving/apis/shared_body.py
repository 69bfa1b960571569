"""Common parts of all request bodies: strict fields, collected unknown names, reported ignored
fields.

Also unions that are discriminated by the field `type`, with a member for every type that this
server does not support: such a value is parsed completely, so that the error can name its type.
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
"""Marks a field that clients may send and that has no effect."""
OTHER = "other"
"""The union tag of values whose type this server does not support."""

T = TypeVar("T")
Ignored = Annotated[T | None, UNUSED]
"""The type of a field that has no effect; answers report which of them a request set."""
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list in a request. Parsing stops at the first wrong item: an error for each of a million items
would fill the memory."""


def _whole(value: Any) -> Any:
    """Return a whole float as an integer (JSON has one kind of number, so 16.0 is an integer too),
    and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# The bound comes before the validator; after it, the JSON schema would not have the bound.
Int = Annotated[int, BeforeValidator(_whole)]
"""An integer in a request; 16.0 is one too."""
Count = Annotated[int, Field(ge=0, le=MOST_INT32), BeforeValidator(_whole)]
"""An integer from 0 to MOST_INT32."""
Positive = Annotated[int, Field(ge=1, le=MOST_INT32), BeforeValidator(_whole)]
"""An integer from 1 to MOST_INT32."""
TopK = Annotated[int, Field(ge=-1, le=MOST_INT32), BeforeValidator(_whole)]
"""An integer from -1 to MOST_INT32; 0 and -1 keep all tokens."""
CountOrAll = Annotated[int, Field(ge=-1, le=MOST_INT32), BeforeValidator(_whole)]
"""An integer from -1 to MOST_INT32; -1 stands for all, or for the maximum."""
TokenLimit = Annotated[int, Field(ge=-2, le=MOST_INT32), BeforeValidator(_whole)]
"""An integer from -2 to MOST_INT32; one below 0 stands for no limit."""
Priority = Annotated[int, Field(ge=-MOST_INT32, le=MOST_INT32), BeforeValidator(_whole)]
"""An integer from -MOST_INT32 to MOST_INT32."""
Seed = Annotated[int, Field(ge=-1, json_schema_extra={"maximum": MOST_SEED}), BeforeValidator(_whole)]
"""A seed for `SamplingParams`, or -1 for any. That class checks the upper bound, which no 64-bit
float can represent."""


def entries(most: int) -> BeforeValidator:
    """Return a pydantic validator that refuses an object with more than `most` entries before the
    entries are parsed; other values pass unchanged."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError("too_many_entries", "an object of at most {most} entries", {"most": most})
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """Base of the models of request bodies and their parts. Values are not converted to other
    types, except whole floats to integers. Unknown fields are dropped without an error; their names
    are collected in the validation's context, if that is an `UnknownFields`."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())
    known: ClassVar[frozenset[str]]
    """Names of the fields in a request, aliases included."""
    ignored: ClassVar[frozenset[str]]
    """Names of the `Ignored` fields."""
    sampled: ClassVar[Mapping[str, type[Body]]] = MappingProxyType({})
    """Fields that contain sampling parameters, and the model of each."""

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
        """Return those of the named fields that have a value other than None, by name. `names`:
        attributes of the model (such as `schema_`), not aliases. Raises AttributeError for
        another name."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def warnings(self) -> tuple[str, ...]:
        """Return the names of the ignored fields that the request sets to a value other than null,
        sorted."""
        return tuple(sorted(name for name in self.ignored if getattr(self, name) is not None))


class OtherKind(BaseModel):
    """An object whose `type` this server does not support; it is parsed, with all its fields, so
    that the error can name the type. It is not refused here: the endpoint does that."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str


def kind_of(value: Any, default: str = "") -> str:
    """Return the field `type` of a raw object or a parsed model; `default` if it is missing or no
    string, or if the value is neither."""
    fields = dict(value) if isinstance(value, Mapping | BaseModel) else {}
    found = fields.get("type")
    return found if isinstance(found, str) else default


def by_kind(words: Mapping[str, str], default: str = OTHER) -> Discriminator:
    """Return a discriminator for a union. `words`: values of `type` -> tags of the members; a value
    without `type` gets the tag `default`, one of another type OTHER."""

    def choose(value: Any) -> str:
        kind = kind_of(value)
        return words.get(kind, OTHER) if kind else default

    return Discriminator(choose)


Other = Annotated[OtherKind, Tag(OTHER)]
