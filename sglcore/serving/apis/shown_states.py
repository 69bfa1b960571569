"""Hidden states in answers, as JSON: encoded in pieces, so that other requests do not wait for a
large answer."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglcore.engine.outputs import Completion
from sglcore.serving.apis.answer import encode

PIECE = 1 << 14
"""Values that are encoded at a time: some milliseconds."""
Wanted = bool | str | None
"""The field `return_hidden_states` of a body."""


async def shown_states(sample: Completion, wanted: Wanted) -> dict[str, Any]:
    """Return the field `hidden_states` of a choice, for a sample that has ended: with "all" a list
    of all of them, else the last one. Empty if none are `wanted`, or if there are none."""
    if not wanted or sample.hidden_states is None:
        return {}
    rows = await _rows(sample.hidden_states)
    return {"hidden_states": _listed(rows) if wanted == "all" else msgspec.Raw(rows[-1])}


async def native_states(sample: Completion, wanted: Wanted, prompt_tokens: int) -> dict[str, Any]:
    """Return the field `hidden_states` of /generate in the form of SGLang: a list of those of the
    prompt, and after it one for each token of the output but the last; with "last" the last one.
    Empty as in `shown_states`."""
    if not wanted or sample.hidden_states is None:
        return {}
    rows = await _rows(sample.hidden_states)
    if wanted == "last":
        return {"hidden_states": msgspec.Raw(rows[-1])}
    return {"hidden_states": [_listed(rows[:prompt_tokens]), *map(msgspec.Raw, rows[prompt_tokens:])]}


async def _rows(states: NDArray[np.float32]) -> list[bytes]:
    """Return the JSON of each row of states float32 [n, hidden]."""
    found: list[bytes] = []
    at_once = max(1, PIECE // max(states.shape[1], 1))
    for first in range(0, len(states), at_once):
        if first:
            await asyncio.sleep(0)
        found += map(encode, states[first : first + at_once].tolist())
    return found


def _listed(rows: list[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(rows) + b"]")
