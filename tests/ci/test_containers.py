"""Container files, the compose file and the manifests of docs/kubernetes.md agree with the server:
its probes, port, settings and drain time. Linters and schemas check their syntax
(tests/ci/test_jobs.py)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from fastapi import APIRouter
from jsonschema import validators

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.serving.apis.server.probes import add_routes
from sglcore.serving.http.middleware.keys import OPEN
from sglcore.serving.replicas.metrics.health import Health

ROOT = Path(__file__).resolve().parents[2]
FILES = {path.name.partition(".")[0]: path.read_text() for path in sorted((ROOT / "containers").glob("*.Dockerfile"))}
COMPOSE = (ROOT / "containers" / "compose.yaml").read_text()
PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
SETTINGS = {f"SGLCORE_{each.name.upper()}" for record in (EngineConfig, ServerConfig) for each in fields(record)}
DRAIN = ServerConfig().drain_timeout
LAST_WORDS = 10
"""Seconds that a server has to close after it has drained."""
SECRET = re.compile("token|key|secret|password", re.IGNORECASE)


@cache
def probes() -> frozenset[str]:
    """Return the paths that the server answers before the model is loaded, without an API key."""
    router = APIRouter()
    add_routes(router, SimpleNamespace(health=Health()))  # pyright: ignore[reportArgumentType]
    return frozenset(str(route.path) for route in router.routes if route.path in OPEN)  # pyright: ignore[reportAttributeAccessIssue]


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield a container file's instructions and their arguments, with continued lines joined."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n", "\n", lines).replace("\n ", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word:
            yield word, rest.strip()


def stages(text: str) -> list[list[tuple[str, str]]]:
    """Split a container file into stages; each begins with FROM."""
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions(text):
        if word == "FROM":
            found.append([])
        found[-1].append((word, rest))
    return found


def said_of_file(device: str, text: str) -> list[str]:
    """Return what is wrong with a container file."""
    found = stages(text)
    first, last = found[0], found[-1]
    given: Mapping[str, str] = dict(last)
    env = {name: value for name, _, value in (part.partition("=") for part in given.get("ENV", "").split())}
    said = [] if len(found) > 1 else ["one stage: what builds it would be in it"]
    bases = [rest.split()[0] for stage in found for word, rest in stage if word == "FROM"]
    said += [f"{base} names no version" for base in bases if not re.search(r":[\w.-]*\d+\.\d+", base)]
    said += [] if re.fullmatch("[1-9][0-9]*", given.get("USER", "")) else [f"it runs as {given.get('USER') or 'root'}"]
    path = re.search(r"\}(/\w+)", given.get("HEALTHCHECK", ""))
    said += (
        []
        if path and path[1] in probes()
        else [f"its health is asked at {path and path[1]}, not at {sorted(probes())}"]
    )
    said += [f"{name} is no setting" for name in env if name.startswith("SGLCORE_") and name not in SETTINGS]
    said += [f"{name} is a secret in an image" for name in env if SECRET.search(name)]
    said += [] if given.get("EXPOSE") == env.get("SGLCORE_PORT") else ["it exposes another port than it serves"]
    install = next((rest for word, rest in first if word == "RUN" and "install_devices.py" in rest), "")
    said += [] if install.endswith(f" tools/install_devices.py --device {device}") else [f"it installs by {install!r}"]
    said += [
        f"{rest.split()[0]} copies nothing" for stage in found for word, rest in stage if not _copies(word, rest, found)
    ]
    runs = [rest for stage in found for word, rest in stage if word == "RUN"]
    return said + [line for line in (_bash(run) for run in runs) if line]


def _copies(word: str, rest: str, found: list[list[tuple[str, str]]]) -> bool:
    """Whether an instruction is not a COPY, or copies from existing files or stages."""
    if word != "COPY":
        return True
    if not rest.startswith("--from="):
        return all((ROOT / source).exists() for source in rest.split()[:-1])
    names = [stage[0][1].partition(" AS ")[2] for stage in found]
    return rest.removeprefix("--from=").split()[0] in names


def _bash(script: str) -> str:
    return subprocess.run(("bash", "-n"), input=script, capture_output=True, text=True).stderr


def test_a_container_file_fits_the_server() -> None:
    assert FILES.keys() == {"cpu", "cuda", "hip", "npu"}
    for device, text in FILES.items():
        assert said_of_file(device, text) == [], device


DEFECTS = (
    (":3.12.12-slim-bookworm AS", ":latest AS", "python:latest names no version"),
    ("USER 10001\n", "", "it runs as root"),
    ("USER 10001\n", "USER root\n", "it runs as root"),
    ("/readyz", "/ready", "its health is asked at /ready, not at"),
    ("/readyz", "/metrics", "its health is asked at /metrics, not at"),
    ("EXPOSE 8000", "EXPOSE 80", "it exposes another port than it serves"),
    ("SGLCORE_HOST", "SGLCORE_LISTEN", "SGLCORE_LISTEN is no setting"),
    ("HF_HOME=", "HF_TOKEN=", "HF_TOKEN is a secret in an image"),
    ("--device cpu\n", "--device hip\n", "it installs by"),
    ("COPY --from=build", "COPY --from=builder", "--from=builder copies nothing"),
    ("COPY . .", "COPY absent .", "absent copies nothing"),
    ("RUN useradd", "RUN (useradd", "syntax error"),
)


@pytest.mark.parametrize(("good", "bad", "said"), DEFECTS, ids=[said for *_, said in DEFECTS])
def test_a_defect_in_a_container_file_is_caught(good: str, bad: str, said: str) -> None:
    assert good in FILES["cpu"]
    assert said in "\n".join(said_of_file("cpu", FILES["cpu"].replace(good, bad)))


def test_a_container_file_of_one_stage_is_caught() -> None:
    first = FILES["cpu"].index("\nFROM", FILES["cpu"].index("FROM"))
    assert "one stage: what builds it would be in it" in said_of_file("cpu", FILES["cpu"][:first])


def test_what_a_build_reads_is_what_the_packages_and_the_installer_need() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    assert {"pyproject.toml", "constraints.txt", "sglcore", "devices"} <= set(kept)
    assert not {"build", ".git", ".venv", "tests"} & set(kept)


def schema_errors(name: str, value: Any) -> list[str]:
    """Return the errors of a schema that comes with check-jsonschema."""
    schema = get_builtin_schema(name)
    return [error.message for error in validators.validator_for(schema)(schema).iter_errors(value)]


def said_of_compose(text: str) -> list[str]:
    """Return what is wrong with a compose file."""
    value = yaml.load(text, yaml.CSafeLoader)
    said = schema_errors("vendor.compose-spec", value)
    for name, service in value["services"].items():
        port = dict(instructions(FILES[name])).get("EXPOSE")
        said += (
            [] if [str(each).rpartition(":")[2] for each in service["ports"]] == [port] else [f"{name}: another port"]
        )
        said += [] if service["build"]["dockerfile"] == f"containers/{name}.Dockerfile" else [f"{name}: another file"]
        grace = float(str(service.get("stop_grace_period", "10s")).removesuffix("s"))
        said += [] if grace >= DRAIN + LAST_WORDS else [f"{name}: killed after {grace} s; it drains for {DRAIN}"]
        said += [
            f"{name}: {each} is no setting" for each in service["environment"] if each not in {*SETTINGS, "HF_TOKEN"}
        ]
    return said


def test_the_compose_file_fits_the_images() -> None:
    assert said_of_compose(COMPOSE) == []


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ("stop_grace_period: 45s", "stop_grace_period: 30s", "killed after 30.0 s; it drains for 30.0"),
        ("}:8000", "}:80", "another port"),
        ("containers/hip.D", "containers/cuda.D", "hip: another file"),
        ("SGLCORE_API_KEY,", "SGLCORE_KEY=secret,", "SGLCORE_KEY=secret is no setting"),
        ("    image:", "    picture:", "'picture' was unexpected"),
    ],
)
def test_a_defect_in_the_compose_file_is_caught(good: str, bad: str, said: str) -> None:
    assert good in COMPOSE
    assert said in "\n".join(said_of_compose(COMPOSE.replace(good, bad)))


def manifests(page: str) -> list[dict[str, Any]]:
    """Return the manifests in the YAML blocks of a page."""
    return [yaml.load(block, yaml.CSafeLoader) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]


def pods(manifest: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every pod of a manifest, with "serves" for a pod that serves requests and "works" for a
    worker pod."""
    spec = manifest["spec"]
    if manifest["kind"] == "LeaderWorkerSet":
        yield "serves", spec["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
        yield "works", spec["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    elif "template" in spec:
        yield "serves", spec["template"]["spec"]


PROBES = {"startupProbe": "/startupz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}


def said_of_pod(kind: str, pod: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a pod."""
    (container,) = pod["containers"]
    device = container["image"].rpartition(":")[2]
    if device not in FILES:
        return [f"{container['image']} is none of {', '.join(FILES)}"]
    image = dict(stages(FILES[device])[-1])
    security = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
    said = [] if security.get("runAsNonRoot") and str(security.get("runAsUser")) == image["USER"] else ["another user"]
    said += [] if pod.get("enableServiceLinks") is False else ["a Service's variables are taken for settings"]
    sleep = int(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0])[-1])
    grace = pod.get("terminationGracePeriodSeconds", 30)
    said += (
        [] if grace >= sleep + DRAIN + LAST_WORDS else [f"killed after {grace} s; it waits {sleep} and drains {DRAIN}"]
    )
    said += [] if set(container["resources"]) == {"requests", "limits"} else ["no limits"]
    said += [
        f"{each['name']} is no volume"
        for each in container["volumeMounts"]
        if each["name"] not in _names(pod["volumes"])
    ]
    if kind == "works":
        return said + [f"{name} of a pod that serves nothing" for name in PROBES if name in container]
    ports = {each["name"]: str(each["containerPort"]) for each in container["ports"]}
    said += [] if ports.get("http") == image["EXPOSE"] else [f"ports {ports}, and it serves {image['EXPOSE']}"]
    said += [] if sleep else ["it is stopped while requests still come: no preStop"]
    for name, path in PROBES.items():
        asked = container.get(name, {}).get("httpGet", {})
        if asked.get("path") != path or path not in probes() or asked.get("port") not in ports:
            said.append(f"{name} asks {asked}; wanted {path} of a port")
    return said


def _names(rows: list[dict[str, Any]]) -> set[str]:
    return {row["name"] for row in rows}


def said_of_page(page: str) -> list[str]:
    """Return what is wrong with the manifests of a page."""
    found = manifests(page)
    said = [line for each in found for kind, pod in pods(each) for line in said_of_pod(kind, pod)]
    served = [each["spec"]["selector"]["matchLabels"] for each in found if each["kind"] == "Deployment"]
    for service in (each for each in found if each["kind"] == "Service"):
        said += [] if service["spec"]["selector"] in served else ["a Service of no pod"]
    return said


def test_the_manifests_fit_the_server_and_the_images() -> None:
    assert [each["kind"] for each in manifests(PAGE)] == ["Deployment", "Service", "LeaderWorkerSet"]
    assert said_of_page(PAGE) == []


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ("path: /readyz", "path: /ready", "readinessProbe asks {'path': '/ready', 'port': 'http'}; wanted /readyz"),
        ("path: /livez", "path: /readyz", "livenessProbe asks {'path': '/readyz', 'port': 'http'}; wanted /livez"),
        ("path: /startupz, port: http", "path: /startupz, port: web", "startupProbe asks"),
        ("GracePeriodSeconds: 60", "GracePeriodSeconds: 40", "killed after 40 s; it waits 10 and drains 30.0"),
        ('preStop: {exec: {command: [sleep, "10"]}}', 'postStart: {exec: {command: ["true"]}}', "no preStop"),
        ("containerPort: 8000", "containerPort: 80", "ports {'http': '80'}, and it serves 8000"),
        ("enableServiceLinks: false", "enableServiceLinks: true", "a Service's variables are taken for settings"),
        ("runAsUser: 10001", "runAsUser: 0", "another user"),
        ("sglcore:cuda", "sglcore:gpu", "sglcore:gpu is none of cpu, cuda, hip, npu"),
        ("name: shm, mountPath", "name: shared, mountPath", "shared is no volume"),
        ("  selector: {app: sglcore}", "  selector: {app: server}", "a Service of no pod"),
    ],
)
def test_a_defect_in_a_manifest_is_caught(good: str, bad: str, said: str) -> None:
    assert good in PAGE
    assert said in "\n".join(said_of_page(PAGE.replace(good, bad)))


def test_the_page_shows_commands_and_files_that_are_there() -> None:
    named = set(re.findall(r"`?(containers/[\w.]+)", PAGE))
    assert named and all((ROOT / name).is_file() for name in named)
