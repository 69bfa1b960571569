"""Random JSON schemas with small values, drawn from a seed."""

from __future__ import annotations

from random import Random
from typing import Any

NAMES = ("a", "id", "name", "größe", "two words", "is_ok", "x-1", "日")
PATTERNS = ("^[a-z]{2,5}$", "^(ab|cd)+e?$", "[0-9]{3}", "^\\d{1,3}(\\.\\d{2})?$", "^A[^\\n]{0,4}$", '^[^"\\\\]{1,6}$')
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
LITERALS = (None, True, False, 0, -3, 2.5, "", "yes", 'a "quoted" word', "ü\n", [1, "b"], {"k": [None]})


def random_schema(rnd: Random) -> dict[str, Any]:
    """Make a schema with an object, array, tuple or union at the top, and with definitions that it
    may refer to."""
    defs = {name: _leaf(rnd) for name in ("one", "two")}
    top = rnd.choice((_object, _object, _array, _tuple, _union))(rnd, 2)
    return {**top, "$defs": defs} if rnd.random() < 0.5 else _without_references(top)


def _without_references(schema: Any) -> Any:
    """Replace every reference by an integer."""
    if isinstance(schema, dict):
        return (
            {"type": "integer", "maximum": 99}
            if "$ref" in schema
            else {k: _without_references(v) for k, v in schema.items()}
        )
    return [_without_references(item) for item in schema] if isinstance(schema, list) else schema


def _any(rnd: Random, depth: int) -> dict[str, Any]:
    if depth <= 0 or rnd.random() < 0.6:
        return {"$ref": f"#/$defs/{rnd.choice(('one', 'two'))}"} if rnd.random() < 0.15 else _leaf(rnd)
    return rnd.choice((_object, _array, _tuple, _union))(rnd, depth)


def _leaf(rnd: Random) -> dict[str, Any]:
    return rnd.choice((_string, _string, _integer, _number, _literal, _simple))(rnd)


def _string(rnd: Random) -> dict[str, Any]:
    kind = rnd.random()
    if kind < 0.3:
        return {"type": "string", "pattern": rnd.choice(PATTERNS), "maxLength": 12}
    if kind < 0.45:
        return (
            {"type": "string", "format": rnd.choice(FORMATS)}
            if kind < 0.4
            else {"type": ["string", "null"], "maxLength": 5}
        )
    low = rnd.randint(0, 4)
    return {"type": "string", "minLength": low, "maxLength": low + rnd.randint(0, 9)}


def _integer(rnd: Random) -> dict[str, Any]:
    low = rnd.randint(-200, 100)
    if rnd.random() < 0.2:
        return {"type": "integer", "minimum": low, "maximum": low + 60, "multipleOf": rnd.randint(2, 9)}
    return {
        "type": "integer",
        rnd.choice(("minimum", "exclusiveMinimum")): low,
        "exclusiveMaximum": low + rnd.randint(3, 900),
    }


def _number(rnd: Random) -> dict[str, Any]:
    low = rnd.randint(-20, 20) / 4
    return {"type": "number", rnd.choice(("minimum", "exclusiveMinimum")): low, "maximum": low + rnd.randint(1, 40) / 8}


def _literal(rnd: Random) -> dict[str, Any]:
    return {"const": rnd.choice(LITERALS)} if rnd.random() < 0.3 else {"enum": rnd.sample(LITERALS, rnd.randint(1, 4))}


def _simple(rnd: Random) -> dict[str, Any]:
    return {"type": rnd.choice(("boolean", "null", ["boolean", "null"])), "description": "true or not"}


def _array(rnd: Random, depth: int) -> dict[str, Any]:
    low = rnd.randint(0, 2)
    return {"type": "array", "items": _any(rnd, depth - 1), "minItems": low, "maxItems": low + rnd.randint(0, 2)}


def _tuple(rnd: Random, depth: int) -> dict[str, Any]:
    items = [_any(rnd, depth - 1) for _ in range(rnd.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": rnd.randint(0, len(items))}


def _union(rnd: Random, depth: int) -> dict[str, Any]:
    if rnd.random() < 0.5:
        return {"oneOf": [{"type": "boolean"}, _string(rnd) | {"type": "string"}, _array(rnd, depth - 1)]}
    return {"anyOf": [_any(rnd, depth - 1) for _ in range(2)]}


def _object(rnd: Random, depth: int) -> dict[str, Any]:
    names = rnd.sample(NAMES, rnd.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(rnd, depth - 1) for name in names},
        "required": rnd.sample(names, rnd.randint(0, len(names))),
        "additionalProperties": False,
    }
    if rnd.random() < 0.2:
        schema["required"] = names
        schema["maxProperties"] = len(names) + 1
        schema["additionalProperties"] = _leaf(rnd)
    if rnd.random() < 0.2:
        half = {"type": "object", "properties": {names[0]: schema["properties"].pop(names[0])}}
        schema = {"allOf": [schema | {"additionalProperties": True, "maxProperties": 4, "required": list(names)}, half]}
        schema["allOf"][0]["properties"] |= {names[0]: True}
    return schema
