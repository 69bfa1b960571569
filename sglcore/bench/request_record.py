"""The record of one request of a load: what the client measured, and the latencies computed from
it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from sglcore.bench.reply import Fault


@dataclass(frozen=True, slots=True)
class Record:
    """What the client measured for one request: when it was due, sent and ended, when text arrived
    (`marks`), numbers of tokens, and why it failed (`fault`; None if it did not). Times are in
    seconds since the load began."""

    number: int
    """Its number in the load, from 0."""
    due: float
    """When it should have been sent. In a load without arrival times, when it was sent."""
    sent: float
    """When it was sent."""
    end: float
    """When its answer was complete or failed."""
    marks: tuple[float, ...]
    """When each piece of text arrived. A piece can have several tokens."""
    input_tokens: int
    """Number of prompt tokens."""
    output_tokens: int
    """Number of output tokens. If the server does not report it, the number of pieces of text."""
    cached_tokens: int = 0
    """Number of prompt tokens that were found in the prefix cache."""
    fault: Fault | None = None
    """Why it failed; None if the answer was complete."""
    proposed_tokens: int = 0
    """Number of draft tokens that were verified."""
    accepted_tokens: int = 0
    """Number of draft tokens that were accepted."""
    is_long: bool = False
    """Whether it is one of the load's long prompts."""

    @property
    def is_whole(self) -> bool:
        """Whether the answer was complete and had text."""
        return self.fault is None and bool(self.marks)

    @property
    def ttft(self) -> float:
        """Seconds from `due` to the first piece of text. Raises IndexError without text."""
        return self.marks[0] - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first, or None with at most one token. Raises IndexError if
        there are tokens without text."""
        return (self.marks[-1] - self.marks[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def e2e(self) -> float:
        """Seconds from `due` to `end`."""
        return self.end - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive pieces of text; empty with at most one."""
        return [after - before for before, after in pairwise(self.marks)]

    @property
    def acceptance_length(self) -> float | None:
        """Mean number of tokens in a step after the first token, accepted draft tokens included.
        None if there were no draft tokens, or no such step."""
        steps = self.output_tokens - 1 - self.accepted_tokens
        return (self.output_tokens - 1) / steps if self.proposed_tokens and steps > 0 else None

    def as_json(self) -> dict[str, object]:
        """Return plain values by name; times are in milliseconds since the load began. Of `marks`,
        only the first is included, as `first_ms` (None without text); `error` is kind and message,
        or None."""
        return {
            "number": self.number,
            "due_ms": _ms(self.due),
            "sent_ms": _ms(self.sent),
            "first_ms": _ms(self.marks[0]) if self.marks else None,
            "end_ms": _ms(self.end),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "proposed_tokens": self.proposed_tokens,
            "accepted_tokens": self.accepted_tokens,
            "is_long": self.is_long,
            "error": f"{self.fault.kind}: {self.fault.said}" if self.fault else None,
        }


def _ms(value: float) -> float:
    return round(value * 1000, 3)
