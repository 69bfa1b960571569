"""What is measured, and what the machine allows for each: the least time by bytes read and by
products made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from .geometry import BODY_PARAMETERS, CACHE_BYTES, HEAD, HEAD_PARAMETERS, HEADS, INT8_CACHE_BYTES, LAYERS

WEIGHT_BYTES: Mapping[str, float] = MappingProxyType({"bf16": 2.0, "int8": 8.5 / 8, "int4": 4.5 / 8, "kv8": 2.0})
"""Of one weight: quantised ones with a 16-bit scale for each 32. The format "kv8" is the weights of
"bf16" with keys and values of 8 bits."""

PLAIN = ("bf16", "kv8")
"""Formats whose weights are no integers."""

ATTENTION_FLOPS = 4 * HEADS * HEAD * LAYERS
"""Of one query over one key: its score, and its share of the sum of values."""

QUICK_NEW = 12


@dataclass(frozen=True, slots=True)
class Bounds:
    """What this machine does at best: bytes read each second, and operations each second by element
    type."""

    bandwidth: float
    peaks: Mapping[str, float]

    def peak(self, form: str) -> float:
        """Operations each second with weights of this format, which may be widened."""
        return max(rate for kind, rate in self.peaks.items() if kind != "int8" or form not in PLAIN)


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure. `kind` is "decode", "prefill", "shared" or "start"; `new` are the
    tokens generated; `only` names the one engine it is for; `is_disturbed` runs it beside a busy
    process on the first core."""

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
        """Measured in seconds, less being better; otherwise in tokens each second."""
        return self.kind in ("shared", "start")

    @property
    def unit(self) -> str:
        return "s" if self.is_seconds else "tokens/s"

    def question(self, seed: int) -> dict[str, object]:
        """What a runner is asked."""
        shape = {"batch": self.batch, "prompt": self.prompt, "new": self.new, "prefix": self.prefix}
        return {"kind": self.kind, "seed": seed, **shape}

    def value(self, tokens: int, seconds: float) -> float:
        """A reading in this case's unit."""
        return seconds if self.is_seconds else tokens / seconds

    def work(self) -> list[tuple[int, float, float]]:
        """(times, bytes read, operations) of each kind of step it needs."""
        if self.kind == "prefill":
            return [self._prompt_step(self.prompt, self.prompt * self.prompt / 2, 1)]
        if self.kind == "decode":
            return [self._decode_step(1, self.batch * (self.prompt + self.new / 2), 0)]
        if self.kind == "shared":
            return self._shared_steps()
        return []

    def bound(self, bounds: Bounds) -> float | None:
        """The best that bandwidth and peak allow, in this case's unit; None where neither says
        anything."""
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
        """`pairs` of query and key, logits for some rows only."""
        products = 2.0 * (BODY_PARAMETERS * tokens + HEAD_PARAMETERS * logits)
        return 1, self._weights() + tokens * self._cell(), products + ATTENTION_FLOPS * pairs

    def _decode_step(self, times: int, cells: float, common: int) -> tuple[int, float, float]:
        """`cells` are the keys of all rows; a common beginning is read once, whatever the rows."""
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
"""Pairs of cases of one engine, the first held against the second."""


def chosen_cases(names: list[str] | None, quick: bool) -> list[Case]:
    """The named cases (None: all, or the quick ones), shortened if quick. Raises ValueError naming
    an unknown one."""
    known = {case.name: case for case in CASES}
    wanted = names if names is not None else list(QUICK if quick else known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"found the case {unknown[0]!r}; the cases are {', '.join(known)}")
    found = [known[name] for name in wanted]
    return [replace(case, new=QUICK_NEW) if quick and case.kind == "decode" else case for case in found]
