"""Shared parts of tokenizer conversions: optional libraries, probe texts, and errors."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglcore.core.errors import ConfigError

EXTRA = "pip install 'sglcore[slow-tokenizers]', or save a tokenizer.json next to the weights"
PROBES = (
    "once upon a time, there was a kind boy.",
    "it's 12345 o'clock; we'll see: 3.14159",
    "two  spaces and an end",
    "\u4f60\u597d, \u043c\u0438\u0440! \U0001f600\u200a.",
    "def f(x):\n    return x**2  # {}",
)
"""Texts that a converted tokenizer must split as its file's own library does. They do not have what
transformers treats by the tokenizer's class: a leading space, capital letters, accents."""


def library(name: str, file: Path, remedy: str = EXTRA) -> Any:
    """Import and return the module `name`, which reading `file` needs. Raises ConfigError with what
    to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        found = f"{file.parent} has no tokenizer.json, and {file.name} needs {name.removeprefix('google.')}"
        raise ConfigError(f"{found}: {error}", remedy=remedy) from None


def unreadable(file: Path, error: Exception) -> ConfigError:
    """Return the ConfigError for a file that could not be converted because of `error`."""
    reason = " ".join(str(error).split())
    return ConfigError(
        f"transformers cannot convert {file}: {type(error).__name__}: {reason:.400}",
        remedy="download it again, or save a tokenizer.json next to the weights",
    )


def cut_otherwise(
    file: Path, text: str, given: Sequence[str | int], wanted: Sequence[str | int], by: str
) -> ConfigError:
    """Return the ConfigError for a converted tokenizer that splits `text` into `given`, where the
    library `by` splits it into `wanted`."""
    return ConfigError(
        f"transformers' conversion of {file} cuts {text!r} into {', '.join(map(repr, given))}",
        wanted=f"{', '.join(map(repr, wanted))}, as by {by}",
        remedy="save a tokenizer.json next to the weights, or name the model's own tokenizer_class "
        "in tokenizer_config.json",
    )
