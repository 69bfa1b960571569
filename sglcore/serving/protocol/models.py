"""Answers about the server itself: its phase, its models, what it decided, what it counts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from sglcore.serving.protocol.common import Answer


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


class ServerInfo(Answer):
    """What runs, and every decision that led there. What is known only when the model is ready is null before."""

    version: str
    phase: str
    model: str
    served_model_names: list[str]
    device: str | None
    device_evidence: str | None
    distribution: str | None
    max_model_len: int | None
    generates: bool | None
    limits: dict[str, Any] | None
    ledger: list[dict[str, Any]]
    seconds: dict[str, float]
    fingerprint: str | None
    tool_parser: str | None
    tool_reason: str
    reasoning_parser: str | None
    reasoning_reason: str
    server_limits: dict[str, int | float | None]


class Counters(Answer):
    """What engines have done since their start, and what they do now; `kv_used` is a share from 0 to 1."""

    prompt_tokens: int
    generation_tokens: int
    running: int
    waiting: int
    kv_used: float
    cached_tokens: int
    prompt_tokens_computed: int
    requests: int


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
