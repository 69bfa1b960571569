"""All distributions declare all their files and have the same version; one command writes it, and a
release uses it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import sglcore
from tools.wheels import checking
from tools.wheels.__main__ import main
from tools.wheels.distributions import CHANGES, ROOT, ReleaseError, check_tag, distributions, version, write_version

RELEASE = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
JOBS: dict[str, dict[str, Any]] = RELEASE["jobs"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that contain the version."""
    files = [each.folder / "pyproject.toml" for each in distributions()]
    for file in (*files, ROOT / CHANGES, ROOT / "sglcore" / "__init__.py"):
        target = tmp_path / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    return tmp_path


def test_every_distribution_and_the_first_entry_of_the_changes_have_the_version_of_the_code() -> None:
    assert version() == sglcore.__version__
    assert len(distributions()) == 9


def test_every_file_of_a_package_is_python_or_declared_as_its_data() -> None:
    assert [(each.name, name) for each in distributions() for name in checking.undeclared(each)] == []
    (sim,) = [each for each in distributions() if each.name == "sglcore-sim"]
    data = {"package-data": {"*": ["*.cpp", "*.h", "*.txt"]}}
    forgotten = {**sim.declared, "tool": {"setuptools": {**sim.declared["tool"]["setuptools"], **data}}}
    assert "data/torch_npu_signatures.json" in checking.undeclared(replace(sim, declared=forgotten))


@pytest.mark.parametrize("file", ["devices/xpu/pyproject.toml", "simulator/pyproject.toml", CHANGES])
def test_a_version_that_differs_is_found_with_the_remedy(file: str, checkout: Path) -> None:
    now = sglcore.__version__
    path = checkout / file
    path.write_text(path.read_text().replace(now, "9.9.9"))
    with pytest.raises(
        ReleaseError, match=f"{file} has 9.9.9, but sglcore/__init__.py has {now}; python -m tools.wheels "
    ):
        version(checkout)


def test_one_command_writes_the_version_everywhere_but_in_the_changes(checkout: Path) -> None:
    write_version("4.5.6rc1", checkout)
    with pytest.raises(ReleaseError, match=f"{CHANGES} has {sglcore.__version__}, but "):
        version(checkout)
    changes = checkout / CHANGES
    changes.write_text(changes.read_text().replace("\n## ", "\n## 4.5.6rc1 (unreleased)\n\n- A change.\n\n## ", 1))
    assert version(checkout) == "4.5.6rc1"
    requirements = (checkout / "devices" / "xpu" / "pyproject.toml").read_text()
    assert requirements.count("4.5.6rc1") == 1 and 'requires-python = ">=3.11"' in requirements
    with pytest.raises(ReleaseError, match="found the version 'new'; wanted one such as 1.2.3"):
        write_version("new", checkout)


def test_a_tag_is_of_the_version_and_of_an_entry_that_has_its_day(checkout: Path) -> None:
    now = sglcore.__version__
    changes = checkout / CHANGES
    first = f"## {now} (unreleased)\n\n- A change.\n\n## 0.0.1 (2026-01-02)\n"
    changes.write_text(f"# Changes\n\n{first}")
    with pytest.raises(ReleaseError, match=r"has \S+ \(unreleased\); wanted the day of its release"):
        check_tag(f"v{now}", checkout)
    changes.write_text(changes.read_text().replace("unreleased", "2026-03-04"))
    assert check_tag(f"v{now}", checkout) == now
    with pytest.raises(ReleaseError, match=f"found the tag v0.0.1 at version {now}; wanted v{now}"):
        check_tag("v0.0.1", checkout)


def test_every_change_is_one_line() -> None:
    entries = (ROOT / CHANGES).read_text().partition("\n## ")[2].splitlines()[1:]
    changes = [line for line in entries if line and not line.startswith("**")]
    assert all(line.startswith(("- ", "## ", "The first release")) for line in changes), changes
    assert not any(line.startswith("- ") and not line.endswith(".") for line in changes)


def test_a_command_that_fails_says_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["version", "--tag", "v9.9.9"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("found the tag v9.9.9 at version") and said.count("\n") == 1
    assert main(["check", "--dist", str(tmp_path)]) == 1
    assert "sglcore-cpu" in capsys.readouterr().out


def test_a_release_publishes_every_distribution_after_it_was_tried_and_only_for_a_tag() -> None:
    publish = JOBS["publish"]
    assert set(publish["strategy"]["matrix"]["project"]) == {each.name for each in distributions()}
    assert publish["strategy"]["matrix"]["project"][0] == "sglcore", "the others need it"
    assert publish["if"] == "github.event_name == 'push'" and RELEASE[True]["push"] == {"tags": ["v*"]}
    assert [job["needs"] for name, job in JOBS.items() if name != "version"] == [["version"], ["build"], ["try"]]


def test_only_the_job_that_publishes_may_ask_for_a_token() -> None:
    assert RELEASE["permissions"] == {"contents": "read"}
    assert {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job} == {
        "publish": {"id-token": "write"}
    }
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()


def test_a_release_is_tried_on_every_python_that_is_served() -> None:
    (core, *_) = distributions()
    assert JOBS["try"]["strategy"]["matrix"]["python"] == core.declared["tool"]["sglcore"]["pythons"]


def test_the_steps_of_a_release_are_bash_without_expressions() -> None:
    steps = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]
    assert len(steps) == 6
    for text in steps:
        assert "${{" not in text, "what GitHub pastes into bash is not what was checked"
        ran = subprocess.run(("bash", "-n"), input=text, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr


def test_the_files_of_a_project_are_its_own(tmp_path: Path) -> None:
    (step,) = [step["run"] for step in JOBS["publish"]["steps"] if "run" in step]
    stems = {each.name: each.stem for each in distributions()}
    for name, stem in stems.items():
        folder = tmp_path / name
        (folder / "dist").mkdir(parents=True)
        for each in stems.values():
            (folder / "dist" / f"{each}-0.1.0.tar.gz").write_text("")
        subprocess.run(
            ("bash", "-eo", "pipefail", "-c", step),
            cwd=folder,
            env={"PROJECT": name, "PATH": "/usr/bin:/bin"},
            check=True,
        )
        assert [path.name for path in (folder / "publish").iterdir()] == [f"{stem}-0.1.0.tar.gz"]
