"""A lane's environment holds what the lane declares, at the pinned versions, and is rebuilt only
when that changes."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ci import run
from ci.environments import STAMP, SUITE, digest, folder_of, pins, pip_command, prepare, python_of, torch_words
from ci.lanes import ROOT, Lane, lanes

OWN = Lane(name="own", device="one", capabilities=frozenset(), environment=("devices/one", "numpy"))
PROJECTS = replace(OWN, name="projects", environment=())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one package and pins."""
    (tmp_path / "devices" / "one").mkdir(parents=True)
    (tmp_path / "devices" / "one" / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "constraints.txt").write_text("numpy==2\n")
    return tmp_path


def test_a_lane_runs_on_the_projects_interpreter_unless_it_has_its_own(checkout: Path) -> None:
    assert python_of(PROJECTS, checkout) == Path(sys.executable)
    assert python_of(OWN, checkout) == checkout / "build" / "environments" / "own" / "bin" / "python"
    assert prepare(PROJECTS, checkout) is False and not (checkout / "build").exists()


def test_folders_are_installed_in_place_and_everything_as_pinned(checkout: Path) -> None:
    words = pip_command(OWN, checkout)
    own = ("-e", "devices/one", "numpy", *SUITE)
    assert words[-len(own) - 1 :] == (str(folder_of(OWN, checkout) / "constraints.txt"), *own)
    assert words[words.index("--python") + 1] == str(python_of(OWN, checkout))


TORCH = """[project]
[tool.sglcore.torch]
versions = ["2.13.0", "2.11.0"]
builds = [{name = "one build", systems = ["Linux", "Darwin", "Windows"], megabytes = [1, 2], label = "one"}]
"""


def test_an_environment_with_torch_takes_the_build_that_the_installer_takes_for_the_processor(checkout: Path) -> None:
    assert torch_words(OWN, checkout) == ()
    (checkout / "devices" / "one" / "pyproject.toml").write_text(TORCH)
    (checkout / "constraints.txt").write_text("torch==2.11.0\n")
    words = pip_command(OWN, checkout)
    assert words[words.index("-c") + 2 :] == ("torch==2.11.0+one", "-e", "devices/one", "numpy", *SUITE)


def third_party(file: Path, seen: set[Path]) -> set[str]:
    """Return the third-party modules that a file imports at any nesting, and those of the `ci`
    files that it imports."""
    seen.add(file)
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    ours = {ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("ci.")}
    found = {top for name in names if (top := name.partition(".")[0]) not in {*sys.stdlib_module_names, *PROJECT}}
    return found.union(*(third_party(each, seen) for each in ours - seen))


PROJECT = ("ci", "tests", "tools", "sglcore", "sglcore_sim", "conftest")


def test_what_runs_and_watches_tests_is_in_every_environment() -> None:
    found = third_party(ROOT / "conftest.py", set()) | third_party(ROOT / "ci" / "watch.py", set())
    assert {"pytest", "coverage"} <= found <= {name.replace("pytest-", "") for name in SUITE}


def test_a_lane_may_leave_a_pin_out(checkout: Path) -> None:
    (checkout / "constraints.txt").write_text("numpy==2\nnumpydoc==1\n")
    assert pins(OWN, checkout) == "numpy==2\nnumpydoc==1\n"
    assert pins(replace(OWN, unpinned=("numpy",)), checkout) == "numpydoc==1\n"


def test_an_environment_is_made_once_and_again_when_anything_it_is_made_of_changes(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[tuple[str, ...]] = []
    monkeypatch.setattr(subprocess, "run", lambda words, **_: installed.append(words))
    assert prepare(OWN, checkout) and not prepare(OWN, checkout)
    assert python_of(OWN, checkout).exists()
    for changed in ("constraints.txt", "devices/one/pyproject.toml"):
        (checkout / changed).write_text("# other\n")
        assert prepare(OWN, checkout) and not prepare(OWN, checkout)
    assert prepare(replace(OWN, environment=("numpy",)), checkout)
    assert len(installed) == 4


def test_an_environment_that_was_not_finished_is_made_again(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(words: tuple[str, ...], **_: object) -> None:
        raise subprocess.CalledProcessError(1, words)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", fails)
        with pytest.raises(subprocess.CalledProcessError):
            prepare(OWN, checkout)
    assert not (folder_of(OWN, checkout) / STAMP).exists()
    monkeypatch.setattr(subprocess, "run", lambda words, **_: None)
    assert prepare(OWN, checkout)
    assert (folder_of(OWN, checkout) / STAMP).read_text() == digest(OWN, checkout)


def test_a_lane_whose_environment_can_not_be_installed_fails_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(lane: Lane) -> bool:
        raise subprocess.CalledProcessError(1, ("pip",))

    monkeypatch.setattr(run, "prepare", fails)
    assert run.run(OWN, 0).failure is run.Failure.IMAGE


def test_an_environment_of_the_project_that_is_to_be_without_torch_names_no_package_that_requires_it() -> None:
    for lane in lanes():
        if "no_torch" in lane.capabilities:
            assert "torch" not in lane.capabilities
            assert "devices/cpu" not in lane.environment and not any("torch" in word for word in lane.environment)
