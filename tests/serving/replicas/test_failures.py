"""The answer to each error: status, kind, code, field, and when to come again."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError, create_model

from sglcore.engine.outputs import TextDelta
from sglcore.engine.tokenizers.text_codec import TextError
from sglcore.sampling.params import SamplingError, SamplingParams
from sglcore.schedule.request_errors import ContextError, RequestError
from sglcore.serving.apis.shared_body import Body, Int
from sglcore.serving.http.http_errors import body_of, refused
from sglcore.serving.replicas.server_errors import (
    INVALID,
    EngineDied,
    Failure,
    InvalidRequest,
    NotAnswering,
    NotReady,
    Overloaded,
    ShuttingDown,
    StorageError,
    Unanswered,
    Unserved,
    blame,
    ended_badly,
    failure,
    parameter_of,
    told,
)
from tests.serving.stubs import Application, StubGeneration, make_frontend

UNAVAILABLE = "unavailable_error"


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "later"),
    [
        (Overloaded("full", retry_after=0.0), 429, "rate_limit_error", "overloaded", "1"),
        (Overloaded("full", retry_after=2.0), 429, "rate_limit_error", "overloaded", "2"),
        (Overloaded("full", retry_after=2.1), 429, "rate_limit_error", "overloaded", "3"),
        (NotReady("loading"), 503, UNAVAILABLE, "not_ready", "1"),
        (ShuttingDown("told to stop"), 503, UNAVAILABLE, "shutting_down", None),
        (Unserved("no other engine"), 503, UNAVAILABLE, "unserved", "1"),
        (NotAnswering("replica 0", "silent"), 503, UNAVAILABLE, "not_answering", "5"),
        (EngineDied("signal 9", "again"), 503, UNAVAILABLE, "engine_died", None),
        (StorageError("full", is_full=True), 507, "server_error", "insufficient_storage", None),
        (StorageError("broken", is_full=False), 500, "server_error", "storage_failed", None),
        (InvalidRequest("no"), 400, INVALID, None, None),
        (InvalidRequest("no", code="not_found", status=404), 404, INVALID, "not_found", None),
        (SamplingError("n is 0, wanted 1"), 400, INVALID, None, None),
        (RequestError("no"), 400, INVALID, None, None),
        (ContextError("too long"), 400, INVALID, "context_length_exceeded", None),
        (TextError("no"), 400, INVALID, None, None),
        (Unanswered(ended_badly("abort", "")), 503, UNAVAILABLE, "aborted", None),
        (Unanswered(ended_badly("error", "")), 500, "server_error", "engine_error", None),
    ],
)
def test_each_error_has_its_answer(
    error: Exception, status: int, kind: str, code: str | None, later: str | None
) -> None:
    found = failure(error)
    assert found is not None and found.message == str(error)
    assert (found.status, found.type, found.code, found.headers.get("retry-after")) == (status, kind, code, later)


def test_a_defect_of_ours_is_told_by_its_id_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert failure(ValueError("secret")) is None
    with caplog.at_level(logging.ERROR, "sglcore.serving"):
        first, second = told(ValueError("secret")), told(ValueError("secret"))
    assert (first.status, first.type, first.code) == (500, "server_error", "internal_error")
    assert "secret" not in first.message and first.message != second.message
    assert all(each.message.rpartition(" ")[2] in caplog.text for each in (first, second))


@pytest.mark.parametrize("field", [None, "stop"])
@pytest.mark.parametrize(
    "error", [RequestError("no"), ContextError("too long"), TextError("no"), InvalidRequest("no", code="c", status=404)]
)
def test_an_error_is_blamed_on_a_field_unless_it_names_another(error: Exception, field: str | None) -> None:
    if field is not None and isinstance(error, InvalidRequest):
        error = InvalidRequest("no", param=field, code="c", status=404)
    elif field is not None:
        error = TextError("no", field=field)
    before = failure(error)
    assert before is not None
    with pytest.raises(InvalidRequest) as found, blame("prompt[2]"):
        raise error
    after = failure(found.value)
    assert after == Failure(before.status, before.message, INVALID, field or "prompt[2]", before.code)


@pytest.mark.parametrize("error", [ValueError("ours"), NotReady("loading"), Overloaded("full", retry_after=1.0)])
def test_an_error_that_no_field_causes_is_blamed_on_none(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, blame("prompt"):
        raise error
    assert raised.value is error


def test_only_errors_of_the_kinds_that_are_meant_are_blamed() -> None:
    error = RequestError("no")
    with pytest.raises(RequestError) as raised, blame("prompt", TextError):
        raise error
    assert raised.value is error
    with pytest.raises(InvalidRequest, match="no") as found, blame("prompt", TextError):
        raise TextError("no")
    assert found.value.param == "prompt"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("top_p is 2, wanted at most 1", "top_p"),
        ("logit_bias[3]: no number", "logit_bias"),
        ("stop: too long", "stop"),
        ("2 parameters differ", None),
        ("", None),
    ],
)
def test_the_parameter_that_an_error_is_about_stands_at_its_beginning(text: str, name: str | None) -> None:
    assert parameter_of(SamplingError(text)) == name


@pytest.mark.parametrize(
    "values", [{"temperature": -1.0}, {"top_p": 2.0}, {"n": 0}, {"max_tokens": 0}, {"logprobs": -1}, {"seed": -5}]
)
def test_the_parameters_own_errors_begin_with_their_names(values: dict[str, float]) -> None:
    with pytest.raises(SamplingError) as found:
        SamplingParams(**values)  # pyright: ignore[reportArgumentType]
    assert parameter_of(found.value) == next(iter(values))


@pytest.fixture(scope="module")
def served() -> tuple[Any, Application]:
    """A frontend that generates nothing yet, and an application over it."""
    frontend = make_frontend()
    return frontend, Application(frontend)


def prompts(served: tuple[Any, Application], several: list[str]) -> tuple[Any, list[StubGeneration], list[str | None]]:
    """The answer to a request for completions of these prompts, the generations that were begun,
    and their ids. The prompt "long" is refused."""
    begun: list[StubGeneration] = []
    ids: list[str | None] = []

    async def generate(prompt: str, *given: Any, request_id: str | None, **named: Any) -> StubGeneration:
        if prompt == "long":
            raise ContextError("too long")
        ids.append(request_id)
        begun.append(StubGeneration([TextDelta("r", 0, "A", (5,), "stop")]))
        return begun[-1]

    frontend, application = served
    frontend.generate = generate
    return application.send("POST", "/v1/completions", {"prompt": several}).json(), begun, ids


def test_the_first_prompt_that_is_refused_is_named_and_ends_those_before_it(served: tuple[Any, Application]) -> None:
    for several, param, count in ((["long"], "prompt", 0), (["a", "b", "long", "long"], "prompt[2]", 2)):
        answer, begun, _ = prompts(served, several)
        assert (answer["error"]["param"], answer["error"]["code"]) == (param, "context_length_exceeded")
        assert [each.aborted for each in begun] == [True] * count


def test_each_prompt_of_a_request_has_an_id_that_begins_with_that_of_the_answer(
    served: tuple[Any, Application],
) -> None:
    for several in (["a"], ["a", "b", "c"]):
        answer, _, ids = prompts(served, several)
        assert ids == ([answer["id"]] if len(several) == 1 else [f"{answer['id']}-{place}" for place in range(3)])
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(several)))


MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (507, "api_error"),
        (529, "overloaded_error"),
    ],
)
def test_each_status_has_its_kind_for_clients_of_anthropic(status: int, kind: str) -> None:
    for path in MESSAGES:
        found = body_of(Failure(status, "no", "any", "a", "b"), {"path": path, "headers": []})
        assert found == {"type": "error", "error": {"type": kind, "message": "no"}}


@pytest.mark.parametrize(
    ("path", "header", "form"),
    [
        *((path, False, "anthropic") for path in MESSAGES),
        ("/v1/messages_of_others", True, "openai"),
        ("/v1/models", True, "anthropic"),
        ("/v1/models/a", True, "anthropic"),
        ("/v1/models/a", False, "openai"),
        ("/v1/completions", True, "openai"),
        ("/api/chat", True, "ollama"),
        ("/apis", False, "openai"),
    ],
)
def test_an_error_has_the_form_that_clients_of_its_path_know(path: str, header: bool, form: str) -> None:
    forms = {
        "openai": {"error": {"message": "no", "type": INVALID, "param": "a", "code": "b"}},
        "anthropic": {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}},
        "ollama": {"error": "no"},
    }
    headers = [(b"anthropic-version", b"2023-06-01")] * header
    assert body_of(Failure(400, "no", INVALID, "a", "b"), {"path": path, "headers": headers}) == forms[form]


def refusal_of(kind: Any, value: Any) -> InvalidRequest:
    """The error about a body in which the field `x` has this type and this value."""
    body = {"x": value}
    with pytest.raises(ValidationError) as found:
        create_model("Asked", __base__=Body, x=(kind, ...)).model_validate(body)
    errors = [{**each, "loc": ("body", *each["loc"])} for each in found.value.errors(include_url=False)]
    return refused(RequestValidationError(errors, body=body))


class Part(Body):
    """A part of a body."""

    y: int


@pytest.mark.parametrize(
    ("kind", "value", "found", "wanted"),
    [
        (str, 5, "5", "text"),
        (Annotated[str, Field(min_length=2)], "a", '"a"', "at least 2 characters"),
        (Annotated[str, Field(max_length=2)], "abc", '"abc"', "at most 2 characters"),
        (Annotated[str, Field(pattern="^a$")], "b", '"b"', "text that matches ^a$"),
        (bool, "yes", '"yes"', "true or false"),
        (Int, "1", '"1"', "an integer"),
        (Int, 1.5, "1.5", "an integer"),
        (float, "1", '"1"', "a number"),
        (Annotated[float, Field(gt=0)], 0.0, "0.0", "more than 0"),
        (Annotated[float, Field(gt=0.5)], 0.5, "0.5", "more than 0.5"),
        (Annotated[float, Field(ge=1)], 0.0, "0.0", "at least 1"),
        (Annotated[float, Field(le=2)], 3.0, "3.0", "at most 2"),
        (list[int], 5, "5", "a list"),
        (Annotated[list[int], Field(min_length=1)], [], "[]", "at least 1 of them"),
        (Annotated[list[int], Field(max_length=1)], [1, 2], "[1,2]", "at most 1 of them"),
        (dict[str, int], 5, "5", "an object"),
        (Part, 5, "5", "an object"),
        (None, 5, "5", "null"),
        (Literal["a", "b"], "c", '"c"', '"a" or "b"'),
        (Literal["a", False], "c", '"c"', '"a" or false'),
        (int | bool, "c", '"c"', "an integer or true or false"),
    ],
)
def test_what_a_field_wants_is_told_in_words_of_json(kind: Any, value: Any, found: str, wanted: str) -> None:
    error = refusal_of(kind, value)
    assert (str(error), error.param) == (f"x: found {found}; wanted {wanted}", "x")


def test_a_wrong_field_is_named_by_its_place_and_a_missing_one_as_such() -> None:
    found = [refusal_of(list[Part], [{"y": 1}, part]) for part in ({"y": "a"}, {})]
    assert [each.param for each in found] == ["x[1].y", "x[1].y"]
    assert str(found[1]) == "the field x[1].y is missing"
    either = refusal_of(str | list[Part], [{"y": 1}, {"y": "a"}])
    assert either.param == "x[1].y", "the member that fits best"


@pytest.mark.parametrize(("letters", "shown"), [(58, 58), (59, 56), (500, 56)])
def test_of_a_long_value_the_beginning_is_shown(letters: int, shown: int) -> None:
    end = '"' if shown == letters else "..."
    assert f'found "{"a" * shown}{end}; wanted' in str(refusal_of(int, "a" * letters))
