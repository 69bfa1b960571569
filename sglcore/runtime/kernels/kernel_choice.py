"""Chooses the function of a kernel entry for a model.

It is the first candidate that takes the model's calls, chosen once, when sizes are known: when a
layer is built, and when the pools exist. Nothing is chosen when a kernel runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import dropwhile
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from sglcore.core.ledger import Row
from sglcore.runtime.kernels.entry import Entry, Kernel
from sglcore.runtime.kernels.table import KernelTable, Limited, origin_of

K = TypeVar("K")
Call = Sequence[object]
"""The arguments of one call of an entry."""

REMEDY = "another --dtype or model, or --kernels reference, which is slow and takes everything"


class Refusals:
    """Collects the calls that kernels refused, and the entries that a vendor's library serves, and
    makes ledger rows of both.
    """

    def __init__(self) -> None:
        self._by_reason: dict[str, dict[tuple[str, str], Row]] = {}
        self._taken: dict[str, dict[str, str]] = {}

    def took(self, entry: Entry[Any], taken: Limited) -> None:
        """Record that a candidate which calls a vendor's library is chosen for an entry. Does
        nothing for other candidates.
        """
        if taken.library:
            self._taken.setdefault(taken.library, {})[entry.name] = origin_of(taken.function)

    def add(self, entry: Entry[Any], refuses: Kernel, after: Kernel | None, reason: str, call: Call) -> None:
        """Record that a candidate, `refuses`, does not take a call, with its reason.

        `after` is the next candidate; None if the layer uses the entries that this one combines.
        """
        instead = "the entries that it combines" if after is None else origin_of(after)
        found = f"{reason}; found {_text(entry, call)}"
        row = Row(entry.name, origin_of(refuses), instead, found, REMEDY, downgrade=True)
        self._by_reason.setdefault(reason, {}).setdefault((row.topic, row.requested), row)

    def gave_up(self, entry: Entry[Any], dropped: Limited) -> None:
        """Record that a candidate was removed from the table: it serves no call of the entry."""
        self._taken.get(dropped.library, {}).pop(entry.name, None)

    def rows(self) -> Iterator[Row]:
        """Yield one ledger row per library that serves entries, and one per reason of a refusal,
        with all kernels named.

        A row of a refusal also shows the call that the first of these kernels refused.
        """
        for library, taken in self._taken.items():
            if not taken:
                continue
            why = f"{_modules(taken.values())}: first candidate that takes the model's calls"
            yield Row(_topic(taken), "auto", library, why, "--kernels reference, which is slow")
        for found in self._by_reason.values():
            rows = tuple(found.values())
            topic = _topic(dict.fromkeys(row.topic for row in rows))
            if len(rows) == 1:
                yield replace(rows[0], topic=topic)
            else:
                wanted, instead = _modules(row.requested for row in rows), _modules(row.effective for row in rows)
                yield replace(rows[0], topic=topic, requested=wanted, effective=instead)


def _topic(names: Collection[str]) -> str:
    return f"kernel{'s' * (len(names) > 1)} {', '.join(names)}"


def _modules(origins: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(origin.partition(":")[0] for origin in origins))


def choose(table: KernelTable, entry: Entry[K], call: Call, refusals: Refusals | None = None) -> K:
    """Return the first function of `entry` that takes calls with these arguments.

    None if the entry is optional and no candidate takes them. Candidates that refuse are recorded
    in `refusals`.
    """
    described = [described_as(arg) for arg in call]
    candidates = table.candidates[entry.name]
    for place, candidate in enumerate(candidates, 1):
        reason = candidate.refusal(*described)
        if not reason:
            if refusals is not None:
                refusals.took(entry, candidate)
            return cast("K", candidate.function)
        if refusals is not None:
            after = candidates[place].function if place < len(candidates) else None
            refusals.add(entry, candidate.function, after, reason, described)
    return cast("K", None)


def fitted(table: KernelTable, entry: Entry[Any], call: Call, refusals: Refusals | None) -> KernelTable:
    """Return the table without the candidates of `entry` before the first that takes calls with
    these arguments. If none takes them, the entry of the new table is None.
    """
    chosen, held = choose(table, entry, call, refusals), table.candidates[entry.name]
    left = tuple(dropwhile(lambda candidate: candidate.function is not chosen, held))
    for dropped in held[: len(held) - len(left)]:
        if refusals is not None:
            refusals.gave_up(entry, dropped)
    return table if left == held else table.narrowed(entry.name, left)


def fitted_to(
    table: KernelTable, calls: Iterable[tuple[Entry[Any], Call]], refusals: Refusals | None = None
) -> KernelTable:
    """Return the table that `fitted` returns for all of these calls."""
    for entry, call in calls:
        table = fitted(table, entry, call, refusals)
    return table


def described_as(arg: object) -> Any:
    """Return an argument as `Limited.takes` gets it.

    A tensor becomes one without content, with its dtype, shape and strides. A number, text or None
    stays; anything else becomes None.
    """
    if isinstance(arg, Tensor):
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")
    return arg if isinstance(arg, (int, float, str)) else None


def _text(entry: Entry[Any], call: Call) -> str:
    told = zip(entry.parameters, call, strict=True)
    return ", ".join(f"{name} {_argument(arg)}" for name, arg in told if arg is not None)


def _argument(arg: object) -> str:
    return f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}" if isinstance(arg, Tensor) else str(arg)
