"""Messages between the frontend and an engine process: typed records as msgpack. Nothing is
unpickled.

The frontend sends `EngineRequest`, an engine sends `EngineReply`; the tag of a record identifies
its kind within these.
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
    """Where the frontend listens for one engine: `endpoint` for messages, `beats` for heartbeats.
    For TCP, `public` and `secret` are the engine's CURVE keys, and `frontend` is the frontend's
    public key; for a socket file they are empty."""

    endpoint: str
    beats: str = ""
    frontend: str = ""
    public: str = ""
    secret: str = ""


class GenerateRequest(msgspec.Struct, array_like=True, tag=1, gc=False):
    """To an engine: generate for a prompt. `prompt`: token ids, int32 in little-endian bytes;
    `params`: as `pack_params` returns them; `seed`: of its samples; `progress`: also report the
    progress of the prompt. `EngineOutputs` or `Refused` answer it."""

    request_id: str
    prompt: bytes
    params: dict[str, Any]
    seed: int
    progress: bool = False


class Abort(msgspec.Struct, array_like=True, tag=2, gc=False):
    """To an engine: end every sample of a request, also of an `Embed`. An id that is not in
    progress is ignored."""

    request_id: str


class Stop(msgspec.Struct, array_like=True, tag=3, gc=False):
    """To an engine: end sample number `index`, because its text has reached the stop string or
    pattern `cause`, or (None) cannot be made."""

    request_id: str
    index: int
    cause: str | None


class Embed(msgspec.Struct, array_like=True, tag=4, gc=False):
    """To an engine: embed or score one prompt: token ids and segment ids (empty: all 0), int32 in
    little-endian bytes. `Embedded`, or `Refused`, answers it."""

    request_id: str
    prompt: bytes
    segments: bytes = b""


class Audit(msgspec.Struct, array_like=True, tag=5, gc=False):
    """To an engine: search for pages and slots that are lost or held twice. `Done` answers it."""

    request_id: str


class Shutdown(msgspec.Struct, array_like=True, tag=6, gc=False):
    """To an engine: end the process; requests in progress are dropped."""


class Pause(msgspec.Struct, array_like=True, tag=7, gc=False):
    """To an engine: stop running steps, or run them again; waiting and running requests keep their
    place. `Done` answers it."""

    request_id: str
    is_paused: bool


class Flush(msgspec.Struct, array_like=True, tag=8, gc=False):
    """To an engine: drop cached prefixes that no request uses. `Done` answers it."""

    request_id: str


EngineRequest = GenerateRequest | Abort | Stop | Embed | Audit | Shutdown | Pause | Flush


class Phase(msgspec.Struct, array_like=True, tag=1, gc=False):
    """From an engine: the progress of its start: `done` of `total` units of the phase `name`;
    phases follow one another."""

    name: str
    done: int
    total: int


class ModelInfo(msgspec.Struct, frozen=True, tag="info"):
    """Facts about a started engine, for the frontend: device, limits, start-up decisions, seconds
    of each step of the start, and the fingerprint of everything that may change a result. `Ready`
    brings them; they do not change."""

    device: str
    """The chosen device, as text."""
    device_evidence: str
    """What the probe of the device found."""
    distribution: str
    """The Python distribution of the device package."""
    version: str
    """The version of that distribution."""
    ledger: tuple[dict[str, Any], ...]
    """The rows of the start-up decisions, as plain values."""
    limits: dict[str, Any]
    """The fields of `device.worker.Limits`; `max_requests` is the sum over all data-parallel
    shards."""
    max_model_len: int
    """Maximum tokens of a request, prompt and output together."""
    generates: bool
    """Whether it generates text. False: it embeds or scores."""
    eos_ids: tuple[int, ...]
    """Ids of the end-of-sequence tokens, ascending."""
    seconds: dict[str, float]
    """Seconds of each bring-up step, by its name."""
    fingerprint: str
    """A text that changes with anything that may change a result: versions, device, model,
    decisions."""


class EngineSpec(msgspec.Struct, frozen=True):
    """What an engine process is started with. `config`: as `plain_config` returns it; `replica`:
    its number, from 0; `chosen`: the device that the parent chose, as `ChosenDevice.encode` writes
    it (empty: the process chooses, on another machine); `pages`: its role in disaggregation."""

    address: Address
    config: dict[str, Any]
    replica: int = 0
    chosen: str = ""
    pages: PageOptions = PageOptions()


class Ready(msgspec.Struct, array_like=True, tag=2):
    """From an engine that has generated a token (or an embedding) by the path that serves: requests
    are accepted from now on. Sent once."""

    info: ModelInfo


class Beat(msgspec.Struct, gc=False):
    """A heartbeat of an engine, on a socket of its own. `rounds`: number of rounds of its loop so
    far."""

    rounds: int


class EngineOutputs(msgspec.Struct, array_like=True, tag=3, gc=False):
    """From an engine: the outputs of a step, for all requests in it, or of requests that ended
    outside a step."""

    items: list[EngineOutput]


class Refused(msgspec.Struct, array_like=True, tag=4, gc=False):
    """From an engine: it refuses a GenerateRequest or an Embed because of an error of the caller,
    before running it; `error` is the message that the client gets."""

    request_id: str
    error: str


class Embedded(msgspec.Struct, array_like=True, tag=5, gc=False):
    """From an engine: the result of `Embed`, float32 in little-endian bytes, or `error`, the reason
    why there is none."""

    request_id: str
    vector: bytes
    error: str = ""


class EngineStats(SchedulerStats, array_like=True, tag=6, gc=False):
    """From an engine, several times a second between steps: its counters since its start, and its
    present load: those of its scheduler, and its own. Each replaces the one before."""

    compiling: int = 0
    """Requests that wait for the compilation of their grammar now."""
    failed_steps: int = 0
    """Steps that failed."""
    requests: int = 0
    """Requests that were accepted."""
    prompt_tokens: int = 0
    """Prompt tokens of the accepted requests."""
    generation_tokens: int = 0
    """Output tokens that were sent."""
    host_seconds: float = 0.0
    """The part of `step_seconds` in which the host neither waited for the device nor computed the
    step itself."""
    host_steps: int = 0
    """Number of steps in `step_seconds`."""
    step_seconds: float = 0.0
    """Seconds of all steps, without those that only waited."""
    paths: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of steps by `BatchResult.path`."""
    drafts: dict[tuple[int, int, int, int], int] = msgspec.field(default_factory=dict)
    """Steps that verified draft tokens, counted for each request, by `DraftCell`."""
    swap_rows: int = 0
    """KV entries in host memory that layers chose in decode steps, as in `SwapCounts`."""
    swap_hits: int = 0
    """Those of `swap_rows` that were on the device already."""
    swap_waits: int = 0
    """Steps that waited for KV entries from host memory."""
    loaded_bytes: int = 0
    """Bytes of KV entries read from host memory."""
    stored_bytes: int = 0
    """Bytes of KV entries written to host memory."""


class Failed(msgspec.Struct, array_like=True, tag=7, gc=False):
    """From an engine that cannot continue; its process ends with `exit_code`."""

    error: str
    exit_code: int


class Done(msgspec.Struct, array_like=True, tag=8, gc=False):
    """From an engine: the answer to a Pause, a Flush or an Audit. `pages`: number of pages that a
    Flush dropped (else 0); `problems`: what an Audit found (empty: nothing)."""

    request_id: str
    pages: int = 0
    problems: list[str] = msgspec.field(default_factory=list)


class Able(msgspec.Struct, array_like=True, tag=9, gc=False):
    """From an engine: its ability to serve requests has changed. `lacks`: what is missing; empty:
    it can serve."""

    lacks: str


EngineReply = Phase | Ready | EngineOutputs | Refused | Embedded | EngineStats | Failed | Done | Able


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as int32 in little-endian bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(packed: bytes) -> np.ndarray:
    """Return the token ids that `pack_ids` packed, int32 [N]: a read-only view of `packed`."""
    return np.frombuffer(packed, dtype="<i4")
