"""Tries the wheels as a user would: installs them into an empty environment outside of the
checkout, without a compiler, and uses them.

It tries text generation with the embedded model and native kernels, a server with its web page and
a completion, the conformance kit on the CPU, and a new device package. Standard library only, so
that any Python can run it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.wheels.distributions import ReleaseError

SECONDS = 1200.0
"""Time limit of each step, except the download of torch."""
DOWNLOAD_SECONDS = 3600.0
LINKED = re.compile(r'(?:href|src)="([\w./-]+\.(?:css|js))"')
STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
PASSED = ("pip_", "ssl_", "lang", "lc_", "http_proxy", "https_proxy", "no_proxy")
"""Prefixes of environment variables that commands keep: package sources, proxies and language."""
PROMPT = "Once upon a time"


@dataclass(frozen=True, slots=True)
class Place:
    """An environment and an empty work folder. `seconds`: durations of the steps so far."""

    folder: Path
    seconds: dict[str, float]

    @property
    def programs(self) -> Path:
        """The folder of the environment's programs."""
        return self.folder / "venv" / "bin"

    @property
    def work(self) -> Path:
        """The folder in which commands run."""
        return self.folder / "work"

    def environ(self) -> dict[str, str]:
        """Return the variables of commands: a separate home, and only the environment's programs on
        PATH (no compiler, no git); no other variables of the caller except PASSED."""
        passed = {name: value for name, value in os.environ.items() if name.lower().startswith(PASSED)}
        home = {"HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "scratch")}
        return {**passed, **home, "PATH": str(self.programs), "CXX": "no-compiler-here", "COLUMNS": "200"}

    def run(self, step: str, *command: str, limit: float = SECONDS) -> str:
        """Run a command and return both its streams. Waits; raises ReleaseError with the end of its
        output if it fails or exceeds `limit` seconds."""
        began = time.monotonic()
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        try:
            ran = subprocess.run(command, cwd=self.work, env=self.environ(), timeout=limit, check=False, **out)
        except subprocess.TimeoutExpired:
            raise ReleaseError(f"{step}: {' '.join(command)} did not end within {limit:.0f} seconds") from None
        self.seconds[step] = time.monotonic() - began
        if ran.returncode:
            raise ReleaseError(f"{step}: {' '.join(command)} ended with {ran.returncode}:\n{ran.stdout[-4000:]}")
        return ran.stdout

    def sglcore(self, step: str, *words: str) -> str:
        """Run `sglcore WORDS`."""
        return self.run(step, str(self.programs / "sglcore"), *words)


def install(
    dist: Path, folder: Path, python: str, names: Sequence[str], torch: Sequence[str] = (), linked: Path | None = None
) -> Place:
    """Make the environment and install distributions from a folder by name, with extras if given.

    Dependencies are downloaded, torch first with the pip arguments `torch`. If `linked`, a folder
    of packages, is given, they come from there and nothing is downloaded. Waits. Raises
    ReleaseError."""
    place = Place(folder, {})
    for part in ("work", "home", "scratch"):
        (folder / part).mkdir(parents=True)
    own = (
        ["--without-pip"] if linked is not None else []
    )  # pip is linked too; venv's pip would bring its own setuptools
    place.run("environment", python, "-m", "venv", *own, str(folder / "venv"))
    pip = (str(place.programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if linked is not None:
        (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
        (packages / "linked.pth").write_text(f"{linked}\n", encoding="utf-8")
    elif torch:
        place.run("torch", *pip, *torch, limit=DOWNLOAD_SECONDS)
    place.run("wheels", *pip, *(["--no-index"] if linked else []), "--find-links", str(dist), *names)
    return place


def links(packages: Path, folder: Path) -> Path:
    """Make a folder with links to an environment's packages, except this project's."""
    folder.mkdir(parents=True)
    for path in packages.iterdir():
        if not re.match(r"(__editable__|sglcore|_?distutils|.*\.pth$|__pycache__)", path.name):
            (folder / path.name).symlink_to(path)
    return folder


def use(place: Place) -> str:
    """Try everything; returns the generated text. Raises ReleaseError for the first failure."""
    text = generate(place)
    with serving(place) as (url, say):
        began = time.monotonic()
        fetch_page(url)
        ask(url, text)
        say("page and answer", time.monotonic() - began)
    conform(place)
    new_device(place)
    return text


def generate(place: Place) -> str:
    """Complete a prompt with the embedded model, and check that native kernels are used."""
    asked = ("--prompt", PROMPT, "--max-tokens", "12", "--seed", "1", "--verbose")
    said = place.sglcore("generate", "generate", *asked)
    text = next((line.strip() for line in said.splitlines() if line.strip().startswith(PROMPT)), "")
    if len(text) <= len(PROMPT):
        raise ReleaseError(f"generate: found no text that begins with {PROMPT!r} in:\n{said}")
    if not re.search(r"^\s*kernels\s+native, ", said, re.MULTILINE):
        raise ReleaseError(f"generate: wanted native kernels, found:\n{said}")
    return text


@contextmanager
def serving(place: Place) -> Iterator[tuple[str, Callable[[str, float], None]]]:
    """Run a server on a free port during the block. Yields its address and a function that records
    the seconds of a step."""
    began = time.monotonic()
    log = place.work / "serve.txt"
    with log.open("wb") as file:
        command = (str(place.programs / "sglcore"), "serve", "--port", "0", "--quiet")
        server = subprocess.Popen(command, cwd=place.work, env=place.environ(), stdout=subprocess.PIPE, stderr=file)
    assert server.stdout is not None
    try:
        line = server.stdout.readline().decode()
        if not line.startswith("serving "):
            server.kill()
            raise ReleaseError(f"serve: found {line!r}, wanted the address; its output:\n{log.read_text()[-4000:]}")
        place.seconds["serve"] = time.monotonic() - began
        yield line.split()[-1].rstrip("/"), place.seconds.__setitem__
        server.terminate()
        if code := server.wait(60):
            raise ReleaseError(f"serve: it ended with {code}:\n{log.read_text()[-4000:]}")
    finally:
        server.kill()
        server.wait()


def fetch_page(url: str) -> None:
    """Check that the web page has style and scripts, inline or linked, and that none is empty."""
    page = _get(f"{url}/")
    linked = {name: _get(f"{url}/{name}") for name in LINKED.findall(page)}
    styles = STYLE.findall(page) + [text for name, text in linked.items() if name.endswith(".css")]
    scripts = SCRIPT.findall(page) + [text for name, text in linked.items() if name.endswith(".js")]
    if "<title>sglcore</title>" not in page or not styles or not scripts:
        raise ReleaseError(f"serve: found {len(styles)} styles and {len(scripts)} scripts in the page: {page[:400]}")
    if any(len(text) < 100 for text in (*styles, *scripts)):
        raise ReleaseError("serve: a style or a script of the page is empty")


def ask(url: str, text: str) -> None:
    """Check that a completion over HTTP gives the text of the command `generate`."""
    body = {"model": "sglcore-demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "seed": 1}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    found = json.loads(_get(request))["choices"][0]["text"]
    if PROMPT + found != text:
        raise ReleaseError(f"serve: found the completion {found!r}, wanted the text of generate: {text!r}")


def conform(place: Place) -> None:
    """Check that the CPU passes the conformance kit at level C1."""
    told = place.sglcore("conform", "conform", "cpu", "--level", "C1", "--json")
    result, _ = json.JSONDecoder().raw_decode(told, told.index("{\n"))
    if not result["laws"] or result["problems"]:
        raise ReleaseError(f"conform: {told}")


def new_device(place: Place) -> None:
    """Check that `new-device` writes a package from the wheel's templates."""
    place.sglcore("new-device", "new-device", "acme")
    written = {path.relative_to(place.work / "acme").as_posix() for path in (place.work / "acme").rglob("*.*")}
    if (
        not {"pyproject.toml", "README.md", "ci.toml", "sglcore_acme/__init__.py", "sglcore_acme/bring_up.txt"}
        <= written
    ):
        raise ReleaseError(f"new-device: found only {', '.join(sorted(written))}")


def _get(request: str | urllib.request.Request) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        if answer.status != 200:
            raise ReleaseError(f"serve: {answer.url} answered {answer.status}")
        return answer.read().decode()


def clear(folder: Path) -> Path:
    """Make an empty folder for a trial, removing an old one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
