"""Structural tags as text: free text in which certain words start a part that a schema constrains.
A frozen, checked record.

Reads both forms that clients send: `structures` and `triggers`, and a `format` of `triggered_tags`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglcore.core.errors import SglcoreError

MOST_TAGS, LONGEST_MARK = 128, 1024
"""Maximum number of tags and of triggers, and of the characters in each trigger,
beginning and end.
"""


class TagError(SglcoreError, ValueError):
    """Structural tags that cannot be read or cannot be enforced."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A part of the text: `begin`, a value of the JSON `schema` (as text), `end`."""

    begin: str
    schema: str
    end: str


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """Free text up to a trigger; a tag that begins with this trigger follows. `is_last`: nothing
    follows the first tag.
    """

    tags: tuple[Tag, ...]
    triggers: tuple[str, ...]
    is_last: bool = False

    def of(self, trigger: str) -> list[tuple[int, Tag]]:
        """Return the tags that begin with the trigger, each with its index."""
        return [(number, tag) for number, tag in enumerate(self.tags) if tag.begin.startswith(trigger)]


def read_structural_tag(text: str) -> StructuralTag:
    """Parse the JSON of either form. Raises TagError, which names what cannot be enforced."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TagError(f"the structural tag is not JSON: {error}", wanted="an object") from None
    given = _object(given, "the structural tag")
    if "format" in given:
        _only(given, "the structural tag", ("type", "format"))
        found = _of_format(_object(given["format"], "format"))
    else:
        _only(given, "the structural tag", ("type", "structures", "triggers"))
        tags = [_structure(each, place) for place, each in enumerate(_list(given, "structures"))]
        found = StructuralTag(tuple(tags), tuple(_list(given, "triggers")))
    _check(found)
    return found


def _of_format(given: Mapping[str, Any]) -> StructuralTag:
    if given.get("type") != "triggered_tags":
        raise TagError(
            f"the structural tag has the format {given.get('type')!r:.60}",
            wanted="triggered_tags",
            remedy="use triggered_tags, or a json_schema, a regex or a grammar",
        )
    _only(given, "format", ("type", "triggers", "tags", "at_least_one", "stop_after_first", "excludes"))
    for name in ("at_least_one", "excludes"):
        if given.get(name):
            raise TagError(f"format.{name} is not supported", remedy="leave it out")
    tags = [_tag(each, f"format.tags[{place}]") for place, each in enumerate(_list(given, "tags"))]
    return StructuralTag(tuple(tags), tuple(_list(given, "triggers")), bool(given.get("stop_after_first")))


def _tag(given: Any, place: str) -> Tag:
    given = _object(given, place)
    _only(given, place, ("type", "begin", "content", "end"))
    content = _object(given.get("content"), f"{place}.content")
    if content.get("type") != "json_schema":
        raise TagError(f"{place}.content is of the type {content.get('type')!r:.60}", wanted="json_schema")
    _only(content, f"{place}.content", ("type", "json_schema"))
    schema = _schema(content.get("json_schema"), f"{place}.content.json_schema")
    return Tag(_mark(given, "begin", place), schema, _mark(given, "end", place))


def _structure(given: Any, number: int) -> Tag:
    place = f"structures[{number}]"
    given = _object(given, place)
    _only(given, place, ("begin", "schema", "end"))
    return Tag(
        _mark(given, "begin", place), _schema(given.get("schema"), f"{place}.schema"), _mark(given, "end", place)
    )


def _check(found: StructuralTag) -> None:
    triggers = found.triggers
    for trigger in triggers:
        if not isinstance(trigger, str) or not 0 < len(trigger) <= LONGEST_MARK:
            raise TagError(f"found the trigger {trigger!r:.60}", wanted=f"text of 1 to {LONGEST_MARK} characters")
        within = next(
            (other for other in triggers if other != trigger and isinstance(other, str) and other in trigger), ""
        )
        if within:
            raise TagError(
                f"the trigger {trigger!r:.60} contains another, {within!r:.60}",
                wanted="triggers that do not contain each other",
            )
        if not found.of(trigger):
            raise TagError(f"no tag begins with the trigger {trigger!r:.60}", remedy="leave it out, or give its tag")
    for tag in found.tags:
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise TagError(
                f"the tag that begins with {tag.begin!r:.60} has no trigger", wanted="a trigger that it begins with"
            )


def _schema(value: Any, place: str) -> str:
    if not isinstance(value, (dict, bool)):
        raise TagError(f"{place} is {value!r:.60}", wanted="a JSON schema")
    if value is False:
        raise TagError(f"{place} is false", wanted="one that some value fulfils")
    return json.dumps({} if value is True else value, ensure_ascii=False)


def _mark(given: Mapping[str, Any], name: str, place: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or len(value) > LONGEST_MARK or (name == "begin" and not value):
        raise TagError(f"{place}.{name} is {value!r:.60}", wanted=f"text of at most {LONGEST_MARK} characters")
    return value


def _list(given: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not 0 < len(value) <= MOST_TAGS:
        raise TagError(f"{name} is {value!r:.60}", wanted=f"a list of 1 to {MOST_TAGS}")
    return value


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TagError(f"{place} is {value!r:.60}", wanted="an object")
    return value


def _only(given: Mapping[str, Any], place: str, known: Sequence[str]) -> None:
    other = next((name for name in given if name not in known), None)
    if other is not None:
        raise TagError(f"{place} has {other!r:.60}", wanted=f"only {', '.join(known)}", remedy="leave it out")
