"""Finds the first commit at which a test fails, with `git bisect` in a separate worktree."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from ci.changes import git
from ci.environments import python_of
from ci.lanes import ROOT, Lane, LaneError
from ci.run import environ

TREE = Path("build") / "since"
FARTHEST = 1024
"""How many commits back the search for a passing commit goes."""


class Bisection:
    """One test on one lane, in a worktree below `root`."""

    def __init__(self, test: str, lane: Lane, root: Path = ROOT) -> None:
        self._test = test
        self._lane = lane
        self._root = root
        self._tree = root / TREE
        self._words = command(test, lane)

    def run(self, good: str = "") -> str:
        """Return the first commit at which the test fails. `good`: a commit at which it passes;
        empty: search for one. Waits.

        Raises LaneError if the test passes at HEAD, or fails at all commits that were searched."""
        self._remove()
        words = ("git", "worktree", "add", "--detach", str(self._tree), "HEAD")
        made = subprocess.run(words, cwd=self._root, capture_output=True, text=True, check=False)
        if made.returncode:
            raise LaneError(f"no worktree at {TREE}: {made.stderr.strip()}")
        try:
            if self._passes("HEAD"):
                lane = self._lane.name
                raise LaneError(
                    f"{self._test} passes at HEAD on lane {lane}; commit what makes it fail, or name its lane"
                )
            return self._first(good or self._passing())
        finally:
            self._remove()

    def _first(self, good: str) -> str:
        head = git("rev-parse", "HEAD", root=self._root).strip()
        for words in (("start", head, good), ("run", "sh", "-c", f"{shlex.join(self._words)} > /dev/null 2>&1")):
            subprocess.run(
                ("git", "bisect", *words), cwd=self._tree, env=self._environ(), capture_output=True, check=True
            )
        return git("rev-parse", "refs/bisect/bad", root=self._tree).strip()

    def _passing(self) -> str:
        """Return a commit at which the test passes: HEAD~1, HEAD~2, HEAD~4 ... are tried."""
        back = 1
        while back <= FARTHEST:
            name = git("rev-parse", "--verify", "--quiet", f"HEAD~{back}", root=self._root).strip()
            if not name:
                break
            if self._passes(name):
                return name
            back *= 2
        raise LaneError(
            f"{self._test} fails as far back as it was looked for; name a commit at which it passes: --good COMMIT"
        )

    def _passes(self, commit: str) -> bool:
        name = git("rev-parse", commit, root=self._root).strip()
        subprocess.run(("git", "checkout", "--quiet", "--detach", name), cwd=self._tree, check=True)
        ran = subprocess.run(self._words, cwd=self._tree, env=self._environ(), capture_output=True, check=False)
        print(f"  {name[:12]}: {'passes' if ran.returncode == 0 else 'fails'}", flush=True)
        return ran.returncode == 0

    def _remove(self) -> None:
        git("worktree", "remove", "--force", str(self._tree), root=self._root)
        git("worktree", "prune", root=self._root)

    def _environ(self) -> dict[str, str]:
        """Return an environment in which imports come from the worktree."""
        folders = (self._tree, self._tree / "simulator", *sorted((self._tree / "devices").glob("*")))
        return environ(os.environ) | {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def command(test: str, lane: Lane) -> tuple[str, ...]:
    """Return the command that runs one test on a lane, in the folder of a checkout."""
    simulated = (f"--sim={lane.simulator}",) if lane.simulator else ()
    pytest = (str(python_of(lane)), "-m", "pytest", "-n0", "-p", "no:cacheprovider")
    return (*pytest, f"--lane={lane.name}", *simulated, test)
