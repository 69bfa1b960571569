"""Runs the rounds: all engines of a format are loaded and stopped, and each round runs every case
once on each of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from .cases import Bounds, Case
from .child import Child, ChildError
from .engines import FILES, Engine
from .figures import Results
from .processes import available_bytes

START_LIMIT = 600.0
SLOW_START = 30.0
SLOW_STARTS = 2
"""An engine that takes more than SLOW_START seconds to start is started only this number of times,
not in every round: once to fill its caches of compiled code, once with them."""
RESTARTS = 3
CACHE_TOKENS = 8448
ENGINE_BYTES = MappingProxyType({"bf16": 7 << 29, "int8": 3 << 30, "int4": 3 << 30, "kv8": 7 << 29})
"""Expected memory of one engine by format: the mean of all, including mapped weight files."""

Say = Callable[[str], None]


class Measurement:
    """Runs cases on engines and holds the results."""

    def __init__(self, engines: Sequence[Engine], cases: Sequence[Case], rounds: int, say: Say) -> None:
        self.engines, self.cases, self.rounds, self.say = tuple(engines), tuple(cases), rounds, say
        self.threads = len(os.sched_getaffinity(0))
        self.results = Results()
        self.bounds: Bounds | None = None
        self.loads: list[float] = []
        self._children: dict[str, Child] = {}
        self._restarts: dict[tuple[str, str], int] = {}

    def run(self, after_round: Callable[[], object]) -> None:
        """Run everything; calls `after_round` when there are new results. Waits."""
        warm_page_cache(self.engines)
        self.measure_bounds()
        self.measure_starts()
        after_round()
        for form in dict.fromkeys(case.form for case in self.cases if case.kind != "start"):
            self.run_format(form, after_round)

    def measure_bounds(self) -> None:
        """Measure the bounds again and keep the better of each: the machine can reach it again.

        Also keeps the load average of the last minute: more than the number of measured cores means
        that other processes ran.
        """
        self.loads.append(round(os.getloadavg()[0], 2))
        try:
            found = bounds_now(self.threads)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self.say(f"the bounds could not be measured: {error}")
            return
        before = self.bounds or found
        peaks = {kind: max(rate, before.peaks[kind]) for kind, rate in found.peaks.items()}
        self.bounds = Bounds(max(found.bandwidth, before.bandwidth), peaks)
        text = ", ".join(f"{kind} {rate / 1e9:.0f}" for kind, rate in found.peaks.items())
        self.say(f"bounds: {found.bandwidth / 1e9:.1f} GB/s; products in GFLOP/s: {text}; load {self.loads[-1]}")

    def measure_starts(self) -> None:
        """Measure the time of new processes to their first token, all engines in each round."""
        case = next((case for case in self.cases if case.kind == "start"), None)
        slow: dict[str, int] = {}
        for number in range(self.rounds if case is not None else 0):
            for engine in self.engines:
                assert case is not None
                is_lost = (case.name, engine.name) in self.results.failures
                if not is_lost and slow.get(engine.name, 0) < SLOW_STARTS:
                    is_slow = self._start_once(case, engine, number) > SLOW_START
                    slow[engine.name] = slow.get(engine.name, 0) + is_slow

    def run_format(self, form: str, after_round: Callable[[], object]) -> None:
        """Run all rounds of one format; engines stay loaded if memory allows, otherwise each is
        loaded again for its turn."""
        cases = [case for case in self.cases if case.form == form and case.kind != "start"]
        engines = [engine for engine in self.engines if self._can_run(engine, form, cases)]
        stay = len(engines) * ENGINE_BYTES[form] < available_bytes()
        if not stay:
            self.say(f"{form}: not enough memory for {len(engines)} engines at once; each is loaded anew for its turn")
        try:
            for number in range(self.rounds):
                turn = number % max(len(engines), 1)
                for engine in engines[turn:] + engines[:turn]:
                    self._run_engine(engine, form, cases, number)
                    if not stay:
                        self._close(engine)
                self.measure_bounds()
                after_round()
        finally:
            for engine in engines:
                self._close(engine)

    def _can_run(self, engine: Engine, form: str, cases: Sequence[Case]) -> bool:
        reason = engine.missing(form)
        for case in cases if reason is not None else ():
            self.results.fail(case.name, engine.name, str(reason))
        return reason is None

    def _run_engine(self, engine: Engine, form: str, cases: Sequence[Case], number: int) -> None:
        """Run every case once; an engine that can not be loaded fails in all cases and is not
        tried again."""
        mine = [case for case in cases if case.only in (None, engine.name)]
        for place, case in enumerate(mine):
            if (case.name, engine.name) in self.results.failures:
                continue
            try:
                child = self._child(engine, form)
            except ChildError as error:
                self._fail(engine, mine, number, error)
                return
            try:
                self._run_case(child, engine, case, number, 1000 * number + place)
            except ChildError as error:
                self._fail(engine, [case], number, error)

    def _fail(self, engine: Engine, cases: Sequence[Case], number: int, error: ChildError) -> None:
        for case in cases:
            self.results.fail(case.name, engine.name, str(error))
        self.say(f"round {number + 1}: {engine.name} {', '.join(case.name for case in cases)}: {error}")

    def _run_case(self, child: Child, engine: Engine, case: Case, number: int, seed: int) -> None:
        with neighbour(case.is_disturbed):
            answer = child.ask(case.question(seed), case.timeout)
        if "not_offered" in answer:
            raise ChildError(answer["not_offered"])
        value = case.value(answer["tokens"], answer["seconds"])
        self.results.add(case.name, engine.name, number, value)
        self.results.peak_bytes[case.name, engine.name] = child.peak_bytes
        self.say(f"round {number + 1}: {engine.name} {case.name}: {value:.2f} {case.unit}")

    def _child(self, engine: Engine, form: str) -> Child:
        """Return the engine's child; starts it again if it has ended. Raises ChildError after
        RESTARTS restarts."""
        before = self._children.get(engine.name)
        if before is not None and before.is_alive:
            return before
        self._close(engine)
        key = (engine.name, form)
        self._restarts[key] = self._restarts.get(key, 0) + (before is not None)
        if before is not None and self._restarts[key] > RESTARTS:
            raise ChildError(f"ended {RESTARTS + 1} times; see {before.log}")
        child, seconds, _ = self._open(engine, form)
        self.say(f"{engine.name} {form}: ready in {seconds:.1f} s")
        self._children[engine.name] = child
        return child

    def _open(self, engine: Engine, form: str) -> tuple[Child, float, int]:
        """Start a child; returns (child, seconds to its first token, peak bytes until then)."""
        job = {"model": str(engine.model(form)), "format": form}
        job |= {"threads": self.threads, "cache_tokens": CACHE_TOKENS}
        child = Child(engine.python, engine.name, job, FILES / "logs" / f"{engine.name}-{form}.log")
        try:
            seconds, peak, tokens = child.wait_ready(START_LIMIT)
        except BaseException:
            child.close()
            raise
        self.results.tokens[form, engine.name] = list(tokens)
        return child, seconds, peak

    def _start_once(self, case: Case, engine: Engine, number: int) -> float:
        """Measure one start of a new process; returns its seconds, 0 if it failed."""
        key = (case.name, engine.name)
        try:
            reason = engine.missing(case.form)
            if reason is not None:
                raise ChildError(reason)
            child, seconds, peak = self._open(engine, case.form)
        except ChildError as error:
            self.results.fail(*key, str(error))
            self.say(f"{engine.name} start: {error}")
            return 0.0
        child.close()
        self.results.add(*key, number, seconds)
        self.results.peak_bytes[key] = max(peak, self.results.peak_bytes.get(key, 0))
        self.say(f"round {number + 1}: {engine.name} start: {seconds:.2f} s, {peak / 1e9:.2f} GB")
        return seconds

    def _close(self, engine: Engine) -> None:
        child = self._children.pop(engine.name, None)
        if child is not None:
            child.close()


def bounds_now(threads: int) -> Bounds:
    """Measure bandwidth and peaks in a separate process. Waits."""
    FILES.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).with_name("measure_bounds.py")
    command = [sys.executable, str(script), str(FILES), str(threads)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment)
    found = json.loads(done.stdout)
    return Bounds(found["bandwidth"], found["peaks"])


def warm_page_cache(engines: Sequence[Engine]) -> None:
    """Read every engine's files once, so that no start waits for the disk."""
    models = {engine.model(form) for engine in engines for form in engine.models}
    for model in sorted(path for path in models if path is not None and path.exists()):
        for file in [model] if model.is_file() else sorted(model.iterdir()):
            with file.open("rb") as source:
                while source.read(1 << 24):
                    pass


@contextmanager
def neighbour(is_wanted: bool) -> Iterator[None]:
    """Keep the first core busy with another process during the block, if wanted."""
    if not is_wanted:
        yield
        return
    busy = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
    busy.start()
    try:
        yield
    finally:
        busy.kill()
        busy.join()


def spin() -> None:
    """Compute on the first core that this process may use, until killed."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    while True:
        sum(range(10_000))
