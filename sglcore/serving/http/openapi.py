"""The OpenAPI document: FastAPI's, with the schemas of stream events added and answers removed that
this server never sends."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.routing import compile_path

from sglcore.serving.apis.openai.answers import ChatChunk, CompletionChunk

_REFERENCE = "#/components/schemas/{model}"
_NEVER_SENT = ("HTTPValidationError", "ValidationError")


class Application(FastAPI):
    """A FastAPI application whose OpenAPI document also has the schemas of stream events, and no
    answers that this server never sends."""

    def __init__(self, *, needs_key: bool, **settings: Any) -> None:
        """`needs_key`: requests need an API key; `settings`: parameters of FastAPI."""
        self._needs_key = needs_key
        super().__init__(**settings)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document; it is made at the first call, and later calls return the
        same object. Overrides FastAPI's method."""
        if self.openapi_schema is None:
            document = super().openapi()
            _without_422(document)
            _, chunks = models_json_schema(
                [(ChatChunk, "serialization"), (CompletionChunk, "serialization")], ref_template=_REFERENCE
            )
            document["components"]["schemas"] |= chunks["$defs"]
            if self._needs_key:
                _with_keys(document)
            self.openapi_schema = document
        return self.openapi_schema

    def methods(self, path: str) -> tuple[str, ...]:
        """Return the HTTP methods of all documented endpoints whose path matches `path`, sorted;
        empty if none does. Endpoints outside the OpenAPI document, such as `/`, are not found."""
        documented = self.openapi()["paths"].items()
        found = (operations for template, operations in documented if compile_path(template)[0].match(path))
        return tuple(sorted(method.upper() for operations in found for method in operations))


def _without_422(document: dict[str, Any]) -> None:
    """Remove status 422, and the schemas that only it uses, from the document, in place: a wrong
    body has status 400, as in OpenAI's API."""
    for operation in (operation for path in document["paths"].values() for operation in path.values()):
        operation["responses"].pop("422", None)
    for name in _NEVER_SENT:
        document["components"]["schemas"].pop(name, None)


def _with_keys(document: dict[str, Any]) -> None:
    document["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    document["security"] = [{"bearer": []}, {"header": []}]
