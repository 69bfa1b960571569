"""Recorded steps are read back unchanged, and replaying them finds a device with different
results."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from sglcore.conformance.kit_run import Kit, record_run, replay_run
from sglcore.conformance.law import LawBroken
from sglcore.conformance.mutants.mutants_worker import FLATTERS, ONE_LENGTH_FOR_ALL, SWAPS_ROWS
from sglcore.conformance.recorded_steps import Record, read_record, record_engine, write_record
from sglcore.conformance.reference_parts import REFERENCE
from sglcore.core.errors import ConfigError
from sglcore.engine.core import Engine
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch
from sglcore.worker.schedule_batch import CaptureHiddenMode


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    made = Kit(REFERENCE, tmp_path_factory.mktemp("models"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def record(kit: Kit) -> Record:
    return record_run(kit)


def test_what_was_written_is_read(record: Record, tmp_path: Path) -> None:
    write_record(tmp_path / "steps.zip", record)
    read = read_record(tmp_path / "steps.zip")
    assert dict(read.about) == dict(record.about)
    assert len(read.steps) == len(record.steps) > 20
    for (batch, result), (other, wanted) in zip(read.steps, record.steps, strict=True):
        for item in fields(other):
            mine, theirs = getattr(batch, item.name), getattr(other, item.name)
            if isinstance(theirs, np.ndarray):
                np.testing.assert_array_equal(mine, theirs, strict=True)
        assert (batch.step, batch.forward_mode, batch.composition) == (
            other.step,
            other.forward_mode,
            other.composition,
        )
        assert isinstance(batch.sampling, SamplingBatch) and isinstance(other.sampling, SamplingBatch)
        np.testing.assert_array_equal(batch.sampling.seed_words, other.sampling.seed_words)
        np.testing.assert_array_equal(result.token_ids, wanted.token_ids)
        assert result.path == wanted.path


def test_the_file_holds_json_and_plain_arrays_only(record: Record, tmp_path: Path) -> None:
    write_record(tmp_path / "steps.zip", record)
    with zipfile.ZipFile(tmp_path / "steps.zip") as found:
        names = found.namelist()
        headers = [found.read(name)[:6] for name in names if name.endswith(".npy")]
    assert {name.rpartition(".")[2] for name in names} == {"json", "npy"}
    assert set(headers) == {b"\x93NUMPY"}


def test_the_same_device_replays_without_a_difference(kit: Kit, record: Record) -> None:
    seen = replay_run(kit, record)
    assert seen.tokens == 100 and seen.parted == 0 and seen.max_error == 0


@pytest.mark.parametrize("mutant", [FLATTERS, ONE_LENGTH_FOR_ALL, SWAPS_ROWS], ids=lambda mutant: mutant.name)
def test_a_broken_device_is_found(mutant: object, kit: Kit, record: Record) -> None:
    broken = Kit(REFERENCE.broken_by(mutant), kit.folder)  # pyright: ignore[reportArgumentType]
    with pytest.raises(LawBroken, match="step "):
        replay_run(broken, record)


def test_a_file_of_another_kind_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text.zip").write_text("no zip")
    for name in ("text.zip", "nowhere.zip"):
        with pytest.raises(ConfigError, match="is not a record"):
            read_record(tmp_path / name)


def test_a_record_of_another_head_size_is_refused(kit: Kit, record: Record) -> None:
    with pytest.raises(ConfigError, match="heads of 48"):
        replay_run(kit, replace(record, about={**record.about, "head_dim": 48}))


def test_a_step_that_asks_for_more_than_a_record_holds_is_refused(record: Record, tmp_path: Path) -> None:
    batch, result = record.steps[0]
    batch = batch.copy_for_forward()
    batch.capture_hidden_mode.put(CaptureHiddenMode.FULL)
    with pytest.raises(ConfigError, match="capture_hidden_mode"):
        write_record(tmp_path / "steps.zip", Record({}, [(batch, result)]))


def test_an_engines_own_steps_can_be_recorded(kit: Kit) -> None:
    harness = kit.open("text")
    engine = Engine(harness.started.worker, kit.checkpoint("text", harness.geometry.head_dim))
    recorder = record_engine(engine)
    engine.add("Once upon a time", SamplingParams(max_tokens=5, ignore_eos=True))
    while engine.has_work:
        engine.step()
    engine.close()
    assert sum(len(result.token_ids) for _, result in recorder.steps) == 5
