"""The client's record of one request. Times are seconds since the load began."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from sglcore.bench.reply import Fault


@dataclass(frozen=True, slots=True)
class Record:
    """The client's record of one request. Times are seconds since the load began."""

    number: int
    """Its number in the load."""
    due: float
    """When it was due."""
    sent: float
    """When it was sent."""
    end: float
    """When it ended."""
    marks: tuple[float, ...]
    """Arrival times of the pieces of text."""
    input_tokens: int
    """Prompt tokens."""
    output_tokens: int
    """Output tokens."""
    cached_tokens: int = 0
    """Prompt tokens that were in the prefix cache."""
    fault: Fault | None = None
    """What went wrong. None: nothing."""
    proposed_tokens: int = 0
    """Draft tokens that its steps verified."""
    accepted_tokens: int = 0
    """Draft tokens that were accepted."""
    is_long: bool = False
    """Whether it is one of the long prompts between the other requests."""

    @property
    def is_whole(self) -> bool:
        """Whether it completed, with text."""
        return self.fault is None and bool(self.marks)

    @property
    def ttft(self) -> float:
        """Time from its due time to the first piece of text."""
        return self.marks[0] - self.due

    @property
    def tpot(self) -> float | None:
        """Time per token after the first; None if there was one token."""
        return (self.marks[-1] - self.marks[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def e2e(self) -> float:
        """Time from its due time to its end."""
        return self.end - self.due

    @property
    def gaps(self) -> list[float]:
        """Times between pieces of text."""
        return [after - before for before, after in pairwise(self.marks)]

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step after the first token; None without draft tokens."""
        steps = self.output_tokens - 1 - self.accepted_tokens
        return (self.output_tokens - 1) / steps if self.proposed_tokens and steps > 0 else None

    def as_json(self) -> dict[str, object]:
        """Return plain values, with times in milliseconds."""
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
