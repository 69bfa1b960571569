"""Reads a checkpoint's weights into a model: single file or shards, each tensor straight to its place.

The model says which tensors it wants and where they go; the files say what there is; every difference is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from sglcore.checkpoint.config import EMPTY, ModelConfig
from sglcore.checkpoint.files import HARMLESS, checkpoint_files
from sglcore.device.errors import CheckpointError
from sglcore.layers.build import Build, Model, Weights
from sglcore.models.registry import model_class
from sglcore.models.safetensors_file import DTYPES, Entry, SafetensorsFile
from sglcore.runtime.kernels.table import KernelTable

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes read so far and in all."""


@dataclass(frozen=True, slots=True)
class _Match:
    """A tensor of a file and its place in the model."""

    file: SafetensorsFile
    entry: Entry
    target: Tensor


def load_model(
    path: str | Path,
    config: ModelConfig,
    *,
    kernels: KernelTable,
    device: torch.device | str,
    dtype: torch.dtype,
    max_positions: int | None = None,
    architectures: Mapping[str, str] = EMPTY,
    progress: Progress | None = None,
) -> Model:
    """Build the model on `device` in `dtype` and fill it from the checkpoint folder.

    `max_positions` sizes position tables (default: the model's context length); `architectures` adds to the registry.
    Raises `CheckpointError` for files that are missing, damaged, or not this model's, `ConfigError` for a model that is
    not supported. Host memory beyond the weights stays under a few pieces of 8 MiB, and one weight while it is packed.
    """
    model_type = model_class(config.architecture, architectures)
    weights = Weights(dtype, torch.device(device))
    model = model_type(Build(config, kernels, weights, max_positions or config.context_length))
    harmless = (*HARMLESS, *model_type.ignored, *((r"lm_head\.weight",) if config.tie_word_embeddings else ()))
    with ExitStack() as stack, torch.no_grad():
        opened = [stack.enter_context(closing(SafetensorsFile(file))) for file in checkpoint_files(Path(path))]
        # The matches hold the plain weights: none may outlive the reading, or packing would need room for both.
        _copy(_match(opened, weights.targets, model_type.stripped, harmless), progress)
    weights.targets.clear()
    weights.pack(kernels)
    return model


def _match(
    files: Sequence[SafetensorsFile], targets: Mapping[str, Tensor], stripped: str, harmless: Iterable[str]
) -> list[_Match]:
    """Give every wanted tensor its entry; raises `CheckpointError` for missing, unknown and misshapen ones."""
    matches: dict[str, _Match] = {}
    unknown: list[str] = []
    is_harmless = re.compile("|".join(f"(?:{pattern})" for pattern in harmless)).fullmatch
    for file in files:
        for entry in file.entries:
            name = entry.name.removeprefix(stripped)
            if name in matches:
                raise CheckpointError(
                    f"{entry.name!r} is in both {matches[name].file.path.name} and {file.path.name}",
                    wanted="it once",
                    remedy="download the checkpoint again",
                )
            if name in targets:
                matches[name] = _checked(file, entry, targets[name])
            elif not is_harmless(name):
                unknown.append(entry.name)
    missing = [name for name in targets if name not in matches]
    if missing:
        where = ", ".join(file.path.name for file in files)
        raise CheckpointError(
            f"{_some(missing)} not in the checkpoint ({where})", remedy="check config.json, or download it again"
        )
    if unknown:
        raise CheckpointError(
            f"the checkpoint has {_some(unknown)}, which this architecture does not use",
            remedy="check that config.json belongs to these weights",
        )
    return list(matches.values())


def _checked(file: SafetensorsFile, entry: Entry, target: Tensor) -> _Match:
    if entry.dtype not in DTYPES:
        raise CheckpointError(
            f"{entry.name!r} in {file.path.name} has the type {entry.dtype}",
            wanted=f"one of {', '.join(DTYPES)}",
            remedy="use the unquantised version of this model",
        )
    if entry.shape != tuple(target.shape):
        raise CheckpointError(
            f"{entry.name!r} in {file.path.name} has the shape {list(entry.shape)}",
            wanted=f"{list(target.shape)} as config.json implies",
            remedy="check that config.json belongs to these weights",
        )
    return _Match(file, entry, target)


def _copy(matches: Sequence[_Match], progress: Progress | None) -> None:
    total = sum(match.entry.end - match.entry.start for match in matches)
    done = 0

    def report(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    for match in matches:
        match.file.copy(match.entry, match.target, report)


def _some(names: Sequence[str], shown: int = 8) -> str:
    listed = ", ".join(repr(name) for name in names[:shown])
    return listed if len(names) <= shown else f"{listed} and {len(names) - shown} more"
