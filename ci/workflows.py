"""Generates the GitHub workflow from the lanes: one job per lane and torch version, and one job
that joins their records.

Every job is written out without a matrix or computed steps, so the file shows what bash runs.
Workflows without the header are written by hand and stay as they are.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ci.lanes import HOST, ROOT, Lane, LaneError, lanes

FOLDER = Path(".github") / "workflows"
FILE = "ci.yml"
HEADER = "# Written by `python -m ci workflows --write` from devices/*/ci.toml; a test holds it to them.\n"
UBUNTU = "ubuntu-24.04"
PYTHON = "3.11"
"""Lanes without hardware run on GitHub's machine with the oldest supported Python."""
VENV = ".venv/bin/python"
CHECKOUT = "      - uses: actions/checkout@v6\n        with: {fetch-depth: 0}\n"
"""With full history: the number of commits decides which slow tests run."""
SETUP_PYTHON = f'      - uses: actions/setup-python@v6\n        with: {{python-version: "{PYTHON}"}}\n'
APT = ("apt-get update -qq", "DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends")

HEAD = """name: ci
on:
  push: {branches: [main]}
  pull_request:
  workflow_dispatch:
    inputs:
      lane: {description: "the lane to run, instead of all", type: string, default: ""}
      tests: {description: "files or folders to run, instead of all that it may", type: string, default: ""}
permissions: {contents: read}
concurrency:
  group: ci-${{ github.ref }}
  cancel-in-progress: ${{ github.ref != 'refs/heads/main' }}
defaults:
  run: {shell: bash}
env:
  TESTS: ${{ inputs.tests }}
jobs:
"""


def texts(found: Sequence[Lane], root: Path = ROOT) -> Mapping[str, str]:
    """Generate every workflow, by file name. Raises LaneError if a lane can not be installed as
    declared."""
    rows = [(lane, version) for lane in found for version in lane.torch or ("",)]
    joined = [_id(lane, version) for lane, version in rows if version in ("", *lane.torch[:1])]
    return {FILE: HEADER + HEAD + "".join(_job(*row, root) for row in rows) + _joining(joined)}


def _id(lane: Lane, version: str) -> str:
    """Return the job's id; it has the torch version if the lane has several."""
    return f"{lane.name}-torch-{version.replace('.', '-')}" if len(lane.torch) > 1 else lane.name


def _job(lane: Lane, version: str, root: Path) -> str:
    name = f"{lane.name}, torch {version}" if version else lane.name
    lines = [f"  {_id(lane, version)}:", f"    name: {json.dumps(name)}"]
    wanted = f"inputs.lane == '' || inputs.lane == '{lane.name}'"
    lines += [f"    if: {wanted if lane.is_hosted else f'{_has_runner(lane)} && ({wanted})'}"]
    lines += [f"    runs-on: [{', '.join(lane.runner or (UBUNTU,))}]"]
    if lane.image:
        lines += ["    container:", f"      image: {json.dumps(lane.image)}"]
        lines += [f"      options: {json.dumps(lane.options)}"] if lane.options else []
    return "\n".join([*lines, "    timeout-minutes: 90", "    steps:", ""]) + _steps(lane, version, root)


def _has_runner(lane: Lane) -> str:
    """Condition of a self-hosted job: the repository has such a runner, and the code does not come
    from a pull request (which may be a stranger's)."""
    return f"vars.RUNNERS_{lane.device.upper()} == 'yes' && github.event_name != 'pull_request'"


def _steps(lane: Lane, version: str, root: Path) -> str:
    """Return a lane's steps: system packages, checkout, the lane's set-up, Python packages, tests,
    upload of the record. Only the record of the lane's first torch version joins the table."""
    source = [f"source {lane.source}"] if lane.source else []
    trusted = ['git config --global --add safe.directory "$GITHUB_WORKSPACE"'] if lane.image else []
    run = f'{VENV} -m ci run {lane.name} --tests "$TESTS"'
    is_first = version in ("", *lane.torch[:1])
    return "".join(
        (
            _run("packages", [APT[0], f"{APT[1]} {' '.join(lane.packages)}"]) if lane.packages else "",
            CHECKOUT,
            SETUP_PYTHON if lane.is_hosted else "",
            _run("setup", [*trusted, *lane.setup]),
            _run("install", [*source, *_install(lane, version, root)]),
            _run("run", [*source, run]),
            _run("lint", LINT, "!cancelled()") if is_first and HOST in lane.capabilities else "",
            _upload(
                f"record-{lane.name}" if is_first else f"again-{_id(lane, version)}", f"build/lanes/{lane.name}.json"
            ),
        )
    )


LINT = (".venv/bin/ruff format --check .", ".venv/bin/ruff check .", ".venv/bin/pyright")


def _run(name: str, lines: Sequence[str], condition: str = "") -> str:
    """Return one bash step; empty if it has no lines."""
    own = [f"        if: ${{{{ {condition} }}}}"] if condition else []
    body = ["        run: |", *(f"          {line}" for line in lines)]
    return "\n".join([f"      - name: {name}", *own, *body, ""]) if lines else ""


def _install(lane: Lane, version: str, root: Path) -> list[str]:
    """Return the commands that install a lane's Python packages. A lane with its own environment
    makes it when it runs, and gets only pytest here."""
    made = f"python3 -m venv {'--system-site-packages ' if lane.vendor_torch else ''}.venv"
    if lane.environment:
        return [made, f"{VENV} -m pip install --quiet -c constraints.txt pytest"]
    return [made, " ".join([f"{VENV} tools/install_devices.py --extra test", *_wanted(lane, version, root)])]


def _wanted(lane: Lane, version: str, root: Path) -> list[str]:
    """Return the installer's options: all packages on the host's lane and on simulated lanes, the
    device's package on others. Raises LaneError if the simulator does not support the torch."""
    fits = _simulator_takes(version, root)
    if lane.simulator and not fits:
        raise LaneError(
            f"lane {lane.name} requests torch {version}, which the simulator does not support; name another"
        )
    everything = lane.simulator or HOST in lane.capabilities
    words = ["--all"] if everything else [f"--device {lane.device}"]
    words += [] if lane.needs_hardware else ["--processor"]
    words += ["--without-simulator"] if everything and not fits else []
    return [*words, f"--torch {version}"] if version else words


def _simulator_takes(version: str, root: Path) -> bool:
    """Return whether the simulator's requirements allow a torch version."""
    from packaging.requirements import Requirement

    path = root / "simulator" / "pyproject.toml"
    declared = tomllib.loads(path.read_text())["project"]["dependencies"] if path.is_file() else ()
    wanted = [Requirement(text) for text in declared]
    return not version or all(version in each.specifier for each in wanted if each.name == "torch")


def _upload(name: str, path: str) -> str:
    lines = ("- uses: actions/upload-artifact@v6", "  if: ${{ !cancelled() }}", "  with:", f"    name: {name}")
    return "\n".join(f"      {line}" for line in (*lines, f"    path: {path}", "    if-no-files-found: error")) + "\n"


def _joining(needs: Sequence[str]) -> str:
    """Return the job that joins all records of a run and fails if a test ran on no lane."""
    lines = [f"    needs: {json.dumps(list(needs))}"]
    lines += ["    if: ${{ !cancelled() && inputs.lane == '' && inputs.tests == '' }}", f"    runs-on: [{UBUNTU}]"]
    download = "      - uses: actions/download-artifact@v7\n        with: {pattern: record-*, path: records}\n"
    install = ["python3 -m venv .venv", f"{VENV} -m pip install --quiet -c constraints.txt pytest"]
    steps = (_run("install", install), _run("join", [f"{VENV} -m ci table --records records"]))
    last = _upload("table", "build/lanes/table.md")
    head = "\n".join(
        ["  table:", "    name: every test ran somewhere", *lines, "    timeout-minutes: 15", "    steps:", ""]
    )
    return head + "".join((CHECKOUT, SETUP_PYTHON, download, *steps, last))


def generated(root: Path = ROOT) -> dict[str, str]:
    """Read the stored workflows that this module wrote, by file name: those with its header."""
    found = {path.name: path.read_text() for path in (root / FOLDER).glob("*.yml")}
    return {name: text for name, text in found.items() if text.startswith(HEADER)}


def differences(root: Path = ROOT) -> list[str]:
    """Return the names of generated files that are missing, outdated or superfluous."""
    wanted, stored = texts(lanes(root), root), generated(root)
    return sorted(name for name in wanted.keys() | stored.keys() if wanted.get(name) != stored.get(name))


def main(write: bool) -> int:
    """With `write`, write the files. Print the files that differ; returns 1 if any does."""
    if write:
        (ROOT / FOLDER).mkdir(parents=True, exist_ok=True)
        for name in generated():
            (ROOT / FOLDER / name).unlink()
        for name, text in texts(lanes()).items():
            (ROOT / FOLDER / name).write_text(text)
    different = differences()
    for name in different:
        print(f"{FOLDER / name} differs from the lanes; python -m ci workflows --write")
    return 1 if different else 0
