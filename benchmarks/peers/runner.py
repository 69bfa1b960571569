"""What every runner shares: the line protocol, random prompts, and the window in which decoding is
timed.

A runner is a child process in its engine's own environment. It is given a job as its only argument,
says one JSON line when its first token is there, then answers each line of standard input with one
line. Standard library only.
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
"""Tokens of the first completion that the driver compares between engines."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a child is to load: `model` is a folder or file, `format` one of `FORMATS` in cases.py,
    `cache_tokens` the size of its KV cache. Prompts are of ids below `vocabulary`."""

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
    """What a runner makes of an engine. Prompts are token ids; each call waits, and leaves nothing
    running."""

    def complete(self, prompt: Prompt, new: int) -> list[int]:
        """The greedy tokens after a prompt."""
        ...

    def decode(self, prompts: list[Prompt], new: int) -> Reading:
        """Decoding alone, all prompts at once: tokens after the moment when each of them has its
        first."""
        ...

    def prefill(self, prompt: Prompt) -> Reading:
        """Tokens of the prompt, and the seconds until its first new token."""
        ...

    def shared(self, prompts: list[Prompt], prefix: int, new: int) -> Reading:
        """All prompts to their end, which begin with the same `prefix` tokens: new tokens, and the
        whole time."""
        ...


class Generates(ABC):
    """An engine that makes whole completions of many prompts at once: what of `Engine` follows from
    that."""

    @abstractmethod
    def generate(self, prompts: list[Prompt], new: int) -> list[list[int]]:
        """The `new` greedy tokens after each prompt."""

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
    """The engine has no such case; the text says why."""


def random_prompts(seed: int, count: int, length: int, prefix: int = 0, vocabulary: int = VOCABULARY) -> list[Prompt]:
    """`count` prompts of `length` random ids, the first `prefix` of them common to all."""
    source = random.Random(seed)
    common = [source.randrange(2, vocabulary) for _ in range(prefix)]
    return [common + [source.randrange(2, vocabulary) for _ in range(length - prefix)] for _ in range(count)]


def steady(step: Callable[[], object], counts: Callable[[], Sequence[int]], new: int) -> Reading:
    """Step until every request has a token, then time until the first of them has `new`."""
    while min(counts()) < 1:
        step()
    before = sum(counts())
    begin = time.perf_counter()
    while max(counts()) < new:
        step()
    seconds = time.perf_counter() - begin
    return Reading(sum(counts()) - before, seconds)


def serve(load: Callable[[Job], Engine]) -> None:
    """The whole life of a runner; returns when standard input ends."""
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
    os._exit(0)  # engines whose threads or children do not end by themselves are not waited for


def answer(engine: Engine, asked: dict[str, Any], vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """One case: `{"tokens", "seconds"}`, or `{"error"}`, or `{"not_offered"}` with the reason."""
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
    """Keep standard output for the protocol: what an engine prints goes to standard error from here
    on."""
    ours = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return lambda message: print(json.dumps(message), file=ours)


def end_with_parent() -> None:
    """Ask the kernel to kill this process when the driver ends: one that is held still would never
    see it. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
