"""Messages between the frontend and an engine process: typed records as msgpack. Nothing here is
ever unpickled.

The frontend sends each `EngineRequest`, an engine each `EngineReply`; every record of a side has a
tag of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from sglcore.engine.disaggregation.disaggregation_start import PageOptions
from sglcore.sampling.plain_params import pack_params as pack_params
from sglcore.sampling.plain_params import unpack_params as unpack_params
from sglcore.schedule.request_output import EngineOutput
from sglcore.schedule.scheduler_stats import SchedulerStats


class Address(msgspec.Struct, frozen=True):
    """Where the frontend listens for one engine, and at `beats` for its heartbeats. `public` and
    `secret` are the engine's CURVE keys, `frontend` is the frontend's public key; they are empty
    for a socket file."""

    endpoint: str
    beats: str = ""
    frontend: str = ""
    public: str = ""
    secret: str = ""


class GenerateRequest(msgspec.Struct, array_like=True, tag=1, gc=False):
    """Run a prompt: `prompt` is int32 in little-endian bytes, `params` has the values that differ
    from the defaults."""

    request_id: str
    prompt: bytes
    params: dict[str, Any]
    seed: int
    progress: bool = False


class Abort(msgspec.Struct, array_like=True, tag=2, gc=False):
    """End a request."""

    request_id: str


class Stop(msgspec.Struct, array_like=True, tag=3, gc=False):
    """End a sample: its text has reached the stop string `cause`, or (None) cannot be made."""

    request_id: str
    index: int
    cause: str | None


class Embed(msgspec.Struct, array_like=True, tag=4, gc=False):
    """Embed or score one prompt, with the segments of its tokens (empty: all of the first), int32
    in little-endian bytes."""

    request_id: str
    prompt: bytes
    segments: bytes = b""


class Audit(msgspec.Struct, array_like=True, tag=5, gc=False):
    """Look for pages and slots that are lost or held twice."""

    request_id: str


class Shutdown(msgspec.Struct, array_like=True, tag=6, gc=False):
    """End the process; running requests are dropped."""


class Pause(msgspec.Struct, array_like=True, tag=7, gc=False):
    """Stop running steps, or run them again; waiting and running requests keep their place."""

    request_id: str
    is_paused: bool


class Flush(msgspec.Struct, array_like=True, tag=8, gc=False):
    """Drop the unused cached prefixes."""

    request_id: str


EngineRequest = GenerateRequest | Abort | Stop | Embed | Audit | Shutdown | Pause | Flush


class Phase(msgspec.Struct, array_like=True, tag=1, gc=False):
    """The progress of the start: a step of the bring-up, with `done` of `total` parts."""

    name: str
    done: int
    total: int


class ModelInfo(msgspec.Struct, frozen=True, tag="info"):
    """The facts about a started engine, for the frontend."""

    device: str
    """The device."""
    device_evidence: str
    """The evidence of its probe."""
    distribution: str
    """The Python distribution of the device package."""
    version: str
    """The version of that distribution."""
    ledger: tuple[dict[str, Any], ...]
    """The decisions, rows as plain values."""
    limits: dict[str, Any]
    """The fields of `device.worker.Limits`, with the requests of all shards."""
    max_model_len: int
    """Tokens of the longest request, prompt and output together."""
    generates: bool
    """It generates text. False: it embeds or scores."""
    eos_ids: tuple[int, ...]
    """End-of-sequence tokens, ascending."""
    seconds: dict[str, float]
    """Seconds of each bring-up step, by its name."""
    fingerprint: str
    """A fingerprint that changes with anything that may change a result: versions, device, model,
    decisions."""


class EngineSpec(msgspec.Struct, frozen=True):
    """How an engine process starts. `config`: the fields of EngineConfig, already resolved.
    `chosen`: the device that the parent chose, as `ChosenDevice.encode` writes it (empty: the
    process chooses, on another machine). `pages`: its role in disaggregation."""

    address: Address
    config: dict[str, Any]
    replica: int = 0
    chosen: str = ""
    pages: PageOptions = PageOptions()


class Ready(msgspec.Struct, array_like=True, tag=2):
    """A token came out of the path that serves; requests are accepted from now on."""

    info: ModelInfo


class Beat(msgspec.Struct, gc=False):
    """An engine's heartbeat, on a socket of its own: the number of rounds of its loop."""

    rounds: int


class EngineOutputs(msgspec.Struct, array_like=True, tag=3, gc=False):
    """The outputs of one step, for all requests."""

    items: list[EngineOutput]


class Refused(msgspec.Struct, array_like=True, tag=4, gc=False):
    """A request that this engine refuses because of the caller's error in `error`."""

    request_id: str
    error: str


class Embedded(msgspec.Struct, array_like=True, tag=5, gc=False):
    """An embedding, float32 in little-endian bytes, or the reason why there is none."""

    request_id: str
    vector: bytes
    error: str = ""


class EngineStats(SchedulerStats, array_like=True, tag=6, gc=False):
    """Counters of one engine since its start: those of its scheduler, and its own."""

    compiling: int = 0
    """Requests that wait for their grammar."""
    failed_steps: int = 0
    """Steps that failed."""
    requests: int = 0
    """Requests that were accepted."""
    prompt_tokens: int = 0
    """Prompt tokens of these."""
    generation_tokens: int = 0
    """Output tokens."""
    host_seconds: float = 0.0
    """The part of `step_seconds` in which the host neither waited for the device nor was the device
    itself."""
    host_steps: int = 0
    """Steps that `step_seconds` counts."""
    step_seconds: float = 0.0
    """Seconds of all steps."""
    paths: dict[str, int] = msgspec.field(default_factory=dict)
    """Steps by path."""
    drafts: dict[tuple[int, int, int, int], int] = msgspec.field(default_factory=dict)
    """Results of draft tokens: steps of requests by `DraftCell`."""
    swap_rows: int = 0
    """KV entries in host memory that layers chose in decode steps, as in `SwapCounts`."""
    swap_hits: int = 0
    """Those entries that were on the device."""
    swap_waits: int = 0
    """Steps that waited for entries from the host."""
    loaded_bytes: int = 0
    """Bytes read from host memory."""
    stored_bytes: int = 0
    """Bytes written to host memory."""


class Failed(msgspec.Struct, array_like=True, tag=7, gc=False):
    """The engine cannot continue; its process ends with `exit_code`."""

    error: str
    exit_code: int


class Done(msgspec.Struct, array_like=True, tag=8, gc=False):
    """A Pause, a Flush or an Audit is done: `pages` that were dropped, `problems` that were
    found."""

    request_id: str
    pages: int = 0
    problems: list[str] = msgspec.field(default_factory=list)


class Able(msgspec.Struct, array_like=True, tag=9, gc=False):
    """Whether the engine can serve requests now. `lacks` names what is missing; empty: it can."""

    lacks: str


EngineReply = Phase | Ready | EngineOutputs | Refused | Embedded | EngineStats | Failed | Done | Able


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return int32, little-endian."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(packed: bytes) -> np.ndarray:
    """Return the int32 array that `pack_ids` wrote; read-only."""
    return np.frombuffer(packed, dtype="<i4")
