"""The checkpoint's default sampling parameters, from `generation_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sglcore.checkpoint.checkpoint_files import read_json
from sglcore.core.errors import ConfigError

GENERATION = "generation_config.json"
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_sampling(folder: Path) -> Mapping[str, float]:
    """Return the parameters of `NAMES` in the file; empty if there is no such file, as for a GGUF
    file. Raises ConfigError for a value that is no number, and for a damaged file. A null counts as
    missing."""
    file = folder / GENERATION
    values = read_json(file) if file.is_file() else {}
    found = {name: values[name] for name in NAMES if values.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{file} has {name}: {value!r}", wanted="a number", remedy="--generation-config none")
    return found
