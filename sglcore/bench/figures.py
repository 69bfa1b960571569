"""The results of a benchmark: throughput, latency percentiles, goodput, and failures by kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

from sglcore.bench.request_record import Record
from sglcore.core.errors import ConfigError

LATENCIES: Mapping[str, str] = MappingProxyType(
    {
        "ttft": "time to first token",
        "itl": "between pieces",
        "tpot": "per token after the first",
        "e2e": "whole request",
    }
)
"""Short name -> description of each latency. "itl" has one value for each piece of text except the
first; the others have one value for each request."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, percentiles (p50, p90, p99) and maximum of a latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Failures:
    """The failures of one kind: their number, and the message of the first one."""

    count: int
    first: str


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of a benchmark, which `figures` computes: numbers of requests and tokens, rates
    per second, latencies, failures by kind, goals and goodput.

    Rates are those of requests that completed, long prompts included, over `seconds`. Latencies
    exclude long prompts.
    """

    requests: int
    """Number of requests in the load."""
    whole: int
    """Number of requests that completed with some text. Tokens and rates count only these."""
    seconds: float
    """Seconds between the time at which the first request was due and the end of the last one."""
    input_tokens: int
    """Number of prompt tokens."""
    output_tokens: int
    """Number of output tokens."""
    cached_tokens: int
    """Number of prompt tokens that were found in the prefix cache."""
    proposed_tokens: int
    """Number of draft tokens that were verified."""
    accepted_tokens: int
    """Number of draft tokens that were accepted."""
    acceptance_length: float | None
    """Mean number of tokens that a request gets in a step after its first token. None if no request
    had draft tokens."""
    requests_per_s: float
    """Requests per second."""
    input_per_s: float
    """Prompt tokens per second."""
    output_per_s: float
    """Output tokens per second."""
    latency: Mapping[str, Spread]
    """The latencies by the names in LATENCIES, without those that have no value."""
    lag: Spread | None
    """How late requests were sent, because the client was slow or because of --max-concurrency.
    None if no request was late, and for a load without arrival times."""
    failures: Mapping[str, Failures]
    """The failures by kind, the most frequent kind first."""
    goals: Mapping[str, float]
    """The latency goals in milliseconds, by the names in LATENCIES."""
    goodput: float | None
    """Requests per second that completed and met every goal. None without goals."""

    def as_json(self) -> dict[str, object]:
        """Return the results as rounded plain values. Keys are the names of the fields; `latency`,
        `lag`, `goals` and `goodput` get their unit at the end of the name, such as `latency_ms`."""
        return {
            "requests": self.requests,
            "whole": self.whole,
            "seconds": round(self.seconds, 4),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "proposed_tokens": self.proposed_tokens,
            "accepted_tokens": self.accepted_tokens,
            "acceptance_length": None if self.acceptance_length is None else round(self.acceptance_length, 3),
            "requests_per_s": round(self.requests_per_s, 3),
            "input_per_s": round(self.input_per_s, 2),
            "output_per_s": round(self.output_per_s, 2),
            "latency_ms": {name: _rounded(spread) for name, spread in self.latency.items()},
            "lag_ms": _rounded(self.lag) if self.lag else None,
            "failures": {kind: asdict(found) for kind, found in self.failures.items()},
            "goals_ms": dict(self.goals),
            "goodput_per_s": None if self.goodput is None else round(self.goodput, 3),
        }


def figures(records: Sequence[Record], goals: Mapping[str, float] | None = None) -> Figures:
    """Return the results of a load from the records of all its requests. With no records, all
    numbers are 0, and there are no latencies.

    `goals` are upper limits in milliseconds, by the names in LATENCIES except "itl"; None or empty:
    no goodput.
    """
    whole = [record for record in records if record.is_whole]
    seconds = max((record.end for record in records), default=0.0) - min(
        (record.due for record in records), default=0.0
    )
    goals = goals or {}
    per_s = 1 / seconds if seconds > 0 else 0.0
    inputs, outputs = sum(r.input_tokens for r in whole), sum(r.output_tokens for r in whole)
    lags = [record.sent - record.due for record in records]
    chats = [record for record in whole if not record.is_long]
    values = {name: [value for record in chats for value in values_of(record, name)] for name in LATENCIES}
    return Figures(
        requests=len(records),
        whole=len(whole),
        seconds=seconds,
        input_tokens=inputs,
        output_tokens=outputs,
        cached_tokens=sum(r.cached_tokens for r in whole),
        proposed_tokens=sum(r.proposed_tokens for r in whole),
        accepted_tokens=sum(r.accepted_tokens for r in whole),
        acceptance_length=_acceptance_length(whole),
        requests_per_s=len(whole) * per_s,
        input_per_s=inputs * per_s,
        output_per_s=outputs * per_s,
        latency={name: spread(found) for name, found in values.items() if found},
        lag=spread(lags) if any(lags) else None,
        failures=_failures(records),
        goals=dict(goals),
        goodput=sum(_meets(record, goals) for record in whole) * per_s if goals else None,
    )


def _acceptance_length(records: Sequence[Record]) -> float | None:
    drafted = [record for record in records if record.acceptance_length is not None]
    later = sum(record.output_tokens - 1 for record in drafted)
    return later / (later - sum(record.accepted_tokens for record in drafted)) if drafted else None


def values_of(record: Record, name: str) -> list[float]:
    """Return the values of one latency for a request, in seconds; `name` is a key of LATENCIES: one
    value, or for "itl" one for each piece of text after the first.

    The request must have text. The result is empty if the latency does not exist for it: "tpot"
    with at most one token.
    """
    if name == "itl":
        return record.gaps
    value = {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.e2e}[name]
    return [] if value is None else [value]


def spread(seconds: Iterable[float]) -> Spread:
    """Return mean, percentiles and maximum, in milliseconds, of values in seconds. There must be at
    least one; raises IndexError otherwise."""
    values = sorted(value * 1000 for value in seconds)
    p50, p90, p99 = (percentile(values, share) for share in (0.5, 0.9, 0.99))
    return Spread(sum(values) / len(values), p50, p90, p99, values[-1])


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile of ascending values, interpolated between neighbours, in their unit.
    There must be at least one value (not checked).

    `share` is from 0 to 1; 0.5 is the median.
    """
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def goals_of(words: Iterable[str]) -> dict[str, float]:
    """Return latency goals in milliseconds by name (ttft, tpot, e2e), from words such as
    "ttft:200"; the last one of a name counts. Raises ConfigError for any other word."""
    wanted = "ttft:MS, tpot:MS or e2e:MS, such as ttft:200"
    found: dict[str, float] = {}
    for word in words:
        name, _, limit = word.partition(":")
        if name not in LATENCIES or name == "itl":
            raise ConfigError(f"goodput is {word!r}", wanted=wanted)
        try:
            found[name] = float(limit)
        except ValueError:
            raise ConfigError(f"goodput is {word!r}", wanted=wanted) from None
    return found


def _meets(record: Record, goals: Mapping[str, float]) -> bool:
    return all(value * 1000 <= limit for name, limit in goals.items() for value in values_of(record, name))


def _failures(records: Sequence[Record]) -> dict[str, Failures]:
    found: dict[str, Failures] = {}
    for record in records:
        if record.is_whole:
            continue
        kind, said = (
            (record.fault.kind, record.fault.said) if record.fault else ("no text", "an answer without any text")
        )
        known = found.get(kind, Failures(0, said))
        found[kind] = Failures(known.count + 1, known.first)
    return dict(sorted(found.items(), key=lambda item: -item[1].count))


def _rounded(found: Spread) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(found).items()}
