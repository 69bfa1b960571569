"""Reads where pip looks for packages, and asks whether an index has a needed file. It installs
nothing."""

from __future__ import annotations

import ast
import platform
import re
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

PUBLIC = "https://pypi.org/simple"
SECONDS = 5.0
"""Time limit for the answer of an index."""
PAGE = 16 << 20
"""The most bytes of a page that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The platform that wheels must fit: `system` and `machine` as in `platform`, `python` as in
    wheel names."""

    system: str
    machine: str
    python: str

    def fits(self, wheel: str) -> bool:
        """Return whether a wheel is for this interpreter, system and architecture, by its file
        name."""
        tags = wheel.removesuffix(".whl").split("-")[-3:]
        if len(tags) < 3 or self.python not in tags[0].split("."):
            return False
        kind = {"Linux": "linux", "Darwin": "macosx", "Windows": "win"}.get(self.system, self.system)
        return kind in tags[2] and "musl" not in tags[2] and tags[2].endswith(self.machine.lower())


def this_machine() -> Machine:
    """Return the platform of this interpreter."""
    return Machine(
        system=platform.system(), machine=platform.machine(), python=f"cp{sys.version_info[0]}{sys.version_info[1]}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """pip's configuration."""

    index: str = PUBLIC
    folders: tuple[Path, ...] = ()
    """Folders of wheels that pip looks into."""
    proxy: str = ""
    cert: str = ""
    """A file of certificates that replaces the system's."""

    def local(self, name: str, machine: Machine) -> Path | None:
        """Return the folder that has a wheel of this name and version, such as torch-2.13.0+cpu;
        None if none has."""
        for folder in self.folders:
            if any(machine.fits(path.name) for path in folder.glob(f"{name}-*.whl")):
                return folder
        return None


def configured(python: str = sys.executable) -> Sources:
    """Read the configuration with `pip config list`, which includes files and environment
    variables. Waits about half a second."""
    command = (python, "-m", "pip", "config", "list", "--disable-pip-version-check")
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return from_listing(ran.stdout)


def from_listing(text: str) -> Sources:
    """Parse the output of `pip config list`. For a setting with one value, an environment variable
    overrides a file."""
    found: dict[str, list[str]] = {}
    for line in sorted(text.splitlines(), key=lambda line: not line.startswith(":env:")):
        key, _, value = line.partition("=")
        if value.startswith(("'", '"')):
            found.setdefault(key.rpartition(".")[2], []).append(ast.literal_eval(value).strip())
    places = {_folder(word) for value in found.get("find-links", ()) for word in value.split()}
    first = {name: values[0] for name, values in found.items()}
    return Sources(
        index=first.get("index-url", PUBLIC),
        folders=tuple(sorted(place for place in places if place is not None and place.is_dir())),
        proxy=first.get("proxy", ""),
        cert=first.get("cert", ""),
    )


def _folder(word: str) -> Path | None:
    if word.startswith("file:"):
        return Path(unquote(urlsplit(word).path))
    return None if "://" in word else Path(word)


def page(address: str, sources: Sources, seconds: float = SECONDS) -> str:
    """Fetch a page. Waits; raises OSError (TimeoutError after `seconds`)."""
    answers: list[str | Exception] = []

    def ask() -> None:
        try:
            answers.append(_read(address, sources, seconds))
        except Exception as error:
            answers.append(error)

    # Resolving a name can take longer than a socket's timeout, so another thread does it.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    if isinstance(answers[0], OSError):
        raise answers[0]
    if isinstance(answers[0], Exception):
        raise OSError(str(answers[0]) or type(answers[0]).__name__)
    return answers[0]


def _read(address: str, sources: Sources, seconds: float) -> str:
    context = ssl.create_default_context(cafile=sources.cert or None)
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    if sources.proxy:
        handlers.append(urllib.request.ProxyHandler({"http": sources.proxy, "https": sources.proxy}))
    asked = urllib.request.Request(address, headers={"Accept": "text/html", "User-Agent": "sglcore-installer"})
    end, parts = time.monotonic() + seconds, [b""]
    with urllib.request.build_opener(*handlers).open(asked, timeout=seconds) as answer:
        while parts[-1] or len(parts) == 1:
            if time.monotonic() > end or sum(map(len, parts)) > PAGE:
                raise TimeoutError(f"no end of its answer within {seconds:g} s")
            parts.append(answer.read(1 << 18))
    return b"".join(parts).decode(errors="replace")


def wheels(text: str, project: str) -> list[str]:
    """Return the names of a project's wheels on an index page."""
    found = re.findall(rf"{project}-[^\s\"'<>#/?]+\.whl", text)
    return sorted({unquote(name) for name in found})


Asker = Callable[[str, str, Machine], str]
"""(index, version of torch, machine): why the index does not provide it; "" if it does."""


def asker(sources: Sources) -> Asker:
    """Return an asker that uses the network."""

    def ask(index: str, version: str, machine: Machine) -> str:
        try:
            text = page(f"{index.rstrip('/')}/torch/", sources)
        except OSError as error:
            return f"does not answer ({reason(error)})"
        return lacks(wheels(text, "torch"), version, machine)

    return ask


def lacks(found: Sequence[str], version: str, machine: Machine) -> str:
    """Return why none of these wheels fits; "" if one does."""
    if not found:
        return "answers with a page that is no package index: a proxy or a login page stands between"
    if any(name.startswith(f"torch-{version}-") and machine.fits(name) for name in found):
        return ""
    return f"has no torch {version} for {machine.python} on {machine.system} {machine.machine}"


def reason(error: OSError) -> str:
    """Describe a network failure in a few words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP status {error.code}"
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(inner).partition("] ")[2] or str(inner) or type(inner).__name__
