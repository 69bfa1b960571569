"""Grammars that force a tool call, in the Lark dialect of llguidance.

The text around a call's name and arguments is taken from calls that the checkpoint's template wrote
in the test of its parser, so one rule serves all formats with JSON arguments; tags need a rule of
their own. Text that is an added token of the tokenizer is named by its id, because the model knows
only that token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from sglcore.engine.structured_output.guidance_schema import check_schema, embedded
from sglcore.sampling.grammar_spec import ORIGIN, Grammar, GrammarError, read_schema
from sglcore.serving.chat.parsers.families import ToolFamily
from sglcore.serving.chat.parsers.notated_calls import Notation
from sglcore.serving.chat.parsers.xml_calls import Tags
from sglcore.serving.chat.self_test import CALL_IDS, Sample, Turn

Function = Mapping[str, Any]
BLANKS = r"/\s{0,4}/"
"""Lark for the white space between reasoning and what follows."""

ONE_OF_THEM: Mapping[str, str] = MappingProxyType(
    {"wanted": "one of them", "remedy": 'set tool_choice to "none", or leave the response format out'}
)
"""`wanted` and `remedy` of the error for tools together with a response format."""

MOST_CALLS = 16
"""Maximum number of calls in a forced answer."""


def call_grammar(
    family: ToolFamily,
    sample: Sample,
    functions: Sequence[Function],
    added: Mapping[str, int],
    *,
    is_parallel: bool,
    follows_reasoning: bool = False,
    answer: Grammar | None = None,
) -> Grammar:
    """Return the Lark grammar of one call of `functions`, or of up to MOST_CALLS if `is_parallel`
    and the template writes several. With an `answer`, text that matches that grammar is allowed in
    place of calls.

    `sample`: calls that the checkpoint's template wrote; `functions`: objects with `name` and
    perhaps `parameters`, a JSON schema; `added`: ids of added tokens by text; `follows_reasoning`:
    white space may come first. Raises GrammarError for parameters that cannot be enforced, for an
    `answer` of another kind than a JSON schema, a JSON object or a regex, and for any `answer` if
    the calls begin like JSON.
    """
    literal = _Literals(added)
    if answer is not None and _before(family, sample.one)[0].startswith(("{", "[")):
        raise GrammarError(
            "found tools and a response format, and this model's calls look like JSON too", **ONE_OF_THEM
        )
    rules = [f"start: {BLANKS if follows_reasoning else ''} {'calls' if answer is None else '(calls | answer)'}"]
    rules += [] if answer is None else [f"answer: {_answer(answer)}"]
    if isinstance(family.calls, Tags):
        rules += _tagged(literal, _written(family.calls, family, sample), functions, is_parallel)
    elif isinstance(family.calls, Notation):
        rules += _notated(literal, family.calls, functions, is_parallel and sample.two is not None)
    else:
        rules += _around_json(literal, family, sample, functions, is_parallel)
    return Grammar("lark", "\n".join(rules) + "\n")


class _Literals:
    """Callable that returns Lark for a fixed text: strings in quotes, and texts of added tokens as
    token ids. An instance is made for one tokenizer: `added` has the ids by text."""

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = added
        words = sorted(filter(None, added), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, words))})" if words else r"(?!)()")

    def __call__(self, text: str) -> str:
        parts = (part for part in self._pattern.split(text) if part)
        return " ".join(f"<[{self._added[part]}]>" if part in self._added else _quoted(part) for part in parts)

    def upto(self, name: str, mark: str) -> list[str]:
        """Return rules for the rule `name`: any text, up to and including the first `mark`. They
        are whole lines of Lark."""
        if mark in self._added:
            return [f"{name}: /(?s:.*)/ <[{self._added[mark]}]>"]
        return [f"{name}[lazy]: /(?s:.*){_escaped(mark)}/"]


def _answer(grammar: Grammar) -> str:
    if grammar.kind == "regex":
        return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", grammar.text).replace("\n", "\\n") + "/"
    if grammar.kind not in ("json_schema", "json_object"):
        raise GrammarError(
            f"found tools and an answer that is constrained by {grammar.kind}, not by a schema or a regex",
            **ONE_OF_THEM,
        )
    schema = read_schema(grammar.text) if grammar.text else {"type": "object"}
    return f"%json {embedded(schema if isinstance(schema, dict) else {})}"


def _around_json(
    literal: _Literals, family: ToolFamily, sample: Sample, functions: Sequence[Function], is_parallel: bool
) -> list[str]:
    before, middle, after = _parts(family, sample.one)
    between = _with_ids(literal, _between(sample.two)) if sample.two and is_parallel else None

    def rules_of(number: int, function: Function) -> list[str]:
        schema = embedded(_parameters(function))
        name = _quoted(json.dumps(function["name"], ensure_ascii=False)[1:-1])
        head = f"call_{number}: {name} {_with_ids(literal, middle)} args_{number}"
        return [head, f"args_{number}: %json {schema}"]

    return _calls(_with_ids(literal, before), between, _with_ids(literal, after), functions, rules_of)


def _calls(
    before: str,
    between: str | None,
    after: str,
    functions: Sequence[Function],
    rules_of: Callable[[int, Function], list[str]],
) -> list[str]:
    """Return the rules for calls of `functions`, as lines of Lark; the first is named `calls`.
    `before`, `between` and `after`: Lark for the text around calls; `between` None: only one call
    is allowed. `rules_of(number, function)` returns the rules of one function; the first one is
    named `call_NUMBER`."""
    again = f" ({between} call){{0,{MOST_CALLS - 1}}}" if between is not None else ""
    rules = [f"calls: {before} call{again} {after}".rstrip()]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, function in enumerate(functions):
        origin = f"{ORIGIN}the parameters of {json.dumps(function['name'])}"
        rules += [origin, *rules_of(number, function)]
    return rules


def _parts(family: ToolFamily, turn: Turn) -> tuple[str, str, str]:
    """Return three texts of a turn with one call: before the call's name, between name and
    arguments, and after the arguments, without the text that ends the turn."""
    call = turn.calls[0]
    arguments = turn.text.index(call.arguments, turn.text.index(call.name))
    before, name_end = _before(family, turn)
    return before, turn.text[name_end:arguments], _after(turn, arguments + len(call.arguments))


def _before(family: ToolFamily, turn: Turn) -> tuple[str, int]:
    """Return the text from the call's first marker to the first call's name, without the name, and
    the index in `turn.text` where the name ends."""
    name = turn.text.index(turn.calls[0].name)
    begin = min(place for mark in family.opening if (place := turn.text.rfind(mark, 0, name)) >= 0)
    return turn.text[begin:name], name + len(turn.calls[0].name)


def _after(turn: Turn, end: int) -> str:
    """Return the text of a turn from index `end` on, at which its only call has ended, without the
    text that ends the turn and white space before that."""
    rest = turn.text[end:]
    footer = rest.rfind(turn.footer.strip()) if turn.footer.strip() else len(rest)
    return rest[:footer].rstrip()


def _between(turn: Turn) -> str:
    """Return the text between the arguments of the first call and the name of the second; the turn
    has exactly two calls."""
    first, second = turn.calls
    end = turn.text.index(first.arguments) + len(first.arguments)
    return turn.text[end : turn.text.index(second.name, end)]


def _with_ids(literal: _Literals, text: str) -> str:
    """Return Lark for a fixed text of the self-test; where it has the id of a call, another id may
    be: nine letters or digits, or for a number after a colon another of one to three digits."""
    parts = re.split(rf"({'|'.join(CALL_IDS)}|:\d+)", text)
    parts[::2] = map(literal, parts[::2])
    parts[1::2] = ("/:[0-9]{1,3}/" if part.startswith(":") else "/[a-zA-Z0-9]{9}/" for part in parts[1::2])
    return " ".join(filter(None, parts))


def _parameters(function: Function) -> Mapping[str, Any]:
    """Return the schema of a function's arguments, with "type" "object" added if it is missing; a
    function without parameters gets that alone. Raises GrammarError if it is not the schema of an
    object."""
    schema = {"type": "object", **(function.get("parameters") or {})}
    kinds = {"properties": dict, "required": list, "type": str}
    wrong = next((name for name, kind in kinds.items() if name in schema and not isinstance(schema[name], kind)), None)
    wrong = wrong or ("type" if schema["type"] != "object" else None)
    if wrong is not None:
        raise GrammarError(
            f"the parameters of {function['name']!r} have {wrong}: {json.dumps(schema[wrong]):.60}",
            wanted="the JSON schema of an object",
        )
    return schema


def _notated(literal: _Literals, notation: Notation, functions: Sequence[Function], is_parallel: bool) -> list[str]:
    begin, end = (literal(mark) for mark in notation.marks)
    opened, closed = (f"{begin} {_quoted('[')}", f"{_quoted(']')} {end}") if notation.is_list else (begin, end)
    joint = _quoted(", ") if notation.is_list else f"{closed} {opened}"
    rules_of = partial(_notated_function, literal, notation)
    return _calls(opened, joint if is_parallel else None, closed, functions, rules_of)


def _notated_function(literal: _Literals, notation: Notation, number: int, function: Function) -> list[str]:
    schema = _parameters(function)
    check_schema(schema)
    names: dict[str, bool] = {}
    rules: list[str] = []
    properties = list(_properties(schema).items())
    if notation.is_sorted:
        properties.sort(key=lambda entry: entry[0].lower())
    for place, (key, described) in enumerate(properties):
        name = f"p_{number}_{place}"
        names[name] = key in (schema.get("required") or ())
        body, more = _notated_value(literal, notation, f"v_{number}_{place}", described)
        rules += [f"{name}: {literal(key + notation.assign)} {body}", *more]
    before, after = _quoted(notation.prefix + function["name"] + notation.around[0]), _quoted(notation.around[1])
    choices = " | ".join(_series(names, _quoted(notation.joint)))
    return [f"call_{number}: {before} ({choices}) {after}" if choices else f"call_{number}: {before} {after}", *rules]


def _series(names: Mapping[str, bool], joint: str) -> list[str]:
    """Return the alternatives for a series of rules, in their order, with the Lark text `joint`
    between them. `names`: rule name -> whether it is required; others may be left out. Empty for no
    names; without a required one, the last alternative is empty text."""
    found: list[str] = []
    left = list(names)
    for place, first in enumerate(left):
        rest = (f"{joint} {name}" if names[name] else f"({joint} {name})?" for name in left[place + 1 :])
        found.append(" ".join([first, *rest]))
        if names[first]:
            return found
    return [*found, '""'] if found else []


def _notated_value(
    literal: _Literals, notation: Notation, name: str, schema: Mapping[str, Any]
) -> tuple[str, list[str]]:
    """Return Lark for a parameter's value, and the further rules that it refers to: text in the
    notation's own quotes, constants by its words, anything else as JSON. `name`: a free rule
    name."""
    quote = notation.quotes[0]
    if schema.get("type") == "boolean" and notation.is_list:
        return '("True" | "False")', []
    if schema.get("type") != "string" or len(quote) == 1:
        return name, [f"{name}: %json {embedded(schema)}"]
    body, rules = _tagged_value(literal, name, schema, quote)
    return f"{literal(quote)} {body}", rules


@dataclass(frozen=True, slots=True)
class _Written:
    """The texts that a template writes around the parts of calls in tags; `_written` finds them in
    a passed test of the template."""

    before: str
    """Before the first call's function name."""
    head: str
    """Between a function's name and its first parameter, or its end."""
    key: str
    """Before a parameter's name."""
    middle: str
    """Between a parameter's name and its value."""
    value_end: str
    """Directly after a value."""
    gap: str
    """After a parameter."""
    end: str
    """After the last parameter of a function."""
    between: str | None
    """Between two calls. None: the test had one call only."""
    after: str
    """After the last call."""


def _written(tags: Tags, family: ToolFamily, sample: Sample) -> _Written:
    """Return the texts around the parts of a sample call. The sample's first parameter must be
    text, and it must have others, as the calls of the self-test do."""
    before, head = _before(family, sample.one)
    text, call = sample.one.text, sample.one.calls[0]
    key, value = next(iter(json.loads(call.arguments).items()))
    first = text.index(tags.key[0], head)
    start = text.index(value, first)
    value_end = tags.margin + tags.value[1]
    gap = start + len(value) + len(value_end)
    end = text.rindex(tags.end) + len(tags.end)
    between = None
    if sample.two:
        two = sample.two.text
        one_end = two.index(tags.end, two.index(call.name)) + len(tags.end)
        between = two[one_end : two.index(sample.two.calls[1].name, one_end)]
    return _Written(
        before,
        text[head:first],
        tags.key[0],
        text[first + len(tags.key[0]) + len(key) : start],
        value_end,
        text[gap : text.index(tags.key[0], gap)],
        tags.end,
        between,
        _after(sample.one, end),
    )


def _tagged(literal: _Literals, written: _Written, functions: Sequence[Function], is_parallel: bool) -> list[str]:
    between = literal(written.between) if is_parallel and written.between is not None else None
    rules_of = partial(_tagged_function, literal, written)
    return _calls(literal(written.before), between, literal(written.after), functions, rules_of)


def _tagged_function(literal: _Literals, written: _Written, number: int, function: Function) -> list[str]:
    schema = _parameters(function)
    check_schema(schema)
    required = schema.get("required") or ()
    parts: list[str] = []
    rules: list[str] = []
    for place, (key, described) in enumerate(_properties(schema).items()):
        name = f"p_{number}_{place}"
        parts.append(name if key in required else f"{name}?")
        body, more = _tagged_value(literal, f"v_{number}_{place}", described, written.value_end)
        rules += [
            f"{name}: {literal(written.key + key + written.middle)} {body} {literal(written.gap)}".rstrip(),
            *more,
        ]
    head, end = literal(function["name"] + written.head), literal(written.end)
    return [" ".join([f"call_{number}:", head, *parts, end]), *rules]


def _properties(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the schema of each parameter by name, with the definitions that it may refer to. A
    schema that is no object becomes `{}`, which allows everything."""
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    found = {key: _resolved(given, schema) for key, given in (schema.get("properties") or {}).items()}
    return {key: {**each, **definitions} if isinstance(each, Mapping) else {} for key, each in found.items()}


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a `$ref` of `schema` into `root` (`#/...`) names; None if there is
    none. A schema without such a reference is returned unchanged."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found: Any = root
    for step in reference[2:].split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _tagged_value(literal: _Literals, name: str, schema: Mapping[str, Any], end: str) -> tuple[str, list[str]]:
    """Return Lark for a parameter's value with the text `end` after it, and the further rules that
    it refers to: text unchanged, one of the texts of an `enum`, anything else as JSON. `name`: a
    free rule name."""
    if isinstance(schema.get("enum"), list) and all(isinstance(value, str) for value in schema["enum"]):
        words = " | ".join(_quoted(word) for word in schema["enum"])
        return f"({words}) {literal(end)}", []
    if schema.get("type") in ("integer", "number", "boolean", "object", "array", "null"):
        return f"{name} {literal(end)}", [f"{name}: %json {embedded(schema)}"]
    return name, literal.upto(name, end)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Return text as a regular expression, for use between slashes in Lark, that matches exactly
    this text."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/])", r"\\\1", text).replace("\n", "\\n")
