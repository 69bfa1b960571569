"""The measured cases, and the machine's bound for each: the least time by bytes read and by
operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from .geometry import BODY_PARAMETERS, CACHE_BYTES, HEAD, HEAD_PARAMETERS, HEADS, INT8_CACHE_BYTES, LAYERS

WEIGHT_BYTES: Mapping[str, float] = MappingProxyType({"bf16": 2.0, "int8": 8.5 / 8, "int4": 4.5 / 8, "kv8": 2.0})
"""Bytes of one weight; quantised formats have a 16-bit scale per 32 weights. "kv8" has the weights
of "bf16", and keys and values of 8 bits."""

PLAIN = ("bf16", "kv8")
"""Formats without integer weights."""

ATTENTION_FLOPS = 4 * HEADS * HEAD * LAYERS
"""Operations of one query over one key, in all layers: its score, and adding its value."""

QUICK_NEW = 12


@dataclass(frozen=True, slots=True)
class Bounds:
    """The machine's peak speeds: bytes read per second, and operations per second by element
    type."""

    bandwidth: float
    peaks: Mapping[str, float]

    def peak(self, form: str) -> float:
        """Return the peak operations per second with weights of this format. Weights may be
        widened, so any floating-point type counts; int8 counts for integer formats only."""
        return max(rate for kind, rate in self.peaks.items() if kind != "int8" or form not in PLAIN)


@dataclass(frozen=True, slots=True)
class Case:
    """One case. `kind`: "decode", "prefill", "shared" or "start"; `new`: number of generated
    tokens; `only`: run it on this engine only; `is_disturbed`: run it while another process keeps
    the first core busy."""

    name: str
    kind: str
    form: str = "bf16"
    batch: int = 1
    prompt: int = 128
    new: int = 48
    prefix: int = 0
    timeout: float = 240.0
    only: str | None = None
    is_disturbed: bool = False

    @property
    def is_seconds(self) -> bool:
        """Whether it is measured in seconds (less is better); otherwise in tokens per second."""
        return self.kind in ("shared", "start")

    @property
    def unit(self) -> str:
        return "s" if self.is_seconds else "tokens/s"

    def question(self, seed: int) -> dict[str, object]:
        """Return the request to a runner."""
        shape = {"batch": self.batch, "prompt": self.prompt, "new": self.new, "prefix": self.prefix}
        return {"kind": self.kind, "seed": seed, **shape}

    def value(self, tokens: int, seconds: float) -> float:
        """Return a reading in this case's unit."""
        return seconds if self.is_seconds else tokens / seconds

    def work(self) -> list[tuple[int, float, float]]:
        """Return (count, bytes read, operations) of each kind of step that it needs."""
        if self.kind == "prefill":
            return [self._prompt_step(self.prompt, self.prompt * self.prompt / 2, 1)]
        if self.kind == "decode":
            return [self._decode_step(1, self.batch * (self.prompt + self.new / 2), 0)]
        if self.kind == "shared":
            return self._shared_steps()
        return []

    def bound(self, bounds: Bounds) -> float | None:
        """Return the bound by bandwidth and peak in this case's unit; None for a start."""
        steps = self.work()
        if not steps:
            return None
        peak = bounds.peak(self.form)
        seconds = sum(times * max(read / bounds.bandwidth, made / peak) for times, read, made in steps)
        tokens = self.prompt if self.kind == "prefill" else self.batch
        return self.value(tokens, seconds)

    def _weights(self) -> float:
        return (BODY_PARAMETERS + HEAD_PARAMETERS) * WEIGHT_BYTES[self.form]

    def _cell(self) -> int:
        """Bytes of keys and values of one token."""
        return INT8_CACHE_BYTES if self.form == "kv8" else CACHE_BYTES

    def _prompt_step(self, tokens: int, pairs: float, logits: int) -> tuple[int, float, float]:
        """Return a prefill step: `pairs` of query and key, and logits for `logits` tokens."""
        products = 2.0 * (BODY_PARAMETERS * tokens + HEAD_PARAMETERS * logits)
        return 1, self._weights() + tokens * self._cell(), products + ATTENTION_FLOPS * pairs

    def _decode_step(self, times: int, cells: float, common: int) -> tuple[int, float, float]:
        """Return decode steps. `cells`: KV slots of all requests; a common prefix of `common` slots
        is read once for all requests."""
        products = 2.0 * (BODY_PARAMETERS + HEAD_PARAMETERS) * self.batch
        attention = ATTENTION_FLOPS * (cells + self.batch * common)
        return times, self._weights() + (cells + common) * self._cell(), products + attention

    def _shared_steps(self) -> list[tuple[int, float, float]]:
        own = self.prompt - self.prefix
        pairs = self.prefix**2 / 2 + self.batch * own * (self.prefix + own / 2)
        prompts = self._prompt_step(self.prefix + self.batch * own, pairs, self.batch)
        return [prompts, self._decode_step(self.new - 1, self.batch * (own + self.new / 2), self.prefix)]


CASES = (
    Case("b1", "decode"),
    Case("b8", "decode", batch=8),
    Case("b32", "decode", batch=32, timeout=420.0),
    Case("prefill", "prefill", prompt=2048, new=1),
    Case("shared", "shared", batch=32, prompt=1056, new=16, prefix=1024, timeout=420.0),
    Case("b1-8k", "decode", prompt=8192, timeout=600.0, only="sglcore"),
    Case("b1-8k-int8kv", "decode", form="kv8", prompt=8192, timeout=600.0, only="sglcore"),
    Case("b1-busy", "decode", only="sglcore", is_disturbed=True),
    Case("b1-int8", "decode", form="int8"),
    Case("b32-int8", "decode", form="int8", batch=32, timeout=420.0),
    Case("b1-int4", "decode", form="int4"),
    Case("start", "start", timeout=600.0),
)
QUICK = ("b1", "b8", "prefill", "b1-int8", "b1-int4")
FORMATS = ("bf16", "int8", "int4", "kv8")
BESIDE_ITSELF = (("b1-8k", "b1"), ("b1-8k-int8kv", "b1"), ("b1-busy", "b1"))
"""Pairs of cases of one engine; the first is compared with the second."""


def chosen_cases(names: list[str] | None, quick: bool) -> list[Case]:
    """Return the named cases (None: all, or the quick ones), shortened if quick. Raises ValueError
    for an unknown name."""
    known = {case.name: case for case in CASES}
    wanted = names if names is not None else list(QUICK if quick else known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"found the case {unknown[0]!r}; the cases are {', '.join(known)}")
    found = [known[name] for name in wanted]
    return [replace(case, new=QUICK_NEW) if quick and case.kind == "decode" else case for case in found]
