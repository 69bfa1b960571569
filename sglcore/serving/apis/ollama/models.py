"""The served model in the forms of Ollama's lists and descriptions of models."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from sglcore.engine.model_card import ModelCard
from sglcore.serving.apis.fill_in_middle import fill_marks
from sglcore.serving.apis.ollama.events import written
from sglcore.serving.apis.ollama.names import tagged
from sglcore.serving.chat.chat_frontend import ChatFrontend

NEVER = "9999-12-31T23:59:59Z"
"""`expires_at` of a model that stays loaded."""
_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))
_OWN_NAMES = MappingProxyType({"repetition_penalty": "repeat_penalty"})


def listed(frontend: ChatFrontend, card: ModelCard) -> list[dict[str, Any]]:
    """Return the common fields of an entry, those of `Listed`, for each served name, in their
    order; the names get their tag."""
    about = {"size": card.num_bytes, "digest": card.digest, "details": details(card)}
    return [{"name": name, "model": name, **about} for name in map(tagged, frontend.names)]


def files(frontend: ChatFrontend, card: ModelCard) -> dict[str, Any]:
    """Return the answer of /api/tags: an entry for each served name."""
    return {"models": [{**each, "modified_at": written(card.modified)} for each in listed(frontend, card)]}


def runs(frontend: ChatFrontend, card: ModelCard) -> dict[str, Any]:
    """Return the answer of /api/ps: an entry for each served name; none before the model is loaded.
    Does not wait."""
    if frontend.info is None:
        return {"models": []}
    about = {"expires_at": NEVER, "size_vram": card.num_bytes, "context_length": frontend.info.max_model_len}
    return {"models": [{**each, **about} for each in listed(frontend, card)]}


def details(card: ModelCard) -> dict[str, Any]:
    """Return the fields of `Details` for a model; `parameter_size` is empty if the card does not
    know it."""
    return {
        "parent_model": "",
        "format": card.format,
        "family": card.family,
        "families": [card.family],
        "parameter_size": "" if card.parameters is None else short(card.parameters),
        "quantization_level": card.precision,
    }


def shown(frontend: ChatFrontend, card: ModelCard, name: str) -> dict[str, Any]:
    """Return the answer of /api/show, the fields of `Shown`, for the served name `name`, which is
    not checked. The model must be ready (`frontend.info` is not None)."""
    assert frontend.info is not None
    count = {} if card.parameters is None else {"general.parameter_count": card.parameters}
    sizes = {**card.sizes, "context_length": frontend.info.max_model_len}
    own = {_OWN_NAMES.get(key, key): value for key, value in frontend.sampling.items()}
    return {
        "modelfile": "\n".join((f"FROM {tagged(name)}", *(f"PARAMETER {key} {value:g}" for key, value in own.items()))),
        "parameters": "\n".join(f"{key:<30} {value:g}" for key, value in own.items()),
        "template": frontend.codec.template.source() or "",
        "details": details(card),
        "model_info": {
            "general.architecture": card.family,
            **count,
            **{f"{card.family}.{key}": value for key, value in sizes.items()},
        },
        "capabilities": capabilities(frontend),
        "modified_at": written(card.modified),
    }


def capabilities(frontend: ChatFrontend) -> list[str]:
    """Return the names of what the model can do, in Ollama's words: "completion" and perhaps
    "insert", "tools", "thinking"; or only "embedding"; empty for a model with a classification
    head. The model must be ready (`frontend.info` is not None)."""
    assert frontend.info is not None
    if not frontend.info.generates:
        return [] if frontend.info.limits["num_labels"] else ["embedding"]
    found = {
        "insert": fill_marks(frontend) is not None,
        "tools": frontend.format.tool_parser is not None,
        "thinking": frontend.format.reasoning_parser is not None,
    }
    return ["completion", *(name for name, is_there in found.items() if is_there)]


def short(count: int) -> str:
    """Return a number of parameters in short form, such as 7.2B: one decimal and T, B, M or K;
    below 1000 the number itself."""
    size, unit = next(((size, unit) for size, unit in _UNITS if count >= size), (1, ""))
    return f"{count / size:.1f}{unit}" if unit else str(count)
