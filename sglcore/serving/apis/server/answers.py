"""Answers about the server itself: its phase, its models, what it decided, what it counts."""

from __future__ import annotations

from typing import Any, Literal, get_type_hints

from pydantic import ConfigDict, create_model

from sglcore.serving.apis.body import Answer
from sglcore.serving.replicas.ipc import ModelInfo


class PhaseAnswer(Answer):
    """How far the server is: `done` of `total` parts of a phase, seconds since its start."""

    model_config = ConfigDict(extra="allow")

    phase: str
    done: int | None = None
    total: int | None = None
    elapsed_s: float


class ModelCard(Answer):
    """One served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = None
    root: str
    parent: None = None


class ModelList(Answer):
    """All names under which the model is served."""

    object: Literal["list"]
    data: list[ModelCard]


class _ServerFacts(Answer):
    """What the server knows without its engines, and what both have a part in."""

    version: str
    phase: str
    model: str
    served_model_names: list[str]
    ledger: list[dict[str, Any]]
    seconds: dict[str, float]
    tool_parser: str | None
    tool_reason: str
    reasoning_parser: str | None
    reasoning_reason: str
    server_limits: dict[str, int | float | None]


OF_ENGINE = tuple(name for name in ModelInfo.__struct_fields__ if name not in (*_ServerFacts.model_fields, "eos_ids"))
"""What is told of the model as its engine told it."""


def _server_info() -> type[Answer]:
    kinds = get_type_hints(ModelInfo)
    known_later: dict[str, Any] = {name: (kinds[name] | None, ...) for name in OF_ENGINE}
    text = "What runs, and every decision that led there. What is known only when the model is ready is null before."
    return create_model("ServerInfo", __base__=_ServerFacts, __doc__=text, **known_later)


ServerInfo = _server_info()


class Counters(Answer):
    """What engines have done since their start, and what they do now; `kv_used` is a share from 0 to 1. `verified_steps` counts a
    step for each of its requests: one token, and the `accepted_tokens` of the `proposed_tokens`."""

    prompt_tokens: int
    generation_tokens: int
    running: int
    waiting: int
    kv_used: float
    cached_tokens: int
    prompt_tokens_computed: int
    requests: int
    verified_steps: int
    proposed_tokens: int
    accepted_tokens: int


class ReplicaStats(Counters):
    """Those of one engine. `report_age`: seconds since it was last heard."""

    number: int
    process: str
    report_age: float
    state: str


class ServerStats(Counters):
    """The sums over all engines; `time` in unix seconds, `deaths` of engines that were not told to end."""

    time: float
    deaths: int
    replicas: list[ReplicaStats]


class ServerAudit(Answer):
    """Pages and slots of the engines that are lost or held twice; none if all is well."""

    problems: list[str]
