"""Runs modules of transformers' classes that make cosines and sines from positions: finds how the
results are doubled, and checks that each depends on its own position only."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedConfig

from sglcore.core.errors import ConfigError
from sglcore.models.transformers_backend.rotary_convention import WAYS, Doubling

_PROBED = (0, 1, 2, 5, 63, 64, 255, 256, 1023, 4096, 32768)
"""Positions for which angles are computed together and alone."""


def check_angles(own: nn.Module, call: tuple[Any, Any], count: int) -> None:
    """Raise `ConfigError` for a module that gives a position other angles in the presence of other
    positions: a step has the positions of several requests. `call` has the positional and the named
    arguments of a recorded call.

    Compares the module's angles for some positions below `count`: all in order, all in reverse
    order, the lower half alone, and the last one alone.
    """
    places = torch.tensor(sorted({*(each for each in _PROBED if each < count), count // 2, count - 1}))
    asked_of, near = copied(own).cpu(), len(places) // 2
    wanted = angles_of(asked_of, call, places)
    for asked in (torch.arange(len(places) - 1, -1, -1), torch.arange(near), torch.tensor([len(places) - 1])):
        for found, angles in zip(angles_of(asked_of, call, places[asked]), wanted, strict=True):
            if found.shape != angles[asked].shape or not torch.allclose(found, angles[asked], rtol=0, atol=1e-4):
                raise ConfigError(
                    f"{type(own).__name__} gives a position other angles if the other positions differ, up to "
                    f"{count - 1}",
                    wanted="angles that depend on the position alone, because a step has positions of several requests",
                    remedy="use a model that sglcore implements (docs/models.md)",
                )


def angles_of(own: nn.Module, call: tuple[Any, Any], positions: Tensor) -> list[Tensor]:
    """Return [cosines, sines], float32 [T, R] each, that a module on the host makes for positions
    int [T]; `call` has the other arguments, positional and named."""
    places = positions[None]
    args, named = tree_map_only(Tensor, lambda each: torch.zeros(1) if each.is_floating_point() else places, call)
    return [part[0].float() for part in own(*args, **named)]


def halves_of(angles: Tensor, doubling: Doubling) -> tuple[Tensor, Tensor]:
    """Split angles [T, R] into the two [T, R / 2] that are equal if they are doubled this way; for
    "none", both are `angles`."""
    if doubling == "none":
        return angles, angles
    if doubling == "neighbours":
        return angles[:, ::2], angles[:, 1::2]
    half = angles.shape[1] // 2
    return angles[:, :half], angles[:, half:]


def copied(own: nn.Module, replaced: Mapping[int, Any] = MappingProxyType({})) -> nn.Module:
    """Return a deep copy, with `replaced` objects by the ids of the original ones. The
    configuration is shared, not copied."""
    kept = {id(each): each for each in vars(own).values() if isinstance(each, PreTrainedConfig)}
    return deepcopy(own, {**kept, **replaced})


def doubling_of(own: nn.Module, call: tuple[Any, Any]) -> Doubling:
    """Return how a module on the meta device doubles its angles: the first of `WAYS` that fits its
    angles for five positions, with random frequencies; "halves" if the module does not run.

    Several ways fit if all these angles are equal, and "none" fits always; `halves` and
    `neighbours` are checked again for every position when the table is made from the true
    frequencies.
    """
    generator = torch.Generator().manual_seed(0)
    with_values: dict[int, Any] = {id(each): torch.rand(each.shape, generator=generator) for each in own.buffers()}
    try:
        angles = angles_of(copied(own, with_values), call, torch.arange(5))
    except (RuntimeError, NotImplementedError, TypeError):
        return "halves"
    found: list[Doubling] = [way for way in WAYS if all(torch.equal(*halves_of(part, way)) for part in angles)]
    return found[0]
