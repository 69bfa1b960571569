"""Loads a model from a checkpoint folder: compares the files' tensors with those that the model
takes, raises an error for every difference, then reads the weights one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from sglcore.checkpoint.checkpoint_files import HARMLESS, checkpoint_files
from sglcore.checkpoint.model_config import EMPTY, ModelConfig
from sglcore.checkpoint.safetensors_header import Entry, damaged, read_entries
from sglcore.core.errors import CheckpointError, ConfigError
from sglcore.models import layer_kinds as models
from sglcore.models.architecture_registry import model_class
from sglcore.models.layer_kinds import Architecture
from sglcore_mlx.attention.blocks import block_states, keep_last
from sglcore_mlx.forward_batch import Advance, ForwardBatch
from sglcore_mlx.layers.build import Build
from sglcore_mlx.layers.linear import LinearParts
from sglcore_mlx.layers.quantization import read_quantization
from sglcore_mlx.layers.weights import Weights
from sglcore_mlx.models.contract import SlicedModel

MAPPED = ("F32", "F16", "BF16", "U32", "U8", "I64", "I32", "I16", "I8", "U16", "BOOL")
"""The element types that MLX maps."""

TIED_HEAD = r"lm_head\.(weight|scales|biases)"


class LoadedModel:
    """A loaded architecture; implements `models.contract.Model`. Its attributes are those of the
    contract; `classify` and `logits` are the architecture's."""

    def __init__(self, architecture: Architecture, weights: Weights) -> None:
        self.architecture: Any = architecture
        self.config = architecture.config
        self.dtype = weights.dtype
        self.layers = architecture.attention_layers
        of_blocks = block_states(self.layers)
        self.states = (*(layer.kept for layer in architecture.state_layers), *of_blocks)
        own: list[Advance] = [layer.advance for layer in architecture.state_layers]
        self.advances = (*own, *([keep_last] * len(of_blocks)))
        self.num_bytes = weights.num_bytes
        self.quantization = weights.forms
        self.logits = architecture.logits
        self.classify = architecture.classify
        self.with_norm_inputs = architecture.with_norm_inputs

    def __call__(self, batch: ForwardBatch) -> mx.array:
        """Return hidden states [T, H] after the last norm. Lazy."""
        return self.architecture(batch)

    @property
    def against_norm_inputs(self) -> str:
        """Why `with_norm_inputs` raises; empty if it does not."""
        return self.architecture.against_norm_inputs

    @property
    def sliced_layers(self) -> int:
        """The number of layers if a forward can run in slices of layers; 0: only whole."""
        return self.architecture.sliced_layers

    @property
    def sliced(self) -> SlicedModel:
        """The model as one that runs slices of layers; to be used only if `sliced_layers` is not 0,
        which is not checked."""
        return self.architecture


def load_model(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: mx.Dtype,
    max_positions: int,
    parts: LinearParts,
    progress: Callable[[int, int], None],
    architectures: Mapping[str, str] = EMPTY,
    check: Callable[[Architecture], None] = lambda model: None,
    given: Mapping[str, Any] = EMPTY,
    make: Callable[..., Build] = Build,
) -> LoadedModel:
    """Load the model of a checkpoint folder in `dtype`, for positions below `max_positions`; waits
    until every weight is read.

    `progress` is called with the bytes of weights read so far and of all; `architectures` adds to
    the registry; `check` is called with the model before weights are read; `given`: layers of
    another model that replace this model's own, by name; `make` makes the `Build`. Peak memory is
    that of the weights plus the largest one. Raises `CheckpointError` for files that are missing,
    damaged, or of another model, `ConfigError` for an unsupported model or quantisation.
    """
    model_type = model_class(config.architecture, architectures)
    own_name = model_type.naming(config)
    quantization = read_quantization(config.raw, own_name)
    entries, arrays = _tensors(checkpoint_files(folder), own_name)
    weights = Weights(entries, arrays, dtype, quantization)
    arrays.clear()  # a second reference would keep a tensor in memory after it is read
    # `Build` refuses unsupported kinds of layers by name when a model asks for them.
    model = model_type(cast("models.Build", make(config, weights, parts, max_positions, given=given)))
    if config.is_encoder and model.state_layers:
        raise ConfigError(
            f"{config.architecture} keeps recurrent states, and an embedding runs without them",
            remedy="use another model",
        )
    check(model)
    weights.check(re.compile("|".join(f"(?:{pattern})" for pattern in _harmless(model))).fullmatch)
    weights.read(progress)
    return LoadedModel(model, weights)


def _harmless(model: Architecture) -> tuple[str, ...]:
    is_tied = model.config.tie_word_embeddings or model.config.is_encoder
    return (*HARMLESS, *model.ignored, *((TIED_HEAD,) if is_tied else ()))


def _tensors(files: tuple[Path, ...], own_name: Callable[[str], str]) -> tuple[dict[str, Entry], dict[str, mx.array]]:
    """Return the tensors of all files, headers and lazy arrays, each by the model's names
    (`own_name` maps the checkpoint's). Raises `CheckpointError` for a tensor that is in two files,
    and as `_map` does."""
    entries: dict[str, Entry] = {}
    arrays: dict[str, mx.array] = {}
    for file in files:
        found = read_entries(file)
        mapped = _map(file, found)
        for entry in found:
            name = own_name(entry.name)
            if name in entries:
                raise CheckpointError(
                    f"{entry.name!r} is in both {entries[name].file.name} and {file.name}",
                    wanted="each tensor in one file",
                    remedy="download the checkpoint again",
                )
            entries[name], arrays[name] = entry, mapped[entry.name]
    return entries, arrays


def _map(file: Path, entries: Iterable[Entry]) -> dict[str, mx.array]:
    """Return the tensors of a file as lazy arrays by the file's names, without reading them. Raises
    `CheckpointError` for an element type that MLX does not map, or a damaged file."""
    for entry in entries:
        if entry.dtype not in MAPPED:
            raise CheckpointError(
                f"{entry.name!r} in {file.name} has the type {entry.dtype}",
                wanted=f"one of {', '.join(MAPPED)}",
                remedy="use a version of this model in float32, bfloat16, float16 or a quantisation of mlx_lm.convert",
            )
    try:
        arrays = mx.load(str(file), format="safetensors")
    except (RuntimeError, ValueError) as error:
        raise damaged(file, str(error).splitlines()[0]) from None
    assert isinstance(arrays, dict)
    return arrays
