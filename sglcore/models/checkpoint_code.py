"""Finds the code in a checkpoint's own folder that transformers would run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglcore.core.errors import ConfigError

CAUSAL = "AutoModelForCausalLM"
_READ = ("AutoConfig", CAUSAL)
"""The classes in `auto_map` that a language model needs."""


def brings_code(raw: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` names classes of its own, in `auto_map`."""
    return bool(raw.get("auto_map"))


def code_modules(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the files that define the classes of a language model, for a
    `config.json` that names some (`brings_code`). Raises `ConfigError` if there is no causal class,
    or if a class is in another repository."""
    found = {name: str(raw["auto_map"][name]) for name in _READ if name in raw["auto_map"]}
    if CAUSAL not in found:
        raise ConfigError(
            f"config.json names code of its own for {', '.join(sorted(raw['auto_map']))}",
            wanted=f"a class for {CAUSAL}",
            remedy="use another model",
        )
    for name in found.values():
        if "--" in name:
            raise ConfigError(
                f"config.json names {name!r}, which is code of another repository",
                wanted="files in the checkpoint's folder",
                remedy=f"put the file there, and write {name.partition('--')[2]!r}",
            )
    return tuple(dict.fromkeys(f"{name.rpartition('.')[0]}.py" for name in found.values()))


def code_files(folder: Path, raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the files of `code_modules` and the files in the folder that they import, as paths
    relative to `folder`. Raises `ConfigError` for a missing file, and the errors of `code_modules`.
    Needs transformers."""
    from transformers.dynamic_module_utils import get_relative_import_files

    try:
        modules = [folder / name for name in code_modules(raw)]
        found = dict.fromkeys([*modules, *(Path(each) for one in modules for each in get_relative_import_files(one))])
    except OSError as error:
        raise ConfigError(
            f"{error.filename} is not there, and config.json names it", remedy="download the model again"
        ) from error
    return tuple(str(each.relative_to(folder)) for each in found)
