"""Two engines in one process, stepped alternately: one prefills, the other decodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from sglcore.engine.disaggregation.decode_side import DecodeSide
from sglcore.engine.disaggregation.disaggregation_start import PageOptions, meet, settled
from sglcore.engine.disaggregation.prefill_side import PromptSide
from sglcore.engine.start import Started, start
from sglcore.engine.token_engine import TokenEngine
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_output import EngineOutput
from tests.laws.engine import TOLERANCE, configured, on_this_device

HERE = "127.0.0.1:0"
PATIENCE = 60.0
"""Seconds in which anything that a test waits for must happen."""
Sides = Mapping[str, Callable[..., Any]]
SOUND: Sides = MappingProxyType({"prompt": PromptSide, "decode": DecodeSide})
"""The page side of each role; a test may plant a defect in one."""


@dataclass
class Text:
    """The result of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    cached: int = -1
    reason: str | None = None
    error: str = ""


class Single:
    """An engine with a role, and the results of its requests."""

    def __init__(
        self, folder: Path, options: PageOptions = PageOptions(), sides: Sides = SOUND, **settings: Any
    ) -> None:
        config = settled(configured(folder, **{"graph": "off", **on_this_device(), **settings}), options)
        self.started: Started = start(config)
        opened: Any = None
        if options.role != "both":
            try:
                transfer = meet(options, self.started)
            except BaseException:
                self.started.worker.close()
                raise
            more = (options.peers,) if options.role == "decode" else ()
            opened = lambda engine: sides[options.role](transfer, engine, *more)  # noqa: E731
        self.engine = TokenEngine(
            self.started.worker,
            frozenset(),
            overlap=self.started.overlap,
            prefix_cache=config.prefix_cache,
            open_pages=opened,
        )
        self.side: Any = self.engine.pages
        self.texts: dict[str, Text] = {}
        self.last: list[EngineOutput] = []
        """The outputs of the latest step that had any."""

    @property
    def transfer(self) -> Any:
        return self.side._transfer

    @property
    def memory(self) -> Any:
        scheduler: Any = self.engine.scheduler
        return scheduler.memory

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 8, **sampling: Any) -> None:
        """Queue a prompt; greedy by default."""
        params = SamplingParams(
            **{"temperature": 0.0, "logprobs": 2, "ignore_eos": True, **sampling}, max_tokens=max_tokens
        )
        self.engine.add(name, list(prompt), params, params.seed or 0)
        for index in range(params.n):
            self.texts[f"{name}/{index}"] = Text()

    def step(self) -> None:
        """Run one step, if there is work."""
        if self.engine.has_work:
            self.take(self.engine.step())

    def take(self, outputs: list[EngineOutput]) -> None:
        """Add the outputs to the results."""
        self.last = outputs or self.last
        for output in outputs:
            text = self.texts[f"{output.request_id}/{output.index}"]
            text.tokens += output.token_ids
            text.logprobs += [each.logprob for each in output.logprobs or ()]
            text.prompt_logprobs += [each.logprob for each in output.prompt_logprobs or ()]
            text.cached = max(text.cached, output.cached_tokens)
            text.reason, text.error = output.finish_reason or text.reason, output.error or text.error

    @property
    def is_done(self) -> bool:
        return all(text.reason for text in self.texts.values()) and not self.engine.has_work

    def run(self) -> dict[str, Text]:
        """Run all requests to their end; return their results."""
        drive(lambda: self.is_done, self)
        self.engine.scheduler.audit()
        found, self.texts = self.texts, {}
        return found


def drive(until: Callable[[], bool], *engines: Single) -> None:
    """Step the engines in turn until `until()`."""
    end = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < end, [engine.engine.scheduler.stats() for engine in engines]
        for engine in engines:
            engine.step()


class Pair:
    """Prompt engines and one decode engine; as a context manager it closes them."""

    def __init__(
        self,
        folder: Path,
        *,
        silence: float = 60.0,
        prompt: Any = None,
        count: int = 1,
        sides: Sides = SOUND,
        **settings: Any,
    ) -> None:
        """`prompt`: settings of the prompt engines only; `count`: number of prompt engines."""
        first = PageOptions("prompt", address=HERE, silence=silence)
        self.prompts = [Single(folder, first, sides, **{**settings, **(prompt or {})}) for _ in range(count)]
        self.prompt = self.prompts[0]
        peers = tuple(each.transfer.address for each in self.prompts)
        self.decode = Single(folder, PageOptions("decode", peers, silence=silence), sides, **settings)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self.decode, *self.prompts):
            each.engine.close()

    def drive(self, until: Callable[[], bool]) -> None:
        """Step all engines in turn."""
        drive(until, *self.prompts, self.decode)

    def run(self) -> dict[str, Text]:
        """Run all requests to their end, check that neither side holds anything, and return the
        results."""
        self.drive(lambda: all(each.is_done for each in (self.decode, *self.prompts)))
        self.check_nothing_is_left()
        found, self.decode.texts = self.decode.texts, {}
        return found

    def check_nothing_is_left(self) -> None:
        """Check that no page, slot or lease is lost or held."""
        for each in (*self.prompts, self.decode):
            each.engine.scheduler.audit()
            assert not each.engine.remote.arrivals.holders
            assert each.transfer.num_leases == 0
            assert each.memory.available == each.memory.pool.num_pages
        assert not any(each.side._jobs for each in self.prompts)
        assert not self.decode.side._claims


def check_same(found: dict[str, Text], wanted: dict[str, Text]) -> None:
    """Check that tokens are equal and log-probabilities agree within the usual tolerance."""
    assert found.keys() == wanted.keys()
    for name, text in found.items():
        other = wanted[name]
        assert (text.tokens, text.reason, text.error) == (other.tokens, other.reason, other.error), name
        np.testing.assert_allclose(text.logprobs, other.logprobs, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(text.prompt_logprobs, other.prompt_logprobs, atol=TOLERANCE, rtol=0)


def pages_of(engine: Single, count: int) -> int:
    """Bytes of memory for `count` pages of an engine's model."""
    memory = engine.started.worker.page_memory()  # pyright: ignore[reportAttributeAccessIssue]
    return sum(each.bytes_per_page for each in memory.regions) * (count + 1)
