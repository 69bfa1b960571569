"""A bisection names the first commit at which a test fails, and leaves the checkout unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ci import since
from ci.changes import git
from ci.lanes import Lane, LaneError, lanes
from ci.since import Bisection, command

LANE = Lane(name="x", device="x", capabilities=frozenset())


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of eight commits; the test fails from the sixth on."""
    run(tmp_path, "init", "-q")
    for number in range(1, 9):
        (tmp_path / "check.py").write_text(f"raise SystemExit({number} > 5)  # {number}\n")
        run(tmp_path, "add", ".")
        run(tmp_path, "commit", "-qm", f"commit {number}")
    monkeypatch.setattr(since, "command", lambda test, lane: (sys.executable, "check.py"))
    return tmp_path


def run(folder: Path, *words: str) -> None:
    settings = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(("git", *settings, *words), cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize("good", ["", "HEAD~7"])
def test_the_first_commit_at_which_a_test_fails_is_found(checkout: Path, good: str) -> None:
    head = git("rev-parse", "HEAD", root=checkout)
    first = Bisection("t", LANE, checkout).run(good)
    assert git("show", "-s", "--format=%s", first, root=checkout).strip() == "commit 6"
    assert git("rev-parse", "HEAD", root=checkout) == head and not (checkout / since.TREE).exists()
    assert git("bisect", "log", root=checkout) == "" and git("status", "--short", root=checkout) == ""


def test_a_test_that_passes_now_or_never_did_is_an_error(checkout: Path) -> None:
    run(checkout, "reset", "-q", "--hard", "HEAD~3")
    with pytest.raises(LaneError, match="t passes at HEAD on lane x"):
        Bisection("t", LANE, checkout).run()
    (checkout / "check.py").write_text("raise SystemExit(1)")
    run(checkout, "checkout", "-q", "--orphan", "other")
    run(checkout, "commit", "-qam", "one")
    with pytest.raises(LaneError, match="--good COMMIT"):
        Bisection("t", LANE, checkout).run()


def test_a_test_is_run_on_its_lane() -> None:
    simulated = next(lane for lane in lanes() if lane.simulator)
    words = command("tests/t.py::test_x", simulated)
    assert words[-3:] == (f"--lane={simulated.name}", f"--sim={simulated.simulator}", "tests/t.py::test_x")
