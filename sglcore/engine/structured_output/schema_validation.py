"""Finds which left-out parts of a schema (`schema_loosening.py`) a value violates, with the library
jsonschema.

It may take forever for a client's patterns, so it runs in `answer_check_process.py`. Nothing is
downloaded: a reference to another document is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any

from jsonschema import Draft7Validator, Draft201909Validator, Draft202012Validator, FormatChecker
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend, validator_for
from jsonschema_specifications import REGISTRY

from sglcore.engine.structured_output.grammar_schema import schemas
from sglcore.engine.structured_output.schema_loosening import DROPPED, FORMATS, place_of

Keyword = Callable[[Any, Any, Any, Any], Iterator[ValidationError] | None]
"""The library's function for a keyword: takes the validator, the keyword's value, the instance and
the schema; yields errors."""
WATCHED = DROPPED | {
    "additionalProperties",
    "format",
    "maxProperties",
    "minProperties",
    "oneOf",
    "pattern",
    "patternProperties",
}
"""Keywords that may be left out."""
GONE_WITH = MappingProxyType({"additionalProperties": "patternProperties"})
"""Keywords that are left out without a name of their own -> the keyword with which each is left
out."""


class Watch:
    """Records the validation errors that come from left-out parts of a schema, while jsonschema
    validates a value with the functions that `watched` returns; `broken` then names the parts."""

    def __init__(self, schema: Any, left_out: Sequence[str]) -> None:
        """`left_out`: names of parts, each a JSON pointer with a note for some. `schema` must be
        the object that is validated, not a copy: its parts are recognised by identity, also through
        references."""
        self._places = {id(node): place for place, node in schemas(schema)}
        self._names = {place_of(name): name for name in left_out}
        self._found: list[tuple[ValidationError, str]] = []

    def watched(self, name: str, keyword: Keyword) -> Keyword:
        """Return the library's function for the keyword `name`, which also records its errors where
        this keyword was left out."""

        def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
            part = self._name(self._places.get(id(schema), ""), name)
            for error in keyword(validator, value, instance, schema) or ():
                if part is not None:
                    self._found.append((error, part))
                yield error

        return check

    def broken(self, errors: Sequence[ValidationError]) -> set[str]:
        """Return the names of the left-out parts that caused one of `errors`, or an error nested in
        one. `errors`: all errors of the validation. Failures in one alternative of a choice do not
        count if another alternative is valid."""
        final = {id(error) for error in _all(errors)}
        return {name for error, name in self._found if id(error) in final}

    def _name(self, place: str, keyword: str) -> str | None:
        own = self._names.get(f"{place}/{keyword}")
        if own is not None or keyword not in GONE_WITH:
            return own
        return self._names.get(f"{place}/{GONE_WITH[keyword]}")


def not_kept(schema: Any, value: Any, left_out: Sequence[str]) -> list[str]:
    """Return the names in `left_out` that the JSON value violates, in that order; [] for a schema
    that is no object.

    Raises the library's errors: for a pattern that it cannot read, a reference without a target, or
    an invalid schema.
    """
    if not isinstance(schema, dict):
        return []
    nodes = [node for _, node in schemas(schema)]
    has_lists = any(isinstance(node.get("items"), list) for node in nodes)  # before 2020-12
    library = validator_for(schema, default=Draft201909Validator if has_lists else Draft202012Validator)
    # Otherwise a reference to the whole schema would continue with the library's own class.
    schema = {name: part for name, part in schema.items() if name != "$schema"}
    watch = Watch(schema, left_out)
    keywords = {"dependencies": Draft7Validator.VALIDATORS["dependencies"], **library.VALIDATORS}
    watched = {name: watch.watched(name, keywords[name]) for name in sorted(WATCHED & set(keywords))}
    formats = {node["format"] for node in nodes if isinstance(node.get("format"), str)} - FORMATS
    known = FormatChecker(sorted(formats & set(FormatChecker.checkers)))
    found = extend(library, watched)(schema, format_checker=known, registry=REGISTRY)
    broken = watch.broken(list(found.iter_errors(value)))
    return [name for name in left_out if name in broken]


def _all(errors: Sequence[ValidationError]) -> Iterator[ValidationError]:
    """Yield the errors, and the errors nested inside them."""
    for error in errors:
        yield error
        yield from _all(error.context or ())
