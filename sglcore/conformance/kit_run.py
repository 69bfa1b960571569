"""One run of the kit: models, the reference, started devices that laws share, and the outcome of
each case of a law."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sglcore.config.engine_config import resolve_config
from sglcore.conformance.harness import Harness
from sglcore.conformance.inputs.kit_models import SETTINGS, SMOOTH, write_checkpoint
from sglcore.conformance.inputs.kit_models_sparse import SPARSE_MODELS
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.conformance.law import LOGPROBS, Law, LawBroken, NotApplicable
from sglcore.conformance.mutant import Mutant
from sglcore.conformance.oracle import Oracle, ReferenceOracle, check_results
from sglcore.conformance.recorded_steps import Record, Replayed, replay
from sglcore.conformance.reference_parts import REFERENCE
from sglcore.conformance.session import Result
from sglcore.conformance.target import Geometry, Target
from sglcore.core.errors import ConfigError, SglcoreError
from sglcore.runtime.memory.pools import PoolKind

Verdict = Literal["passed", "failed", "skipped"]
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"threads": 1, "max_requests": 8, "graph": "off", "kv_cache_memory": 8 << 20}
)
"""How the kit starts a device unless a law or the caller says otherwise."""

LARGE = 32 << 20
"""Bytes of KV memory for the largest heads and pages that backends take."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one case of a law. `verdict`: passed, failed or skipped; `text`: why it failed
    or was skipped, empty otherwise. `errors`: the largest difference seen, by dtype."""

    law: str
    level: str
    case: str
    verdict: Verdict
    text: str
    seconds: float
    errors: Mapping[str, float]

    @property
    def name(self) -> str:
        """The case's name, as gaps have it: `law[case]`, or `law` for a law without variants."""
        return f"{self.law}[{self.case}]" if self.case else self.law

    @property
    def max_error(self) -> float | None:
        """The largest error of all dtypes; None if no numbers were compared."""
        return max(self.errors.values(), default=None)


class Kit:
    """A device under test, with everything that its laws share: the reference, started devices, and
    the checkpoints of the kit's models, which are written to `folder`. `settings` override DEFAULTS
    at each start. Close it at the end."""

    def __init__(self, target: Target, folder: Path, settings: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.target = target
        self.fixture = target.fixture()
        self.folder = folder
        self.settings = MappingProxyType({**DEFAULTS, **settings})
        self._for_case: Mapping[str, Any] = MappingProxyType({})
        self._is_interpreted: bool | None = None
        self._harnesses: dict[tuple[object, ...], Harness] = {}
        self._references: dict[tuple[str, int, int], Harness] = {}
        self._oracles: dict[tuple[str, int], Oracle] = {}

    def broken_by(self, mutant: Mutant) -> Kit:
        """Return a kit with the same models and settings for the device with `mutant` planted. The
        caller closes it."""
        return Kit(self.target.broken_by(mutant), self.folder, self.settings)

    def take_case(self, law: Law, case: str) -> None:
        """Choose how `open` and `harness` start devices from now on. If Triton is interpreted and
        `law.interpreted` is a set without this case, devices run the reference's kernels and, if
        Triton's attention is preferred, the first other attention backend. A caller's own choice of
        kernels stands."""
        is_slow = law.interpreted is not None and case not in law.interpreted and self.interprets_kernels()
        chosen = {"kernels": "reference"} if is_slow and "kernels" not in self.settings else {}
        self._for_case = MappingProxyType(chosen)

    def interprets_kernels(self) -> bool:
        """Return whether the device's kernels are Triton's and run in its interpreter, as they do
        without hardware."""
        if self._is_interpreted is None:
            is_on = os.environ.get("TRITON_INTERPRET") == "1" and "torch_runtime" in self.target.capabilities()
            self._is_interpreted = is_on and self.target.has_triton_kernels()
        return self._is_interpreted

    def checkpoint(self, model: str, head_dim: int) -> Path:
        """Return the folder of one of the kit's models with heads of this size; the first call
        writes it."""
        folder = self.folder / f"{model}-{head_dim}"
        return folder if folder.is_dir() else write_checkpoint(folder, model, head_dim)

    def reference(self, model: str, head_dim: int, page_size: int = 16) -> Harness:
        """Return the started reference device on a model, in float32; equal arguments return the
        same one, which stays open until `close`."""
        key = (model, head_dim, page_size)
        if key not in self._references:
            own = {"page_size": page_size, "dtype": "float32", "max_batch_tokens": 256, "kv_cache_memory": LARGE}
            settings = {**DEFAULTS, **own}
            self._references[key] = self._start(REFERENCE, model, REFERENCE.geometry(), head_dim, settings)
        return self._references[key]

    def oracle(self, model: str, head_dim: int) -> Oracle:
        """Return the object that gives the reference's distributions for texts under a model; equal
        arguments return the same one."""
        key = (model, head_dim)
        if key not in self._oracles:
            self._oracles[key] = ReferenceOracle(self.reference(model, head_dim))
        return self._oracles[key]

    def open(
        self, model: str, head_dim: int | None = None, pool_kind: PoolKind | None = None, **settings: Any
    ) -> Harness:
        """Start the device on a model; the caller closes the harness. Unless it runs in float32, a
        model in `SMOOTH` is replaced by the one there. `head_dim` None: that of `Target.geometry`;
        `pool_kind` None: the device's own kind. `settings`: fields of EngineConfig."""
        if model in SPARSE_MODELS and not self.serves(model):
            raise NotApplicable(f"this device does not serve the kit's model {model!r}")
        geometry = self.target.geometry(settings.get("attention_backend"))
        given = {
            "page_size": geometry.page_size,
            "dtype": geometry.dtype,
            **SETTINGS.get(model, {}),
            **self.settings,
            **self._for_case,
            **settings,
        }
        if self._for_case and "attention_backend" not in given:
            given |= self.target.attention_without_triton(str(given["dtype"]))
        model = model if given["dtype"] == "float32" else SMOOTH.get(model, model)
        return self._start(self.target, model, geometry, head_dim or geometry.head_dim, given, pool_kind)

    def serves(self, model: str) -> bool:
        """Return whether the device has the layers of a model in SPARSE_MODELS."""
        return "torch_runtime" in self.target.capabilities() or model in self.fixture.models

    def harness(self, model: str, **settings: Any) -> Harness:
        """Return a started device that laws share: equal arguments return the same one until
        `forget`, started at the first call. `settings`: as for `open`."""
        key = (model, *sorted({**self._for_case, **settings}.items()))
        if key not in self._harnesses:
            self._harnesses[key] = self.open(model, **settings)
        return self._harnesses[key]

    def forget(self) -> None:
        """Close every shared device, for example after a failure that may have left one in a bad
        state; errors of closing are ignored. The reference stays."""
        harnesses, self._harnesses = self._harnesses, {}
        for harness in harnesses.values():
            with suppress(Exception):  # A broken device may not close; its law has said what is wrong.
                harness.close()

    def close(self) -> None:
        """Close all shared devices and the reference. Devices of `open` are closed by their
        callers."""
        self.forget()
        for harness in self._references.values():
            harness.close()
        self._references.clear()
        self._oracles.clear()

    def _start(
        self,
        target: Target,
        model: str,
        geometry: Geometry,
        head_dim: int,
        settings: Mapping[str, Any],
        kind: PoolKind | None = None,
    ) -> Harness:
        folder = self.checkpoint(model, head_dim)
        config = resolve_config({**settings, "model": str(folder)}, {})
        dtype = settings.get("dtype", geometry.dtype)
        actual = Geometry(head_dim, int(settings["page_size"]), str(dtype))
        started, facts = target.start(config, folder, kind), target.facts()
        cell_device = facts.tensor_device if target.fixture().cells is None else "cpu"
        return Harness(model, started, actual, facts, target.pool(started), cell_device)


class Trial:
    """The argument of a law's check: the kit, the device under test (`target`), the law and the
    case, and where to report errors and remarks."""

    def __init__(self, kit: Kit, law: Law, case: str) -> None:
        self.kit = kit
        self.target = kit.target
        self.law = law
        self.case = case
        self.errors: dict[str, float] = {}
        self.remarks: list[str] = []

    @property
    def is_interpreted(self) -> bool:
        """The law lists this case in `interpreted`, and the device's kernels run in Triton's
        interpreter. A step then takes about a second, so the check should do less. False for a law
        that lists no cases."""
        return self.law.interpreted is not None and self.case in self.law.interpreted and self.kit.interprets_kernels()

    def remember(self, remark: str) -> None:
        """Keep a remark, which is added to the text if the case is skipped."""
        self.remarks.append(remark)

    def note(self, error: float, dtype: str) -> None:
        """Record an error that was seen in a dtype; the largest one is kept."""
        self.errors[dtype] = max(self.errors.get(dtype, 0.0), error)

    def tolerance(self, dtype: str) -> float:
        """Return the error that this law allows this package in a dtype, as its fixture or the law
        says. Raises KeyError for a dtype that the law does not compare."""
        return self.kit.fixture.bound(self.law, dtype)

    def compare(self, harness: Harness, results: Sequence[Result]) -> None:
        """Compare results of `harness` with the reference within the law's tolerance, and note the
        largest error. Raises LawBroken, as `check_results` does."""
        oracle = self.kit.oracle(harness.model, harness.geometry.head_dim)
        dtype = harness.geometry.dtype
        self.note(check_results(results, oracle, self.tolerance(dtype)), dtype)

    @contextmanager
    def opened(self, model: str, **settings: Any) -> Iterator[Harness]:
        """Context manager: start a device for this law alone, as `Kit.open` does, and yield its
        harness; it is closed at the end."""
        harness = self.kit.open(model, **settings)
        try:
            yield harness
        finally:
            harness.close()


def run_case(kit: Kit, law: Law, case: str) -> Outcome:
    """Check one case of a law on the kit's device and return its outcome; the check's exceptions
    are not raised. One of them is a failure, unless it is NotApplicable (skipped); after a failure
    the shared devices are closed, so that the next case starts new ones."""
    trial = Trial(kit, law, case)
    begin = time.perf_counter()
    verdict, text = _verdict(trial)
    if verdict == "failed":
        kit.forget()
    return Outcome(law.name, law.level, case, verdict, text, time.perf_counter() - begin, trial.errors)


def _verdict(trial: Trial) -> tuple[Verdict, str]:
    law = trial.law
    try:
        missing = law.missing(trial.target.capabilities()) if law.needs else ""
        if missing:
            return "skipped", f"the device has no {missing}"
        trial.kit.take_case(law, trial.case)
        law.check(trial)
    except NotApplicable as reason:
        return "skipped", "; ".join((str(reason), *trial.remarks))
    except LawBroken as broken:
        return "failed", str(broken)
    except SglcoreError as error:  # its message says what to do, its notes say where it was
        return "failed", "".join(traceback.format_exception_only(error)).strip()
    except Exception as error:
        return "failed", "".join(traceback.format_exception(error)).strip()
    return "passed", ""


def catches(kit: Kit, law: Law, mutant: Mutant) -> tuple[bool | None, str]:
    """Run a law on a mutant of the device, case by case until one fails. Returns True and the text
    of that failure; False and the cases that passed; or None and the reason why none could run."""
    missing = ", ".join(sorted(mutant.needs - kit.target.capabilities())) if mutant.needs else ""
    if missing:
        return None, f"{mutant.name} cannot be planted: the device has no {missing}"
    broken = kit.broken_by(mutant)
    try:
        outcomes: list[Outcome] = []
        for case in sorted(law.cases(broken.target), key=lambda case: case != mutant.case):
            outcomes.append(run_case(broken, law, case))
            if outcomes[-1].verdict == "failed":
                return True, outcomes[-1].text
        ran = [outcome.name for outcome in outcomes if outcome.verdict == "passed"]
        skipped = "; ".join(sorted({outcome.text for outcome in outcomes if outcome.verdict == "skipped"}))
        return (
            (False, f"{mutant.name} passes {', '.join(ran)}") if ran else (None, skipped or "the law has no case here")
        )
    finally:
        broken.close()


def record_run(kit: Kit) -> Record:
    """Run chunks, arrivals, sampling and overlap on the kit's dense model, and return the record of
    all submitted steps with their results."""
    harness = kit.harness("dense")
    harness.recorder.keep = True
    overlap = harness.limits.can_overlap
    for seed, sampling in ((1, {}), (2, {"temperature": 0.8, "seed": 9, "top_k": 12})):
        prompts = random_prompts(seed, (5, 30, 1, 17, 9))
        harness.run(prompts, 10, chunk=12, stagger=2, overlap=overlap, sampling=sampling)
    steps, harness.recorder.steps, harness.recorder.keep = harness.recorder.steps, [], False
    sizes = {
        "head_dim": harness.geometry.head_dim,
        "page_size": harness.limits.page_size,
        "dtype": harness.geometry.dtype,
    }
    return Record({"device": kit.target.name, "model": harness.model, **sizes}, steps)


def replay_run(kit: Kit, record: Record) -> Replayed:
    """Start this device on the record's model, replay the record's steps and return what was
    compared. Raises LawBroken where results differ, ConfigError if the device has heads of another
    size."""
    about = record.about
    harness = kit.open(about["model"], page_size=about["page_size"])
    try:
        if harness.geometry.head_dim != about["head_dim"]:
            raise ConfigError(
                f"the record has heads of {about['head_dim']}, the device takes {harness.geometry.head_dim}"
            )
        dtypes = (harness.geometry.dtype, about["dtype"])
        return replay(harness.recorder, record.steps, max(LOGPROBS[dtype] for dtype in dtypes))
    finally:
        harness.close()
