"""The files of a checkpoint, the content of its JSON files, and the names of tensors without
content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglcore.core.errors import CheckpointError, ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DRAFT_FOLDER = "draft"
"""The folder of a draft model, in the folder of its target model."""
HARMLESS = (r".*rotary_emb\.inv_freq", r".*position_ids", r".*\.masked_bias")
"""Patterns of tensor names in old checkpoints that no model needs."""


def read_json(file: Path, remedy: str = "") -> dict[str, Any]:
    """Return the object in a JSON file. Raises `ConfigError` if the file does not exist (with
    `remedy`), cannot be read or holds something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {file.name} in {file.parent}", remedy=remedy) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", wanted="JSON", remedy="download it again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds a {type(value).__name__}", wanted="a JSON object", remedy="download it again")
    return value


def read_list(file: Path) -> list[dict[str, Any]]:
    """Return the objects in a file's JSON list. Raises `ConfigError` if the file cannot be read, or
    holds something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", wanted="JSON", remedy="download it again") from None
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ConfigError(f"{file} is not a list of objects", wanted="a JSON array", remedy="download it again")
    return value


def weight_names(folder: Path) -> tuple[str, ...]:
    """Return the names of a checkpoint's safetensors files, sorted, whether or not the files exist:
    those in its index, or `SINGLE` if it has no index. Raises `CheckpointError` if the index is
    damaged."""
    index = folder / INDEX
    if not index.is_file():
        return (SINGLE,)
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a file's name is no text")
        return tuple(sorted(names))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(
            f"{index} is damaged", wanted="JSON with a weight_map", remedy="download it again"
        ) from None


def checkpoint_files(folder: Path) -> tuple[Path, ...]:
    """Return the paths of a checkpoint's safetensors files, in order. Raises `CheckpointError` if
    one is missing or the index is damaged."""
    names = weight_names(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing and not (folder / INDEX).is_file():
        others = ", ".join(sorted(file.name for file in folder.glob("*.bin"))) or "none"
        raise CheckpointError(
            f"{folder} has neither {SINGLE} nor {INDEX} (other weight files: {others})",
            remedy="download the safetensors version of this model",
        )
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)}", wanted=f"the {len(names)} files of {INDEX}", remedy="download them"
        )
    return tuple(folder / name for name in names)
