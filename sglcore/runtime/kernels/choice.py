"""Which function of a kernel table a model gets: the first candidate of an entry that takes what the model calls it with.

Asked once, where sizes are known: as a layer is built, and when the pools are there. Nothing is asked when a kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from sglcore.device.ledger import DecisionLedger, Row
from sglcore.runtime.kernels.table import Entry, Kernel, KernelTable, origin_of

K = TypeVar("K")
Call = Sequence[object]
"""The arguments of one call of an entry."""

REMEDY = "another --dtype or model; --kernels reference asks for what is slow and takes everything"


def choose(table: KernelTable, entry: Entry[K], call: Call, ledger: DecisionLedger | None = None) -> K:
    """The function of `entry` for calls like this one; None where the entry is optional and none takes them. Each refusal is
    a row of the ledger, once for a reason; raises `StrictError` for it where the ledger is strict."""
    described = [described_as(arg) for arg in call]
    candidates = table.candidates[entry.name]
    for place, candidate in enumerate(candidates, 1):
        reason = candidate.takes(*described)
        if not reason:
            return cast("K", candidate.function)
        if ledger is not None:
            after = candidates[place].function if place < len(candidates) else None
            _record(ledger, entry, candidate.function, after, reason, described)
    return cast("K", None)


def fitted(table: KernelTable, entry: Entry[Any], call: Call, ledger: DecisionLedger | None) -> KernelTable:
    """The table without the candidates of `entry` that `choose` passes by: its function is for calls like this one."""
    chosen, held = choose(table, entry, call, ledger), table.candidates[entry.name]
    left = tuple(dropwhile(lambda candidate: candidate.function is not chosen, held))
    return table if left == held else type(table)(**{**table.candidates, entry.name: left})


def described_as(arg: object) -> Any:
    """What `takes` sees of an argument: a tensor without content, of its dtype, shape and strides; a number, text or None as
    it is; None for anything else."""
    if isinstance(arg, Tensor):
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")
    return arg if isinstance(arg, (int, float, str)) else None


def _record(
    ledger: DecisionLedger, entry: Entry[Any], refuses: Kernel, after: Kernel | None, reason: str, call: Call
) -> None:
    instead = "the parts it stands for" if after is None else origin_of(after)
    topic, wanted = f"kernel {entry.name}", origin_of(refuses)
    if any(
        (row.topic, row.requested) == (topic, wanted) and row.reason.startswith(f"{reason}; ") for row in ledger.rows
    ):
        return
    ledger.record(Row(topic, wanted, instead, f"{reason}; found {_text(entry, call)}", REMEDY, downgrade=True))


def _text(entry: Entry[Any], call: Call) -> str:
    told = zip(entry.parameters, call, strict=True)
    return ", ".join(f"{name} {_argument(arg)}" for name, arg in told if arg is not None)


def _argument(arg: object) -> str:
    return f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}" if isinstance(arg, Tensor) else str(arg)
