"""Recorded steps: the batches sent to a worker and their results, as one zip of JSON and plain
arrays; no pickle.

The steps of one engine are recorded here and later fed to another device, to find where the two
differ.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglcore.conformance.law import LawBroken
from sglcore.conformance.recording_worker import RecordingWorker
from sglcore.core.errors import ConfigError
from sglcore.engine.core import Engine
from sglcore.sampling.params_batch import SamplingBatch
from sglcore.worker.model_worker import BatchResult, ModelWorker, TokenLogprobs
from sglcore.worker.schedule_batch import ForwardMode, OneShot, ScheduleBatch

FORMAT = 1
RecordedStep = tuple[ScheduleBatch, BatchResult]


@dataclass(frozen=True, slots=True)
class Record:
    """Recorded steps, each a batch and its result; `about` names the model, the sizes and the
    device that they ran on."""

    about: Mapping[str, Any]
    steps: Sequence[RecordedStep]


def record_engine(engine: Engine) -> RecordingWorker:
    """Put a recorder in place of an engine's worker, before its first request, and return it. Its
    `steps` are those of a `Record`."""
    recorder = RecordingWorker(engine.worker)
    recorder.keep = True
    engine.loop.worker = recorder
    return recorder


def write_record(file: Path, record: Record) -> None:
    """Write a record to `file`, a zip with `record.json` and one `.npy` for each array. Raises
    ConfigError for a value that can not be written."""
    steps: list[dict[str, Any]] = []
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        for number, (batch, result) in enumerate(record.steps):
            arrays: dict[str, NDArray[Any]] = {}
            plain = {"batch": _batch_values(batch, arrays), "result": _result_values(result, arrays)}
            steps.append({**plain, "arrays": sorted(arrays)})
            for name, array in arrays.items():
                data = io.BytesIO()
                np.lib.format.write_array(data, np.ascontiguousarray(array), allow_pickle=False)
                out.writestr(f"{number:05d}/{name}.npy", data.getvalue())
        out.writestr(
            "record.json", json.dumps({"format": FORMAT, "about": dict(record.about), "steps": steps}, indent=1)
        )


def read_record(file: Path) -> Record:
    """Return the record that `write_record` wrote to `file`; raises ConfigError for anything else,
    and for a missing file."""
    try:
        with zipfile.ZipFile(file) as found:
            values = json.loads(found.read("record.json"))
            if values["format"] != FORMAT:
                raise ConfigError(f"{file} has format {values['format']}", wanted=str(FORMAT), remedy="record it again")
            return Record(values["about"], tuple(_read_steps(found, values["steps"])))
    except (OSError, zipfile.BadZipFile, KeyError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file} is not a record: {error}", wanted="a file that --record wrote") from None


def _read_steps(found: zipfile.ZipFile, steps: Sequence[Mapping[str, Any]]) -> Iterator[RecordedStep]:
    for number, step in enumerate(steps):
        arrays = {
            name: np.lib.format.read_array(io.BytesIO(found.read(f"{number:05d}/{name}.npy")), allow_pickle=False)
            for name in step["arrays"]
        }
        yield _make_batch(step["batch"], arrays), _make_result(step["result"], arrays)


def _batch_values(batch: ScheduleBatch, arrays: dict[str, NDArray[Any]]) -> dict[str, int]:
    """Return the plain values (integers) of a batch by field; its arrays are added to `arrays`, by
    name. Raises ConfigError for a batch with a request that a record can not hold."""
    plain: dict[str, int] = {}
    for item in fields(batch):
        value = getattr(batch, item.name)
        if isinstance(value, OneShot) and value.is_set:
            raise ConfigError(f"step {batch.step} requests {item.name}, which a record cannot hold")
        if isinstance(value, np.ndarray):
            arrays[f"batch.{item.name}"] = value
        elif isinstance(value, SamplingBatch):
            arrays |= {f"sampling.{part.name}": getattr(value, part.name) for part in fields(value)}
        elif isinstance(value, int):
            plain[item.name] = int(value)
    return plain


def _make_batch(plain: Mapping[str, int], arrays: Mapping[str, NDArray[Any]]) -> ScheduleBatch:
    sampling = _parts(arrays, "sampling.")
    return ScheduleBatch(
        **{**plain, "forward_mode": ForwardMode(plain["forward_mode"])},  # pyright: ignore[reportArgumentType]
        **_parts(arrays, "batch."),
        sampling=SamplingBatch(**sampling) if sampling else None,
    )


def _result_values(result: BatchResult, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    for name in ("token_offsets", "token_ids", "bad_rows"):
        arrays[f"result.{name}"] = getattr(result, name)
    if result.logprobs is not None:
        arrays |= {f"logprobs.{part.name}": getattr(result.logprobs, part.name) for part in fields(result.logprobs)}
    return {"step": result.step, "path": result.path}


def _make_result(plain: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> BatchResult:
    found, parts = _parts(arrays, "logprobs."), _parts(arrays, "result.")
    logprobs = TokenLogprobs(**found) if found else None
    return BatchResult(**plain, **parts, logprobs=logprobs)  # pyright: ignore[reportArgumentType]


def _parts(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


@dataclass(slots=True)
class Replayed:
    """Totals of a replay: `tokens` compared, `parted`, the requests that were dropped at a close
    choice, and the largest difference of log-probabilities in nats."""

    tokens: int = 0
    parted: int = 0
    max_error: float = 0.0


def replay(worker: ModelWorker, steps: Sequence[RecordedStep], tolerance: float) -> Replayed:
    """Feed recorded steps to a worker of the same sizes and compare the results; waits for each
    step. `tolerance`: in nats.

    Returns the totals. Raises LawBroken at the first step that differs. If two tokens are within
    twice the tolerance, either may be drawn; if the draws differ there, the rest of that request is
    not compared.
    """
    seen, parted = Replayed(), set[int]()
    for batch, wanted in steps:
        parted -= set(batch.slots[batch.page_counts == 0].tolist())
        found = worker.collect(worker.submit(batch.copy_for_forward()))
        for name in ("token_offsets", "bad_rows"):
            if not np.array_equal(getattr(found, name), getattr(wanted, name)):
                raise LawBroken(
                    f"step {batch.step}: {name} are {getattr(found, name)}, recorded {getattr(wanted, name)}"
                )
        rows = np.repeat(np.arange(batch.batch_size), np.diff(wanted.token_offsets))
        for index, slot in enumerate(batch.slots[rows].tolist()):
            if slot not in parted and not _compare_token(batch.step, found, wanted, index, tolerance, seen):
                parted.add(slot)
                seen.parted += 1
    return seen


def _compare_token(
    step: int, found: BatchResult, wanted: BatchResult, index: int, tolerance: float, seen: Replayed
) -> bool:
    """Compare sampled token `index` of a step with the recorded one, and count it in `seen`.
    Returns whether they are equal. Raises LawBroken for log-probabilities that differ by more than
    the tolerance, or for another token that is not within twice the tolerance of the recorded one.
    """
    token, other = int(found.token_ids[index]), int(wanted.token_ids[index])
    seen.tokens += 1
    if found.logprobs is None or wanted.logprobs is None:
        return token == other
    mine, theirs = (_by_id(result, index) for result in (found, wanted))
    error = max((abs(mine[key] - theirs[key]) for key in mine.keys() & theirs.keys()), default=0.0)
    seen.max_error = max(seen.max_error, error)
    if not error <= tolerance:
        raise LawBroken(
            f"step {step}, token {index}: log-probabilities differ by {error:.3g}, {tolerance:g} is allowed"
        )
    margin = abs(theirs.get(token, -np.inf) - theirs[other])
    if token != other and not margin <= 2 * tolerance:
        raise LawBroken(f"step {step}: token {index} is {token}, recorded {other}, {margin:.3g} apart")
    return token == other


def _by_id(result: BatchResult, index: int) -> dict[int, float]:
    """Return the log-probabilities by token id that a result has for its drawn token number `index`
    and the alternatives."""
    found = result.logprobs
    assert found is not None
    shown = dict(zip(found.top_ids[index].tolist(), found.top_logprobs[index].tolist(), strict=True))
    return {**shown, int(result.token_ids[index]): float(found.chosen[index])}
