"""Model names in Ollama's form: NAME:TAG, with the default tag `latest`."""

from __future__ import annotations

from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.server_errors import InvalidRequest

LATEST = ":latest"


def tagged(name: str) -> str:
    """Return a model name with a tag: unchanged if it has a colon, else with `:latest` appended."""
    return name if ":" in name else name + LATEST


def served_name(frontend: Frontend, name: str | None) -> str:
    """Return the served name that equals `name` after the default tag is added to both, as the
    server writes it; for None or "", the first served name. Raises InvalidRequest (status 404) if
    no served name is equal."""
    if not name:
        return frontend.names[0]
    found = next((each for each in frontend.names if tagged(each) == tagged(name)), None)
    if found is None:
        raise InvalidRequest(
            f"model {name[:120]!r} not found",
            wanted=f"one of {', '.join(map(tagged, frontend.names))}",
            remedy="this server has the model that it was started with, and pulls no other",
            param="model",
            code="model_not_found",
            status=404,
        )
    return found
