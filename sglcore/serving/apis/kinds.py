"""Unions whose members a `type` word tells apart, with a member for every word that this server does not have.

What is of such a kind is read whole, so that it can be refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

OTHER = "other"


class OtherKind(BaseModel):
    """Something of a kind that this server does not have."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str


def kind_of(value: Any, default: str = "") -> str:
    """The `type` word of a raw value or a parsed one; `default` if it names none."""
    fields = dict(value) if isinstance(value, Mapping | BaseModel) else {}
    found = fields.get("type")
    return found if isinstance(found, str) else default


def by_kind(words: Mapping[str, str], default: str = OTHER) -> Discriminator:
    """A discriminator: `words` maps the `type` words to tags; a value without the word has the tag `default`."""
    return Discriminator(_chooser(dict(words), default))


def _chooser(words: Mapping[str, str], default: str) -> Callable[[Any], str]:
    def choose(value: Any) -> str:
        kind = kind_of(value)
        return words.get(kind, OTHER) if kind else default

    return choose


Other = Annotated[OtherKind, Tag(OTHER)]
