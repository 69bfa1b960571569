"""Whether HiSparse pays: a prediction of output tokens per second with the KV entries of sparse
attention in host memory, and with all of them on the device. Host data only.

For N requests that run at a time, each of L tokens of which G are output:

    step    = (weights + N * read) / memory + N * missed / link
    missed  = chosen * (1 - hit_rate) * 2 * top_k / places, at most `chosen`
    prompt  = entry * (P + again) / link, for a prompt of P = L - G tokens
    again   = (P^2 - H^2) / (2 * chunk) if P is above H and above a chunk, else 0
    seconds for an output token = step / N + prompt / G

`memory` and `link` are measured bytes per second. N is limited by the pools that fit. H is the
longest prompt whose entries stay on the device between its chunks. Nothing is said to overlap, so
the prediction is against HiSparse where copies are hidden. With all entries on the device `missed`
and `prompt` are 0; the time of computing a prompt is the same in both and left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglcore.step.hisparse_config import HiSparseConfig

HIT_RATE = 0.85
"""Assumed share of chosen entries that are on the device, if it keeps twice what a token reads."""
OUTPUT_SHARE = 8
"""One of so many tokens of a request is output."""
GAIN = 1.05
"""HiSparse is used if it is predicted to be faster by this factor."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes per second: from host memory to the device by the kernel that copies entries, and of
    device memory."""

    link: float
    memory: float


@dataclass(frozen=True, slots=True)
class Work:
    """What is predicted for.

    `request_tokens` L, and `hit_rate` with twice the entries that a token reads; `is_assumed`: it
    was not given. `chunk`: tokens of a prefill step.
    """

    request_tokens: int
    hit_rate: float
    is_assumed: bool
    chunk: int

    @property
    def outputs(self) -> int:
        """G."""
        return max(1, self.request_tokens // OUTPUT_SHARE)


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """Bytes that a model moves.

    `weights`: read in each step. `read`: device memory that a row reads besides, index keys and
    chosen entries. `entry`: entries of one token in all layers that HiSparse moves to the host.
    `chosen`: those that a row reads in a step.
    """

    weights: int
    read: int
    entry: int
    chosen: int


@dataclass(frozen=True, slots=True)
class Option:
    """One way to start: the setting (None: all entries on the device), the requests that fit, the
    entries that a token reads, those on the device per request and layer, and tokens per entry."""

    hisparse: HiSparseConfig | None
    requests: int
    top_k: int = 0
    places: int = 0
    ratio: int = 1

    def missed(self, work: Work) -> float:
        """Return the share of chosen entries that come from the host."""
        if self.hisparse is None or work.request_tokens // self.ratio <= self.places:
            return 0.0
        return min(1.0, (1 - work.hit_rate) * 2 * self.top_k / self.places)

    def tokens_per_second(self, model: ModelBytes, speeds: Speeds, work: Work) -> float:
        """Return the predicted output tokens per second of all requests; 0 if none fits."""
        if not self.requests:
            return 0.0
        step = (model.weights + self.requests * model.read) / speeds.memory
        step += self.requests * model.chosen * self.missed(work) / speeds.link
        return 1 / (step / self.requests + self._prompt(model, speeds, work) / work.outputs)

    def _prompt(self, model: ModelBytes, speeds: Speeds, work: Work) -> float:
        if self.hisparse is None:
            return 0.0
        tokens = work.request_tokens - work.outputs
        held, again = self.hisparse.held_tokens(work.request_tokens), 0.0
        if tokens > max(held, work.chunk):
            again = (tokens**2 - held**2) / (2 * work.chunk)
        return model.entry * (tokens + again) / speeds.link


@dataclass(frozen=True, slots=True)
class Choice:
    """The best option with its prediction, and the prediction with all entries on the device.

    `is_smaller`: another setting than the one that was tried first.
    """

    best: Option
    tokens_per_second: float
    resident: Option
    resident_tokens_per_second: float
    is_smaller: bool = False

    def why(self, speeds: Speeds, work: Work) -> str:
        """Return the figures of the prediction in words."""
        source = "assumed" if work.is_assumed else "given"
        return (
            f"predicted {self.tokens_per_second:.3g} tokens/s for {self.best.requests} requests, and "
            f"{self.resident_tokens_per_second:.3g} for {self.resident.requests} with all entries on the device; "
            f"from {speeds.link / 1e9:.3g} GB/s from the host and {speeds.memory / 1e9:.3g} GB/s of device memory, "
            f"measured, requests of {work.request_tokens} tokens, and a hit rate of {work.hit_rate:.0%}, {source}"
        )


def choose_option(
    resident: Option, options: Sequence[Option], model: ModelBytes, speeds: Speeds, work: Work
) -> tuple[HiSparseConfig | None, Choice]:
    """Return the setting to use, None if HiSparse does not pay, and what it was chosen from.

    `options` are in order of preference: a later one is taken only if it is predicted to be faster
    by GAIN.
    """
    told = resident.tokens_per_second(model, speeds, work)
    best, most = options[0], options[0].tokens_per_second(model, speeds, work)
    for option in options[1:]:
        predicted = option.tokens_per_second(model, speeds, work)
        if predicted > GAIN * most:
            best, most = option, predicted
    pays = most > GAIN * told
    return best.hisparse if pays else None, Choice(best, most, resident, told, pays and best is not options[0])
