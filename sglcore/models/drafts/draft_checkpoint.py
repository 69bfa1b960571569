"""How each kind of draft is recognised and configured from a checkpoint's tensors, and the errors
of drafts that do not fit the target.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.core.errors import ConfigError
from sglcore.device.package import Ref
from sglcore.models.layer_kinds import Architecture

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of a checkpoint's tensors, by name."""
LIBRARY_KIND = "speculators_model_type"
"""A key that only configurations by the library speculators have."""
OTHER = "use a draft that was made for this model"
EMBEDDING, HEAD = "embedding", "output layer"
"""The target's parts that a draft may use."""
SHARED: Mapping[str, str] = MappingProxyType({"model.embed_tokens": EMBEDDING, "lm_head": HEAD})
"""Both parts, by the draft's module names for them."""


def shares_both(shapes: Shapes) -> Mapping[str, str]:
    """Return `SHARED`: the draft uses both of the target's parts, whatever its own tensors are."""
    return SHARED


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """How to recognise drafts of one kind by their tensor names, and the class and configuration to
    load them with.
    """

    model: Ref
    """The class of the draft model."""
    is_in: Callable[[Collection[str]], bool]
    """Whether tensors of these names are a draft of this kind. True for one kind at most."""
    words: Callable[[ModelConfig, Shapes, Architecture], dict[str, Any]]
    """Returns further entries for the configuration's `words`, which the class reads. Raises
    ConfigError for a draft that does not fit the target."""
    shared: Callable[[Shapes], Mapping[str, str]] = shares_both
    """From the shapes of the draft's tensors, the target's parts that the draft uses: the draft's
    name of each, and EMBEDDING or HEAD."""
    has_own_width: bool = False
    """Its hidden size may differ from the target's, although it uses the target's embedding."""


def same(folder: Path, name: str, found: int, wanted: int) -> None:
    """Raise ConfigError unless `found`, the value `name` of a draft's configuration, is the
    target's value `wanted`.
    """
    if found != wanted:
        unfit(folder, name, found, f"{wanted}, the model's")


def lacking(folder: Path, name: str, found: object, tensor: str, otherwise: str) -> NoReturn:
    """Raise ConfigError: the value `found` of `name` in the configuration needs a tensor that the
    files do not have. `otherwise` is a value that does not need it, for the error.
    """
    raise ConfigError(
        f"{folder / 'config.json'} has {name} = {found}, and its files have no {tensor}",
        wanted=f"{tensor}, or {otherwise}",
        remedy="download the checkpoint again",
    )


def unfit(folder: Path, name: str, found: object, wanted: str) -> NoReturn:
    """Raise ConfigError: a value of the configuration does not fit the target. `found` is the value
    of `name`, `wanted` a text that says what would fit.
    """
    raise ConfigError(f"{folder / 'config.json'} has {name} = {found}", wanted=wanted, remedy=OTHER)
