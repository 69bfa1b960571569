"""The facts that all hosts of one model must have in common, and their differences, reported before
anything is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import sglcore
from sglcore.config.engine_config import EngineConfig, plain_config
from sglcore.device.selection import Choice

OWN = frozenset(
    {"model", "hf_token", "device", "node_rank", "leader", "join_timeout", "threads", "system_root", "sources"}
)
"""Settings that may differ between hosts: where files are, which device, which node."""
DECIDED = ("speculative",)
"""Settings that may be "auto" and that the leader decides once by a measurement. A restarted leader
has decided them already while nodes still have "auto"."""
LIBRARIES = ("torch", "numpy")
"""Libraries that must have the same version on all hosts, if they are installed."""
BLOCK = 64 << 10
"""Bytes at the beginning of each checkpoint file that are compared, in addition to its size."""


def shared_facts(config: EngineConfig, folder: Path, choice: Choice) -> dict[str, Any]:
    """Return the facts of this host that all hosts must have in common, by topic, as plain values:
    versions, settings and the model's files.

    Reads the beginning of each file of the checkpoint.
    """
    chosen = choice.chosen
    settings = {_flag(name): value for name, value in plain_config(config).items() if name not in OWN}
    return {
        "sglcore": sglcore.__version__,
        "the device": f"{chosen.name} ({chosen.distribution} {chosen.version})",
        **{name: _version(name) for name in LIBRARIES},
        **{name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()},
        "the files of the model": files_digest(folder),
    }


def differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return a text for each fact that differs, "NAME is VALUE and VALUE", with the value of `own`
    first; empty if none does. A setting in DECIDED that is "auto" in `other` does not count."""
    names = dict.fromkeys((*own, *other))
    left_open = {_flag(name) for name in DECIDED if other.get(_flag(name)) == "auto"}
    return [
        f"{name} is {own.get(name)} and {other.get(name)}"
        for name in names
        if own.get(name) != other.get(name) and name not in left_open
    ]


def decisions(config: EngineConfig) -> dict[str, Any]:
    """Return the settings in DECIDED, with the values of the leader's configuration."""
    return {name: value for name, value in plain_config(config).items() if name in DECIDED}


def with_decisions(config: EngineConfig, found: Mapping[str, Any]) -> EngineConfig:
    """Return a node's configuration with the leader's `decisions` in place of its own."""
    return replace(config, **{name: found[name] for name in DECIDED})


def files_digest(folder: Path) -> str:
    """Return 12 hexadecimal digits for the names, sizes and first BLOCK bytes of the files in a
    checkpoint folder, or of a GGUF file."""
    found = hashlib.sha256()
    for file in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
        if file.is_file():
            found.update(f"{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as stream:
                found.update(stream.read(BLOCK))
    return found.hexdigest()[:12]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
