"""jsonschema finds which removed parts of a schema a value violates, and they are reported by
name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import jsonschema
import pytest

from sglcore.engine.structured_output.answer_check import AnswerChecks, Question
from sglcore.engine.structured_output.answer_check_process import checked
from sglcore.engine.structured_output.killable_checks import CheckLimits, Verdict
from sglcore.engine.structured_output.schema_loosening import loosened, place_of
from sglcore.engine.structured_output.schema_validation import not_kept
from tests.engine.grammar_keywords import CASES
from tests.engine.structured_output.test_schema_loosening import REFUSED

LEFT_OUT = sorted(name for name in set(CASES) - REFUSED if loosened(CASES[name][0]).left_out)
PATIENCE = 120.0
UNIQUE: dict[str, Any] = {"type": "array", "uniqueItems": True}


def broken(schema: Any, value: Any) -> list[str]:
    """Return the violated parts among all removed parts of a schema."""
    return not_kept(schema, value, loosened(schema).left_out)


def is_checked(name: str) -> bool:
    """Whether a format is checked; formats unknown to jsonschema are annotations."""
    _, is_format, kind = name.partition("/format ")
    return not is_format or kind.strip("'") in jsonschema.FormatChecker.checkers


def test_there_are_cases_of_every_keyword_that_is_left_out() -> None:
    assert len(LEFT_OUT) > 15


@pytest.mark.parametrize("name", LEFT_OUT)
def test_each_keyword_that_is_left_out_is_checked_and_no_good_value_is_blamed(name: str) -> None:
    schema, good, bad = CASES[name]
    simpler, names = loosened(schema)
    assert not any(broken(schema, value) for value in good)
    library = jsonschema.Draft7Validator if isinstance(schema.get("items"), list) else jsonschema.Draft202012Validator
    taken = [value for value in bad if library(simpler).is_valid(value)]
    for value in taken if all(map(is_checked, names)) else ():
        assert broken(schema, value), value


@pytest.mark.parametrize(
    ("schema", "value", "names"),
    [
        ({"items": UNIQUE, "uniqueItems": True}, [[1, 1], [2]], ["#/items/uniqueItems"]),
        ({"items": UNIQUE, "uniqueItems": True}, [[1], [1]], ["#/uniqueItems"]),
        ({"$defs": {"T": UNIQUE}, "properties": {"a": {"$ref": "#/$defs/T"}}}, {"a": [1, 1]}, ["#/$defs/T/uniqueItems"]),
        ({"$defs": {"T": {"minimum": 3}}, "if": {"type": "integer"}, "then": {"$ref": "#/$defs/T"}}, 2, ["#/if"]),
        ({"anyOf": [{**UNIQUE, "minItems": 2}, {"not": {"const": [1, 1]}}]}, [1, 1], ["#/anyOf/0/uniqueItems", "#/anyOf/1/not"]),
        ({"anyOf": [UNIQUE, {"minItems": 2}], "not": {"maxItems": 2}}, [1, 1], ["#/not"]),
        ({"not": UNIQUE}, [1], ["#/not"]),
        ({"oneOf": [UNIQUE, {"maxItems": 3}]}, [1], ["#/oneOf"]),
        ({"patternProperties": {r"\bx": True}, "additionalProperties": False}, {"y": 1}, ["#/patternProperties"]),
        ({"properties": {"a": True}, "additionalProperties": False}, {"y": 1}, []),
        ({"type": "array", "maxItems": 1, "uniqueItems": True}, [1, 2], []),
        ({"properties": {"a/b": {"pattern": "^(?!x)"}}}, {"a/b": "xy"}, ["#/properties/a/b/pattern's look-around"]),
        ({"properties": {"f": {"format": "regex"}, "g": {"format": "path"}}}, {"f": "(", "g": ""}, ["#/properties/f/format 'regex'"]),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"a": {"$ref": "#"}}, "uniqueItems": True}, {"a": [1, 1]}, ["#/uniqueItems"]),
        ({"dependencies": {"a": ["b"]}}, {"a": 1}, ["#/dependencies"]),
        ({"items": [{"type": "string"}, True], "uniqueItems": True}, ["a", "a"], ["#/uniqueItems"]),
        ({"properties": {"a": {"items": [True, True], "uniqueItems": True}}}, {"a": [1, 1]}, ["#/properties/a/uniqueItems"]),
        (True, [1, 1], []),
    ],
)  # fmt: skip
def test_what_is_named_is_what_the_value_breaks_and_the_choice_that_is_left(
    schema: Any, value: Any, names: list[str]
) -> None:
    assert broken(schema, value) == names


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("#/a/uniqueItems", "#/a/uniqueItems"),
        ("#/format 'x'", "#/format"),
        ('#/format "it\'s"', "#/format"),
        ("#/properties/a\nb/pattern's look-around", "#/properties/a\nb/pattern"),
        ("#/properties/format 'x'/not", "#/properties/format 'x'/not"),
    ],
)
def test_a_name_has_the_place_of_its_part(name: str, place: str) -> None:
    assert place_of(name) == place


class Told(BaseHTTPRequestHandler):
    """Answers with a schema, and records the requested paths."""

    asked: tuple[str, ...] = ()

    def do_GET(self) -> None:
        Told.asked += (self.path,)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def foreign() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Told) as server:
        Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/secret"
        finally:
            server.shutdown()


def test_a_reference_to_another_document_is_told_and_nothing_is_fetched(foreign: str) -> None:
    text = json.dumps({"not": {"$ref": foreign}})
    found = checked(json.dumps({"schema": text, "left_out": ["#/not"], "text": "1"}).encode())
    assert found.error is not None and foreign in found.error[0] and not Told.asked


def question(schema: Any, text: str, begin: str = "") -> bytes:
    asked = Question(json.dumps(schema), tuple(loosened(schema).left_out), text, begin)
    return json.dumps({name: getattr(asked, name) for name in asked.__struct_fields__}).encode()


@pytest.mark.parametrize(
    ("schema", "text", "said", "error"),
    [
        (UNIQUE, "[1, 1]", ("#/uniqueItems",), ""),
        (UNIQUE, "[1, 2]", (), ""),
        (UNIQUE, "[1, 1", (), "the answer is no JSON"),
        (UNIQUE, "[" * 100_000, (), "the answer is no JSON"),
        ({"not": {"pattern": "("}}, '"a"', (), "missing )"),
        ({"not": {"$ref": "#/nowhere"}}, "1", (), "nowhere"),
        ({"not": {"type": 3}}, "1", (), "TypeError: "),
    ],
)
def test_what_can_not_be_checked_has_a_reason(schema: Any, text: str, said: tuple[str, ...], error: str) -> None:
    found = checked(question(schema, text))
    assert found.said == said and (found.error is not None) == bool(error)
    assert found.error is None or error in found.error[0]


def test_each_value_that_stands_behind_a_beginning_is_checked() -> None:
    assert not checked(question(UNIQUE, "so <a>[1, 2]</a> and <a> [3]</a>", "<a>")).said
    assert checked(question(UNIQUE, "so <a>[1, 2]</a> and <a> [3, 3]</a>", "<a>")).said == ("#/uniqueItems",)
    assert not checked(question(UNIQUE, "[1, 1]", "<a>")).said


@pytest.mark.parametrize("items", [["<a>", "<a> x"], ["<a>[1, 1]", 2]])
def test_a_beginning_inside_a_value_begins_no_other_value(items: list[Any]) -> None:
    found = checked(question(UNIQUE, f"<a>{json.dumps(items)}</a> and <a>[3]</a>", "<a>"))
    assert found.error is None and not found.said


@pytest.mark.parametrize(
    ("limits", "schema", "text", "ended"),
    [
        (
            {"seconds": 0.2},
            {"not": {"pattern": "^(a+)+$"}},
            f'"{"a" * 40}!"',
            "takes longer than 0.2 s of the processor",
        ),
        ({"memory": 1 << 20}, {"not": {"const": 1}}, f"[{'0.5,' * 1_000_000}1]", "takes more than 1 MiB of memory"),
    ],
)
def test_a_check_that_takes_too_much_is_ended_by_the_limits_that_its_checks_were_given(
    limits: dict[str, Any], schema: Any, text: str, ended: str
) -> None:
    checks = AnswerChecks(
        CheckLimits(**{"seconds": PATIENCE, "young_seconds": PATIENCE, "most_seconds": PATIENCE, **limits})
    )
    try:
        found: Future[Verdict] = Future()
        checks.submit(Question(json.dumps(schema), tuple(loosened(schema).left_out), text), found.set_result)
        assert found.result(PATIENCE).ended == ended
    finally:
        checks.close()
