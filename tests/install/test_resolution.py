"""Every command that the installer prints can be resolved by pip, for every supported machine and
Python.

pip uses only the public index, through a local proxy (front.py), and downloads no wheel. Torch
builds on separate indexes are tested if those can be reached. Otherwise the other requirements must
resolve with the same torch version from the public index, and the builds are left out by their
capability.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.install.front import serving
from tests.install.rows import NAMES, ROOT, Asked, Pip, Row, asked, contents, of_triton, rows, stand_ins
from tools.installer.choice import TRITON

pytestmark = pytest.mark.needs("registry")

BESIDE = [row for row in rows() if not row.needs_build]
BUILDS = [row for row in rows() if asked(row.commands()).options]
WORK = ROOT / "build" / "resolution"
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one row: pip's error ("" if it found everything), and the packages with their
    versions."""

    said: str
    found: dict[str, str]


@pytest.fixture(scope="session")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pip]:
    """The pinned pip, which need not be installed in the environment, with the local proxy of the
    public index."""
    folder = WORK / f"pip-{PINNED['pip']}"
    if not (folder / "pip" / "__main__.py").is_file():
        command = (sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check")
        subprocess.run((*command, "--target", str(folder), f"pip=={PINNED['pip']}"), check=True)
    wheels = stand_ins(tmp_path_factory.mktemp("checkout") / "wheels")
    with serving(WORK / "metadata") as (front, address):
        yield Pip(folder, address, wheels)
        print(f"metadata over the network: {front.fetched / 1e6:.1f} MB, pages of {len(front.pages)} projects")


@pytest.fixture(scope="session")
def outcomes(
    request: pytest.FixtureRequest, pip: Pip, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Row, Future[Outcome]]]:
    """Resolve every row of this run, several at a time; rows with the same input of pip are
    resolved once."""
    names = {item.name for item in request.session.items}
    folder = tmp_path_factory.mktemp("reports")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) + 1) as pool:
        begun: dict[tuple[object, ...], Future[Outcome]] = {}
        found: dict[Row, Future[Outcome]] = {}
        for row in BESIDE:
            if any(name.endswith(f"public_torch[{row}]") for name in names):
                key = contents(row, asked(row.commands()).without_build)
                if key not in begun:
                    begun[key] = pool.submit(resolve, pip, row, folder / f"{len(begun)}.json")
                found[row] = begun[key]
        yield found


def resolve(pip: Pip, row: Row, report: Path) -> Outcome:
    """Resolve a row with the torch of the public index, and the tests' Triton separately, as it is
    installed."""
    triton, others = of_triton(row.commands())
    said, found = pip.resolve(row, asked(others).without_build, report)
    if triton and not said:
        said, own = pip.resolve(row, asked(triton), report)
        found = {**found, "tests' triton": own.get("triton", "")}
    return Outcome(said, found)


@pytest.mark.parametrize("row", BESIDE, ids=str)
def test_all_that_is_installed_resolves_beside_the_public_torch(row: Row, outcomes: dict[Row, Future[Outcome]]) -> None:
    outcome = outcomes[row].result()
    assert not outcome.said, outcome.said
    number = outcome.found["torch"]
    assert number == (row.torch or number) and f"torch=={number}" in asked(row.commands()).without_build.requirements
    system, _, device = NAMES[row.name]
    brought = [name for name in outcome.found if TRITON.match(name)]
    assert bool(brought) == (system == "Linux")
    assert any(name.startswith("nvidia") for name in outcome.found) == (system == "Linux")
    assert "mlx" in outcome.found or device != "mlx"
    assert outcome.found.get("torch-npu", outcome.found.get("torch_npu", number)) == number
    assert outcome.found["numpy"] == PINNED["numpy"]


@pytest.mark.needs("registry", "torch_index")
@pytest.mark.parametrize("row", BUILDS, ids=str)
def test_the_build_of_torch_is_on_its_index_with_all_that_it_asks_for(row: Row, pip: Pip, tmp_path: Path) -> None:
    first = asked(row.commands()[:1])
    said, found = pip.resolve(row, first, tmp_path / "report.json")
    assert not said, said
    assert f"torch=={found['torch']}" == first.requirements[0]


def test_a_pin_against_what_torch_asks_for_is_caught(pip: Pip, tmp_path: Path) -> None:
    row = Row(name="NVIDIA", python="3.12")
    (tmp_path / "pins.txt").write_text("triton==3.9.0\n")
    what = asked(row.commands())
    planted = Asked(what.options, what.requirements, (*what.constraints, str(tmp_path / "pins.txt")))
    said, _ = pip.resolve(row, planted, tmp_path / "report.json")
    assert "ResolutionImpossible" in said and "triton" in said


def test_a_python_without_wheels_is_caught(pip: Pip, tmp_path: Path) -> None:
    row = Row(name="NVIDIA", python="3.16")
    what = asked(row.commands()[:1])
    said, _ = pip.resolve(row, what, tmp_path / "report.json")
    assert "o matching distribution" in said and "torch" in said
