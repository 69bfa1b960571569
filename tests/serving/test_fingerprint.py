"""The fingerprint changes with what may change a number, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sglcore.serving.replicas.engine_process import fingerprint

ROW: dict[str, object] = {"topic": "graphs", "effective": "full"}
MEMORY: dict[str, object] = {"topic": "kv cache", "effective": "100 pages"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    (tmp_path / "model.safetensors").write_bytes(np.arange(300_000, dtype="<f4").tobytes())
    return tmp_path


def test_the_same_is_the_same_whatever_memory_there_is(folder: Path) -> None:
    found = fingerprint(folder, "cpu", [ROW, MEMORY])
    assert found == fingerprint(folder, "cpu", [ROW]) and len(found) == len("fp_") + 12


def test_other_weights_of_the_same_size_differ(folder: Path) -> None:
    before = fingerprint(folder, "cpu", [ROW])
    (folder / "model.safetensors").write_bytes(np.arange(1, 300_001, dtype="<f4").tobytes())
    assert fingerprint(folder, "cpu", [ROW]) != before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_one_other_byte_at_the_end_of_a_file_differs(folder: Path, name: str) -> None:
    before = fingerprint(folder, "cpu", [ROW])
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert fingerprint(folder, "cpu", [ROW]) != before


def test_another_device_or_decision_differs(folder: Path) -> None:
    others = {fingerprint(folder, "cpu", [ROW]), fingerprint(folder, "other", [ROW])}
    others |= {fingerprint(folder, "cpu", []), fingerprint(folder, "cpu", [{**ROW, "effective": "off"}])}
    assert len(others) == 4
