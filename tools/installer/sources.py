"""Where pip looks for packages, as it is configured, and whether an index has the file that is
wanted. It installs nothing."""

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
"""How long an index may take to answer before it does not."""
PAGE = 16 << 20
"""Bytes of a page that are read at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What wheels must fit: `system` and `machine` as `platform` names them, `python` as wheels
    do."""

    system: str
    machine: str
    python: str

    def fits(self, wheel: str) -> bool:
        """Whether a wheel is for this interpreter and kind of processor, by its file's name."""
        tags = wheel.removesuffix(".whl").split("-")[-3:]
        if len(tags) < 3 or self.python not in tags[0].split("."):
            return False
        kind = {"Linux": "linux", "Darwin": "macosx", "Windows": "win"}.get(self.system, self.system)
        return kind in tags[2] and "musl" not in tags[2] and tags[2].endswith(self.machine.lower())


def this_machine() -> Machine:
    """The one that runs this."""
    return Machine(
        system=platform.system(), machine=platform.machine(), python=f"cp{sys.version_info[0]}{sys.version_info[1]}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What pip's configuration says."""

    index: str = PUBLIC
    folders: tuple[Path, ...] = ()
    """Folders of wheels that pip looks into."""
    proxy: str = ""
    cert: str = ""
    """A file of certificates, in place of the system's."""

    def local(self, name: str, machine: Machine) -> Path | None:
        """The folder that has a wheel of this name and version, such as torch-2.13.0+cpu."""
        for folder in self.folders:
            if any(machine.fits(path.name) for path in folder.glob(f"{name}-*.whl")):
                return folder
        return None


def configured(python: str = sys.executable) -> Sources:
    """By `pip config list`, which has files and variables; waits half a second."""
    command = (python, "-m", "pip", "config", "list", "--disable-pip-version-check")
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return from_listing(ran.stdout)


def from_listing(text: str) -> Sources:
    """What `pip config list` printed. Of a setting with one value, a variable counts before a
    file."""
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
    """What an address answers; raises OSError, TimeoutError among them, where that is nothing
    within these seconds."""
    answers: list[str | Exception] = []

    def ask() -> None:
        try:
            answers.append(_read(address, sources, seconds))
        except Exception as error:
            answers.append(error)

    # A name that nobody resolves takes longer than any limit of a socket, so another thread waits
    # for it.
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
    """The names of a project's wheels on a page of an index."""
    found = re.findall(rf"{project}-[^\s\"'<>#/?]+\.whl", text)
    return sorted({unquote(name) for name in found})


Asker = Callable[[str, str, Machine], str]
"""Of an index, a version of torch and a machine: why that is not to be had there; "" where it
is."""


def asker(sources: Sources) -> Asker:
    """Asks over the network."""

    def ask(index: str, version: str, machine: Machine) -> str:
        try:
            text = page(f"{index.rstrip('/')}/torch/", sources)
        except OSError as error:
            return f"does not answer ({reason(error)})"
        return lacks(wheels(text, "torch"), version, machine)

    return ask


def lacks(found: Sequence[str], version: str, machine: Machine) -> str:
    """Why none of these wheels will do; "" where one does."""
    if not found:
        return "answers with a page that is no package index: a proxy or a login page stands between"
    if any(name.startswith(f"torch-{version}-") and machine.fits(name) for name in found):
        return ""
    return f"has no torch {version} for {machine.python} on {machine.system} {machine.machine}"


def reason(error: OSError) -> str:
    """A failure of the network in a few words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP status {error.code}"
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(inner).partition("] ")[2] or str(inner) or type(inner).__name__
