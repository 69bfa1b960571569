"""A load: prompts of random tokens, their lengths, and their arrival times. `make_jobs` makes the
requests from a Workload.

The same Workload for a model with the same vocabulary size is always the same load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from sglcore.core.errors import ConfigError

LONG_OUTPUT = 8
"""Output tokens of a long prompt. A single one could decode to no text, and the request would count
as failed."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of whole numbers, `low` and `high` included."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"

    def draw(self, source: Random) -> int:
        """Return a random number of the range, all equally likely, both ends possible."""
        return source.randint(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The parameters of a load: number of requests, ranges of prompt and output tokens, shared
    prefix, rate per second, seed, and long prompts. Raises ConfigError if one is out of range."""

    num_prompts: int
    """Number of requests, at least 1, without the long prompts."""
    input_len: Span
    """Number of tokens in a prompt after the shared prefix."""
    output_len: Span
    """Number of output tokens."""
    shared_prefix: int = 0
    """Number of tokens with which every prompt begins, except long ones."""
    request_rate: float = math.inf
    """Requests per second on average, with random arrival times (Poisson). Infinity sends all at
    once."""
    seed: int = 0
    """Random seed of the tokens, lengths and arrival times."""
    long_prompts: int = 0
    """Number of additional long prompts. They have no common prefix and LONG_OUTPUT output
    tokens."""
    long_len: int = 8192
    """Number of tokens in a long prompt."""
    long_every: float = 5.0
    """Seconds before the first long prompt, and between two of them."""

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ConfigError(f"num-prompts is {self.num_prompts}", wanted="at least 1")
        if not self.request_rate > 0:
            raise ConfigError(f"request-rate is {self.request_rate}", wanted="requests per second above 0, or inf")
        if self.shared_prefix < 0:
            raise ConfigError(f"shared-prefix is {self.shared_prefix}", wanted="0 or more tokens")

        if self.long_prompts < 0 or self.long_len < 1 or not 0 < self.long_every < math.inf:
            raise ConfigError(
                f"long-prompts is {self.long_prompts}, of {self.long_len} tokens every {self.long_every:g} s",
                wanted="0 or more, of at least 1 token, some seconds apart",
            )

    @property
    def is_open(self) -> bool:
        """Whether requests have arrival times, which do not depend on the server."""
        return math.isfinite(self.request_rate)

    @property
    def longest(self) -> int:
        """Largest possible number of tokens in a request, prompt and answer, without the long
        prompts."""
        return self.shared_prefix + self.input_len.high + self.output_len.high

    def as_json(self) -> dict[str, object]:
        """Return the parameters as plain values; an infinite rate is "inf"."""
        return {
            "num_prompts": self.num_prompts,
            "input_len": str(self.input_len),
            "output_len": str(self.output_len),
            "shared_prefix": self.shared_prefix,
            "request_rate": self.request_rate if self.is_open else "inf",
            "seed": self.seed,
            "long_prompts": self.long_prompts,
            "long_len": self.long_len,
            "long_every": self.long_every,
        }


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a load.

    `number` counts from 0, long prompts last. `arrival` is in seconds since the load begins,
    `prompt` has token ids, and `output_len` is the number of output tokens. `is_long`: it is one of
    the load's long prompts.
    """

    number: int
    arrival: float
    prompt: tuple[int, ...]
    output_len: int
    is_long: bool = False


def span(name: str, text: str, least: int = 1) -> Span:
    """Return the range in a text such as "128" (one number) or "32..256".

    `name` is the option in errors, and `least` the smallest valid number. Raises ConfigError for
    another text, smaller numbers, or a range that descends.
    """
    low, dots, high = text.partition("..")
    try:
        found = Span(int(low), int(high) if dots else int(low))
    except ValueError:
        raise ConfigError(f"{name} is {text!r}", wanted="a number such as 128, or a span such as 32..256") from None
    if not least <= found.low <= found.high:
        raise ConfigError(f"{name} is {text!r}", wanted=f"numbers of at least {least}, the smaller first")
    return found


def rate(text: str) -> float:
    """Return the requests per second in a text such as "8", "0.5" or "inf". Raises ConfigError if
    it is not a number; a number of 0 or less is refused by `Workload`."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"request-rate is {text!r}", wanted="requests per second, or inf") from None


def make_jobs(load: Workload, vocab_size: int, max_model_len: int | None = None) -> list[Job]:
    """Return the requests of a load, long prompts among them, in order of arrival, with token ids
    below `vocab_size`. Equal arguments give equal requests.

    `max_model_len` is the model's context length in tokens; None is no limit. Raises ConfigError if
    a request could exceed it.
    """
    if max_model_len is not None and load.longest > max_model_len:
        raise ConfigError(
            f"the longest request has {load.longest} tokens ({load.shared_prefix} shared, up to {load.input_len.high} "
            f"of its own, up to {load.output_len.high} to generate) and the model takes {max_model_len}",
            remedy="lower --shared-prefix, --random-input-len or --random-output-len",
        )
    if max_model_len is not None and load.long_prompts and load.long_len + LONG_OUTPUT > max_model_len:
        raise ConfigError(
            f"a long prompt has {load.long_len} tokens and {LONG_OUTPUT} to generate, "
            f"and the model takes {max_model_len}",
            remedy=f"--long-tokens {max_model_len - LONG_OUTPUT} or less",
        )
    arrivals, lengths, tokens = (Random(f"{load.seed}/{part}") for part in ("arrivals", "lengths", "tokens"))
    gaps = (arrivals.expovariate(load.request_rate) if load.is_open else 0.0 for _ in range(load.num_prompts))
    shared = _tokens(tokens, load.shared_prefix, vocab_size)
    jobs: list[Job] = []
    for number, arrival in enumerate(accumulate(gaps)):
        own = _tokens(tokens, load.input_len.draw(lengths), vocab_size)
        jobs.append(Job(number, arrival, shared + own, load.output_len.draw(lengths)))
    own = Random(f"{load.seed}/long")
    for place in range(load.long_prompts):
        prompt = _tokens(own, load.long_len, vocab_size)
        jobs.append(Job(load.num_prompts + place, load.long_every * (place + 1), prompt, LONG_OUTPUT, is_long=True))
    return sorted(jobs, key=lambda job: job.arrival)


def _tokens(source: Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(source.choices(range(vocab_size), k=count))
