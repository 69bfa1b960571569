"""Requests that are refused before an endpoint runs: the parameter, the path or the method at fault
is named in the form of the path's protocol."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from fastapi.testclient import TestClient
from pydantic import ValidationError, create_model
from starlette.exceptions import HTTPException

from sglcore.serving.apis.answer import as_json
from sglcore.serving.apis.shared_body import Body
from sglcore.serving.http.http_errors import on_http, on_validation, refused
from sglcore.serving.http.openapi import Application as Documented
from sglcore.serving.http.routes import Routes
from tests.serving.stubs import Application, make_frontend

ITEMS = "/v1/responses/resp_1/input_items"


class Part(Body):
    """A part of a body."""

    y: int


class Other(Body):
    """Another part of a body."""

    z: int


@pytest.fixture(scope="module")
def served() -> Application:
    return Application(make_frontend())


@pytest.mark.parametrize(
    ("method", "path", "param", "said"),
    [
        ("GET", f"{ITEMS}?limit=x", "limit", 'found "x"; wanted an integer'),
        ("GET", f"{ITEMS}?limit=0", "limit", 'found "0"; wanted at least 1'),
        ("GET", f"{ITEMS}?limit=101", "limit", 'found "101"; wanted at most 100'),
        ("GET", f"{ITEMS}?limit=1.5", "limit", 'found "1.5"; wanted an integer'),
        ("GET", f"{ITEMS}?order=up", "order", 'found "up"; wanted text that matches ^(asc|desc)$'),
        ("GET", f"{ITEMS}?limit=0&order=up", "limit", 'found "0"'),
        ("POST", "/pause?mode=stop", "mode", 'found "stop"; wanted "abort", "wait" or "keep"'),
        ("POST", "/pause?clear_cache=maybe", "clear_cache", 'found "maybe"; wanted true or false'),
    ],
)
def test_a_wrong_parameter_of_the_query_is_named(
    served: Application, method: str, path: str, param: str, said: str
) -> None:
    answer = served.send(method, path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert answer.json()["error"]["message"].startswith(f"{param}: {said}")


def own_app() -> TestClient:
    """An app with an endpoint that has parameters in its path, its query and its body."""
    app, routes = Documented(needs_key=False), Routes()

    @routes.post("/{place}")
    async def read(place: int, body: Part, times: int = 1) -> Response:
        """Read."""
        return as_json({"found": [place, body.y, times]})

    @routes.get("/a/{name}")
    async def named(name: str) -> Response:
        """Name."""
        return as_json({"name": name})

    @routes.delete("/a/{name}")
    async def forgets(name: str) -> Response:
        """Forget."""
        return as_json({})

    @routes.post("/a/b")
    async def counts() -> Response:
        """Count."""
        return as_json({})

    @routes.get("/fails/{status}")
    async def fails(status: int) -> Response:
        """Fail."""
        raise HTTPException(status, "why it fails", {"x-own": "kept"})

    app.include_router(routes)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    return TestClient(app)


def test_the_first_thing_that_is_wrong_is_named_wherever_it_stands() -> None:
    app = own_app()
    for path, body, param in (
        ("/a?times=b", {"y": 1}, "place"),
        ("/1?times=b", {"y": 1}, "times"),
        ("/1?times=2", {"y": "c"}, "y"),
        ("/1", {}, "y"),
    ):
        error = app.post(path, json=body).json()["error"]
        assert error["param"] == param, error
    assert app.post("/1?times=2", json={"y": 3}).json() == {"found": [1, 3, 2]}


@pytest.mark.parametrize(
    ("status", "code"), [(404, "not_found"), (405, "method_not_allowed"), (413, "request_too_large"), (418, None)]
)
def test_an_errors_own_words_and_headers_are_kept_and_its_status_has_a_code(status: int, code: str | None) -> None:
    answer = own_app().get(f"/fails/{status}")
    assert (answer.status_code, answer.headers["x-own"]) == (status, "kept")
    assert (answer.json()["error"]["message"], answer.json()["error"]["code"]) == ("why it fails", code)


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"5"])
def test_a_body_that_is_no_object_is_at_fault_as_a_whole(served: Application, body: bytes) -> None:
    answer = TestClient(served._app).post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, None) and "object" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("GET", "/1", "POST"), ("PATCH", "/a/c", "DELETE, GET"), ("PUT", "/a/b", "DELETE, GET, POST")],
)
def test_a_wrong_method_is_told_with_all_that_the_path_has(method: str, path: str, allow: str) -> None:
    answer = own_app().request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert answer.headers.get_list("allow") == [allow]
    assert answer.json()["error"]["message"].startswith(f"{method} {path}: method not allowed; /openapi.json")


def test_an_unknown_path_is_repeated_as_far_as_it_is_short(served: Application) -> None:
    for path in ("/v2/nothing", "/" + "x" * 300):
        error = served.send("GET", path).json()["error"]
        assert error["message"].startswith(f"GET {path[:200]}: not found;") and error["param"] is None


def refusal_of(fields: dict[str, Any], body: Any) -> Any:
    """The error about a body of these fields."""
    model: Any = create_model("Asked", __base__=Body, **fields)
    with pytest.raises(ValidationError) as found:
        model.model_validate(body)
    errors = [{**each, "loc": ("body", *each["loc"])} for each in found.value.errors(include_url=False)]
    return refused(RequestValidationError(errors, body=body))


@pytest.mark.parametrize(
    ("fields", "body", "param"),
    [
        ({"a": (int, ...), "b": (list[Part], ...)}, {"a": "x", "b": [{"y": "z"}]}, "a"),
        ({"a": (list[Part], ...), "b": (int, ...)}, {"a": [{"y": "z"}], "b": "x"}, "a[0].y"),
        ({"a": (Part | Other, ...)}, {"a": {}}, "a.y"),
        ({"a": (list[Part | Other], ...)}, {"a": [{"y": 1}, {}]}, "a[1].y"),
        ({"a": (int | list[Part], ...)}, {"a": []} | {"a": [{"y": 1}, {"y": {}}]}, "a[1].y"),
        ({"a": (dict[str, int], ...)}, {"a": {"k" * 300: "x"}}, ("a." + "k" * 300)[:200]),
        ({"a": (int, ...)}, {}, "a"),
        ({"a": (int, ...)}, None, None),
    ],
)
def test_of_several_errors_the_deepest_of_the_first_field_is_told(
    fields: dict[str, Any], body: Any, param: str | None
) -> None:
    assert refusal_of(fields, body).param == param


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [(Literal["a"], '"a"'), (Literal["a", "b"], '"a" or "b"'), (Literal[1, False], "1 or false"), (bool, "true or")],
)
def test_a_choice_is_told_in_words_of_json(kind: Any, wanted: str) -> None:
    assert f"a: found [1]; wanted {wanted}" in str(refusal_of({"a": (kind, ...)}, {"a": [1]}))
