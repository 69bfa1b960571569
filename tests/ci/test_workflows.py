"""The stored workflows are what the packages declare, and are well-formed."""

from __future__ import annotations

from pathlib import Path

from ci import workflows
from ci.lanes import Lane, lanes


def test_the_stored_workflows_are_what_the_lanes_say() -> None:
    assert workflows.differences() == [], "run: python -m ci workflows --write"


def test_a_changed_lane_would_be_seen(tmp_path: Path) -> None:
    folder = tmp_path / workflows.FOLDER
    folder.mkdir(parents=True)
    (tmp_path / "devices" / "one").mkdir(parents=True)
    (tmp_path / "devices" / "one" / "ci.toml").write_text('[[lane]]\nname = "one"\ntorch = ["2.13.0"]\n')
    for name, text in workflows.texts(lanes(tmp_path)).items():
        (folder / name).write_text(text)
    assert workflows.differences(tmp_path) == []
    (tmp_path / "devices" / "one" / "ci.toml").write_text('[[lane]]\nname = "one"\ntorch = ["2.11.0"]\n')
    assert workflows.differences(tmp_path) == ["one.yml"]


def test_a_workflow_written_by_hand_is_left_alone_and_a_generated_one_of_a_lane_that_is_gone_is_not(
    tmp_path: Path,
) -> None:
    folder = tmp_path / workflows.FOLDER
    folder.mkdir(parents=True)
    (tmp_path / "devices" / "one").mkdir(parents=True)
    (tmp_path / "devices" / "one" / "ci.toml").write_text('[[lane]]\nname = "one"\ntorch = ["2.13.0"]\n')
    for name, text in workflows.texts(lanes(tmp_path)).items():
        (folder / name).write_text(text)
    (folder / "release.yml").write_text("name: release\n")
    (folder / "gone.yml").write_text(workflows.HEADER + "name: gone\n")
    assert workflows.differences(tmp_path) == ["gone.yml"]


def test_a_lane_of_an_environment_of_its_own_is_run_once_and_without_torch() -> None:
    lane = Lane(name="x-alone", device="x", capabilities=frozenset(), environment=("numpy",))
    text = workflows.texts((lane,))["x.yml"]
    assert "torch" not in text and "matrix" not in text and "lane: x-alone" in text


def test_hardware_runs_on_its_own_machines_and_only_where_there_are_some() -> None:
    lane = Lane(name="x-card", device="x", capabilities=frozenset(), runner=("self-hosted", "x"), torch=("2.13.0",))
    text = workflows.texts((lane,))["x.yml"]
    assert """runner: '["self-hosted", "x"]'""" in text and "vars.RUNNERS_X == 'yes'" in text
    assert 'matrix: {torch: ["2.13.0"]}' in text
