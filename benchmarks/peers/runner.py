"""Shared parts of all runners: the line protocol, random prompts, and the time window of decode.

A runner is a child process in its engine's own environment. Its only argument is a job. It writes
one JSON line after its first token, one line with its first tokens, and then answers each line of
standard input with one line. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from geometry import VOCABULARY

Prompt = list[int]
SET_PARENT_DEATH_SIGNAL = 1
CHECKED = 8
"""How many tokens of the first completion the driver compares between engines."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a child loads. `model`: a folder or file; `format`: one of `FORMATS` in cases.py;
    `cache_tokens`: size of the KV cache. Prompts have ids below `vocabulary`."""

    model: str
    format: str
    threads: int
    cache_tokens: int
    vocabulary: int = VOCABULARY


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokens and the seconds they took."""

    tokens: int
    seconds: float


class Engine(Protocol):
    """The interface of an engine under test. Prompts are token ids; each call waits and leaves no
    request running."""

    def complete(self, prompt: Prompt, new: int) -> list[int]:
        """Return `new` greedy tokens after a prompt."""
        ...

    def decode(self, prompts: list[Prompt], new: int) -> Reading:
        """Measure decode only, with all prompts in one batch, from when each has its first
        token."""
        ...

    def prefill(self, prompt: Prompt) -> Reading:
        """Return the number of prompt tokens, and the seconds until the first new token."""
        ...

    def shared(self, prompts: list[Prompt], prefix: int, new: int) -> Reading:
        """Complete all prompts, which begin with the same `prefix` tokens; returns the number of
        new tokens and the total time."""
        ...


class Generates(ABC):
    """Implements the parts of `Engine` that follow from `generate`, for an engine that completes
    many prompts at once."""

    @abstractmethod
    def generate(self, prompts: list[Prompt], new: int) -> list[list[int]]:
        """Return `new` greedy tokens after each prompt."""

    def complete(self, prompt: Prompt, new: int) -> list[int]:
        """As `Engine` says."""
        return self.generate([prompt], new)[0]

    def prefill(self, prompt: Prompt) -> Reading:
        """As `Engine` says, by a completion of one token."""
        begin = time.perf_counter()
        self.complete(prompt, 1)
        return Reading(len(prompt), time.perf_counter() - begin)

    def shared(self, prompts: list[Prompt], prefix: int, new: int) -> Reading:
        """As `Engine` says; the engine finds the common beginning by itself."""
        begin = time.perf_counter()
        made = self.generate(prompts, new)
        return Reading(sum(map(len, made)), time.perf_counter() - begin)


class NotOffered(Exception):
    """The engine does not support the case; the text says why."""


def random_prompts(seed: int, count: int, length: int, prefix: int = 0, vocabulary: int = VOCABULARY) -> list[Prompt]:
    """Return `count` prompts of `length` random ids; the first `prefix` ids are common to all."""
    source = random.Random(seed)
    common = [source.randrange(2, vocabulary) for _ in range(prefix)]
    return [common + [source.randrange(2, vocabulary) for _ in range(length - prefix)] for _ in range(count)]


def steady(step: Callable[[], object], counts: Callable[[], Sequence[int]], new: int) -> Reading:
    """Step until every request has a token, then measure until the first of them has `new`."""
    while min(counts()) < 1:
        step()
    before = sum(counts())
    begin = time.perf_counter()
    while max(counts()) < new:
        step()
    seconds = time.perf_counter() - begin
    return Reading(sum(counts()) - before, seconds)


def serve(load: Callable[[Job], Engine]) -> None:
    """Run a runner: load the engine, answer requests. Exits the process when standard input
    ends."""
    say = own_output()
    end_with_parent()
    try:
        job = Job(**json.loads(sys.argv[1]))
        engine = load(job)
        prompt = random_prompts(0, 1, 16, vocabulary=job.vocabulary)[0]
        engine.complete(prompt, 1)
        say({"ready": os.getpid()})
        say({"tokens": engine.complete(prompt, CHECKED)})
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        raise
    for line in sys.stdin:
        say(answer(engine, json.loads(line), job.vocabulary))
    os._exit(0)  # does not wait for engines with threads or children that do not end by themselves


def answer(engine: Engine, asked: dict[str, Any], vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Run one case; returns `{"tokens", "seconds"}`, `{"error"}`, or `{"not_offered"}` with the
    reason."""
    kind, new = asked["kind"], asked["new"]
    prompts = random_prompts(asked["seed"], asked["batch"], asked["prompt"], asked["prefix"], vocabulary)
    try:
        if kind == "decode":
            return asdict(engine.decode(prompts, new))
        if kind == "prefill":
            return asdict(engine.prefill(prompts[0]))
        reading = engine.shared(prompts, asked["prefix"], new)
        if reading.tokens != new * len(prompts):
            return {"error": f"made {reading.tokens} of {new * len(prompts)} tokens"}
        return asdict(reading)
    except NotOffered as reason:
        return {"not_offered": str(reason)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def own_output() -> Callable[[dict[str, Any]], None]:
    """Keep standard output for the protocol: from now on, prints of the engine go to standard
    error. Returns a function that writes a message."""
    ours = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return lambda message: print(json.dumps(message), file=ours)


def end_with_parent() -> None:
    """Make the kernel kill this process when the driver ends: a stopped process would not notice.
    Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
