"""The effect of long prompts on other requests, the "chats", from the records of a load.

`beside` compares the gaps between pieces of text of chats while a long prompt waits for its first
token with those while none does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from sglcore.bench.figures import Spread, spread
from sglcore.bench.request_record import Record

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Beside:
    """The gaps between pieces of text of chats, in milliseconds, with and without a waiting long
    prompt; `beside` computes them.

    `quiet` has the gaps while no long prompt waited, and `during` those that overlap with a wait.
    `first` is the time from sending a long prompt to its first token. Each is None without values.
    `prompts` is the number of long prompts that completed.
    """

    quiet: Spread | None
    during: Spread | None
    first: Spread | None
    prompts: int

    def ratio(self, name: str) -> float | None:
        """Return a value of `during` divided by the same of `quiet`, or None if one does not exist
        or that of `quiet` is 0. `name` is a field of Spread, such as "p50"."""
        if self.quiet is None or self.during is None:
            return None
        quiet, during = getattr(self.quiet, name), getattr(self.during, name)
        return during / quiet if quiet > 0 else None

    def as_json(self) -> Mapping[str, object]:
        """Return the results as rounded plain values: times in milliseconds, and the ratios
        `during` / `quiet` of p50 and p99."""
        spreads = {"quiet": self.quiet, "during": self.during, "first": self.first}
        plain = {
            f"{name}_ms": None if found is None else {key: round(value, 3) for key, value in asdict(found).items()}
            for name, found in spreads.items()
        }
        ratios = {name: self.ratio(name) for name in ("p50", "p99")}
        return {
            "prompts": self.prompts,
            **plain,
            "ratios": {name: None if value is None else round(value, 3) for name, value in ratios.items()},
        }


def awaited(records: Sequence[Record]) -> list[Interval]:
    """Return when each long prompt waited for its first token, as pairs of start (when it was sent)
    and end, in the order of the records.

    Times are in seconds since the load began. A prompt without any text waited until its end.
    """
    return [(each.sent, each.marks[0] if each.marks else each.end) for each in records if each.is_long]


def gaps_beside(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Return two lists of gaps between pieces of text of completed chats (requests that are no long
    prompts), in seconds: those while no long prompt waited for its first token, and those that
    overlap with such a wait."""
    intervals = awaited(records)
    quiet, during = list[float](), list[float]()
    for record in records:
        if record.is_long or not record.is_whole:
            continue
        for before, gap in zip(record.marks, record.gaps, strict=False):
            is_beside = any(start < before + gap and before < end for start, end in intervals)
            (during if is_beside else quiet).append(gap)
    return quiet, during


def beside(records: Sequence[Record]) -> Beside | None:
    """Return the effect of the load's long prompts on its chats (the other requests), or None if
    the records have no long prompt."""
    long = [record for record in records if record.is_long]
    if not long:
        return None
    quiet, during = gaps_beside(records)
    whole = [record for record in long if record.is_whole]
    firsts = [record.marks[0] - record.sent for record in whole]
    return Beside(_spread(quiet), _spread(during), _spread(firsts), len(whole))


def _spread(values: list[float]) -> Spread | None:
    return spread(values) if values else None
