"""Expands and runs workflows as GitHub does. Supports only what this project's workflows use, and
raises an error for anything else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

SHELL = ("bash", "--noprofile", "--norc", "-eo", "pipefail")
"""The command that `shell: bash` means."""
ACTIONS: Mapping[str, frozenset[str]] = {
    "actions/checkout": frozenset({"fetch-depth"}),
    "actions/setup-python": frozenset({"python-version"}),
    "actions/upload-artifact": frozenset({"name", "path", "if-no-files-found"}),
    "actions/download-artifact": frozenset({"pattern", "path"}),
}
"""The supported actions and their inputs."""
OWN = ("PYTEST", "PYTHON", "LANE_", "SGLCORE_", "TRITON_", "OMP_", "VIRTUAL_ENV")
"""Prefixes of environment variables that belong to this test process; they are removed for a
step."""
EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
TOKEN = re.compile(r"\s*(?:('(?:[^']|'')*')|(==|!=|&&|\|\||!|\(|\))|(cancelled|always)\(\)|([a-zA-Z_][\w.-]*))")
WORDS = {"&&": "and", "||": "or", "!": "not", "(": "(", ")": ")", "==": "==", "!=": "!="}


class WorkflowError(Exception):
    """A workflow that GitHub would refuse or read differently; says where and quotes the text."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step with its expressions replaced."""

    name: str
    run: str
    """Its bash text; "" for an action."""
    uses: str
    """Its action without the version; "" for bash."""
    given: Mapping[str, str]
    """The inputs of the action."""
    env: Mapping[str, str]
    condition: str
    """Its `if`; "" if it has none."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job with its expressions replaced."""

    name: str
    needs: tuple[str, ...]
    runs_on: tuple[str, ...]
    image: str
    condition: str
    steps: tuple[Step, ...]

    def runs(self, context: Context) -> bool:
        """Whether the job would run if none of the jobs it needs had failed."""
        return bool(evaluate(self.condition, context))


@dataclass(frozen=True, slots=True)
class Context:
    """The values that expressions read: the event, the inputs of a manual run, and the repository's
    variables."""

    event: str = "push"
    inputs: Mapping[str, str] = field(default_factory=dict)
    vars: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> str:
        """Return the value of `inputs.X`, `vars.X` or a supported `github.X`; "" for null. Raises
        WorkflowError for other names."""
        space, _, key = name.partition(".")
        github = {"event_name": self.event, "ref": "refs/heads/main"}
        spaces: Mapping[str, Mapping[str, str]] = {"inputs": self.inputs, "vars": self.vars, "github": github}
        if space not in spaces or (space == "github" and key not in github):
            raise WorkflowError(f"the expression {name!r} is none of inputs, vars, {', '.join(github)}")
        return spaces[space].get(key, "")


def evaluate(text: str, context: Context) -> object:
    """Return the value of a condition with or without its braces; true for an empty one."""
    inner = EXPRESSION.fullmatch(text.strip())
    rest, words = (inner[1] if inner else text).strip(), []
    while rest:
        found = TOKEN.match(rest)
        if found is None:
            raise WorkflowError(f"the expression {text!r} has {rest!r}, which is not understood")
        literal, operator, function, name = found.groups()
        value = literal[1:-1].replace("''", "'") if literal else context.get(name) if name else function == "always"
        words.append(WORDS[operator] if operator else repr(value))
        rest = rest[found.end() :].strip()
    return eval(" ".join(words)) if words else True


def expanded(text: str, context: Context) -> str:
    """Return a value with its expressions replaced."""
    return EXPRESSION.sub(lambda found: str(evaluate(found[1], context)), text)


def parsed(text: str) -> dict[str, Any]:
    """Parse a workflow as GitHub does: `on` is a string there, a truth value in YAML."""
    found = yaml.load(text, yaml.CSafeLoader)
    return {"on" if key is True else key: value for key, value in found.items()}


def jobs(text: str, context: Context) -> tuple[Job, ...]:
    """Return every job of a workflow. Raises WorkflowError for a feature that is not supported
    here."""
    workflow = parsed(text)
    shell = workflow.get("defaults", {}).get("run", {}).get("shell")
    if shell != "bash":
        raise WorkflowError(f"the shell is {shell}; wanted defaults.run.shell: bash, which stops at the first failure")
    env = {name: expanded(str(value), context) for name, value in workflow.get("env", {}).items()}
    found = tuple(_job(name, row, env, context) for name, row in workflow["jobs"].items())
    for job in found:
        missing = set(job.needs) - {other.name for other in found}
        if missing:
            raise WorkflowError(f"{job.name} needs {', '.join(sorted(missing))}, and there is no such job")
    return found


JOB = frozenset({"name", "if", "needs", "runs-on", "container", "timeout-minutes", "steps"})
STEP = frozenset({"name", "if", "uses", "with", "run", "env"})


def _job(name: str, row: Mapping[str, Any], env: Mapping[str, str], context: Context) -> Job:
    _refuse(row, JOB, name)
    needs, runs_on, container = row.get("needs", ()), row["runs-on"], row.get("container", {})
    return Job(
        name=name,
        needs=(needs,) if isinstance(needs, str) else tuple(needs),
        runs_on=(runs_on,) if isinstance(runs_on, str) else tuple(runs_on),
        image=container.get("image", ""),
        condition=str(row.get("if", "")),
        steps=tuple(_step(f"{name}, step {at}", step, env, context) for at, step in enumerate(row["steps"], 1)),
    )


def _step(place: str, row: Mapping[str, Any], env: Mapping[str, str], context: Context) -> Step:
    _refuse(row, STEP, place)
    if EXPRESSION.search(row.get("run", "")):
        raise WorkflowError(f"{place} pastes an expression into bash; give it by env")
    action, _, version = row.get("uses", "").partition("@")
    given = {key: expanded(str(value), context) for key, value in row.get("with", {}).items()}
    if action:
        if action not in ACTIONS or not version:
            raise WorkflowError(f"{place} uses {row['uses']}; known with a version: {', '.join(ACTIONS)}")
        _refuse(given, ACTIONS[action], f"{place}, {action}")
    elif not row.get("run", "").strip():
        raise WorkflowError(f"{place} has nothing to run")
    own = {**env, **{key: expanded(str(value), context) for key, value in row.get("env", {}).items()}}
    return Step(row.get("name", action), row.get("run", ""), action, given, own, str(row.get("if", "")))


def _refuse(row: Mapping[str, Any], known: frozenset[str], place: str) -> None:
    unknown = sorted(row.keys() - known)
    if unknown:
        raise WorkflowError(f"{place} has {', '.join(unknown)}; known: {', '.join(sorted(known))}")


@dataclass(slots=True)
class Machine:
    """A runner for one job: its own workspace, and artifacts that all jobs of a run share."""

    folder: Path
    artifacts: Path
    source: Path
    """The repository to check out."""
    kept: tuple[str, ...] = ()
    """Build folders that a machine keeps between its jobs."""
    said: list[str] = field(default_factory=list)
    """The output of each step."""

    def execute(self, job: Job, context: Context) -> int:
        """Run a job's steps in order; returns the exit status of the first that failed. After a
        failure only steps with `always()` or `cancelled()` in their condition run."""
        failed = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        for step in job.steps:
            if failed and "cancelled()" not in step.condition and "always()" not in step.condition:
                continue
            if evaluate(step.condition, context):
                status = self._step(step)
                failed = failed or status
        return failed

    def _step(self, step: Step) -> int:
        if step.run:
            command = (*SHELL, "-c", step.run)
            ran = subprocess.run(
                command, cwd=self.folder, env=self._env(step), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            self.said.append(f"## {step.name}: {ran.returncode}\n{ran.stdout.decode(errors='replace')}")
            return ran.returncode
        status = self._action(step)
        self.said.append(f"## {step.name}: {status}\n")
        return status

    def _action(self, step: Step) -> int:
        if step.uses == "actions/checkout":
            status = subprocess.run(("git", "clone", "--quiet", str(self.source), str(self.folder))).returncode
            for name in (name for name in self.kept if (self.source / name).is_dir()):
                shutil.copytree(self.source / name, self.folder / name)
            return status
        if step.uses == "actions/upload-artifact":
            found, wanted = sorted(self.folder.glob(step.given["path"])), self.artifacts / step.given["name"]
            wanted.mkdir(parents=True, exist_ok=True)
            for path in found:
                shutil.copy(path, wanted)
            return 0 if found or step.given.get("if-no-files-found") != "error" else 1
        if step.uses == "actions/download-artifact":
            for path in sorted(self.artifacts.iterdir()):
                if fnmatchcase(path.name, step.given["pattern"]):
                    shutil.copytree(path, self.folder / step.given["path"] / path.name)
        return 0

    def _env(self, step: Step) -> dict[str, str]:
        """The environment of a step: that of this process without the project's own variables, and
        with a `sudo` if there is none."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
        programs = self.folder.parent / "bin"
        if not programs.exists():
            programs.mkdir()
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            (programs / "python3").symlink_to(Path(sys.base_prefix) / "bin" / version)
            if shutil.which("sudo") is None:
                (programs / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
                (programs / "sudo").chmod(0o755)
        told = programs / "env"
        told.touch()
        told_env = dict(line.split("=", 1) for line in told.read_text().splitlines())
        path = f"{programs}{os.pathsep}{own['PATH']}"
        places = {"PATH": path, "GITHUB_WORKSPACE": str(self.folder), "GITHUB_ENV": str(told)}
        return {**own, **told_env, **step.env, **places, "CI": "true"}
