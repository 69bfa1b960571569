"""Loads a model from a checkpoint's files: finds the tensors that the model declares, and reads one
layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from sglcore.checkpoint.checkpoint_files import HARMLESS, checkpoint_files
from sglcore.checkpoint.gguf_header import is_gguf
from sglcore.checkpoint.model_config import EMPTY, ModelConfig
from sglcore.checkpoint.quantization_config import NONE, read_quantization
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.layers.build_scope import Weights
from sglcore.layers.parallel.tensor_parallel_layers import ShardedBuild
from sglcore.layers.torch_layers import Build
from sglcore.models.architecture_registry import model_class
from sglcore.models.layer_kinds import Architecture
from sglcore.models.weights.gguf_file import gguf_sources
from sglcore.models.weights.reordered_weight import ReorderedSource
from sglcore.models.weights.safetensors_file import SafetensorsFile
from sglcore.models.weights.weight_packing import Packer
from sglcore.models.weights.weight_sources import CountBytes, PartSource, Source, find_sources
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.hisparse.hisparse_bring_up import asks_for_hisparse, check_swapped
from sglcore.runtime.kernels.kernel_choice import Refusals, fitted
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.geometry import fitting_page_size
from sglcore.runtime.memory.kv_rows import check_row_dtype

if TYPE_CHECKING:
    from sglcore.runtime.parallel.rank_groups import Groups

TIED_HEAD = r"lm_head\.(weight|qweight|qzeros|scales|g_idx|weight_packed|weight_scale|weight_shape|weight_zero_point)"
"""Tensors of the head that a checkpoint with a tied head may contain. They are not read."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes read so far and in all."""


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
    quantize: str = "auto",
    index_dtype: torch.dtype = torch.int64,
    page_size: int | None = None,
    kv_cache_dtype: str = "auto",
    drafts: int = 1,
    hisparse: str | None = None,
    ledger: DecisionLedger | None = None,
    given: Mapping[str, Any] = EMPTY,
    groups: Groups | None = None,
) -> Architecture:
    """Build the model on `device` in `dtype` and fill it from a checkpoint folder or a GGUF file.

    - `progress`: called with the bytes read so far and in all, after each piece, on this thread.
    - `given`: layers of another model that replace this model's own embedding and head, by name.
    - `groups`: builds this rank's part of the model.
    - `max_positions`: the size of position tables (default: the model's context length).
    - `architectures`: adds to the registry.
    - `quantize`, `page_size`, `kv_cache_dtype` and `hisparse`: as in EngineConfig.
    - `index_dtype`: the dtype of KV slot indices.
    - `drafts`: the most tokens of a request in a decode step.

    Records in the ledger the kernels that do not take this model, and the format of quantised
    weights. Raises `CheckpointError` for files that are missing, damaged or of another model,
    `ConfigError` for a model that is not supported. Waits until all is read. In addition to the
    weights, host memory holds less than one layer, as stored and as packed.
    """
    model_type = model_class(config.architecture, architectures)
    weights = Weights(dtype, torch.device(device))
    if quantize == NONE:
        kernels = kernels.replace(mxfp4_moe=None)
    packer, refusals = Packer(weights, kernels, quantize), Refusals()
    positions = max_positions or config.context_length
    shared = config, kernels, weights, positions, index_dtype, refusals, kv_cache_dtype, drafts
    shared = *shared, asks_for_hisparse(hisparse)
    # With several ranks, kinds of layers that can not be divided raise when a model uses them.
    build: Any = Build(*shared, given=given) if groups is None else ShardedBuild(*shared, groups=groups, given=given)
    model = model_type(build)
    _check_kept(config, model)
    check_swapped(hisparse, config.architecture, model.attention_layers)
    if any(layer.rows for layer in model.attention_layers):
        check_row_dtype(kv_cache_dtype, device, kernels.float8)
    if page_size is not None:
        fitting_page_size(model.attention_layers, page_size, page_size)
    if not config.is_encoder:
        model.kernels = _storing(kernels, model.attention_layers, dtype, index_dtype, refusals)
    if ledger is not None:
        ledger.record(*refusals.rows())
        if model.parts:
            ledger.record(Row("model parts", "auto", "the device's kernels", model.parts, "--model-impl native"))
    with ExitStack() as stack, torch.no_grad():
        sources = _sources(Path(path), config, model, weights, stack)
        packer.load(sources, _counted(sources, progress))
    row = packer.row()
    if ledger is not None and row is not None:
        ledger.record(row)
    return model


def _check_kept(config: ModelConfig, model: Architecture) -> None:
    """Raise ConfigError for an encoder that keeps states or cache entries."""
    if config.is_encoder and (model.state_layers or any(layer.rows for layer in model.attention_layers)):
        kept = "states" if model.state_layers else "rows of its own"
        raise ConfigError(
            f"{config.architecture} keeps {kept}, and an embedding runs without them", remedy="use another model"
        )


def _storing(
    kernels: KernelTable,
    layers: Iterable[Attention],
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    refusals: Refusals,
) -> KernelTable:
    """Return the table without the candidates for `store_kv` that refuse the KV slots of these
    layers. The refusals are recorded in `refusals`.

    The layers do not call it themselves.
    """
    cells = torch.empty(1, dtype=index_dtype, device="meta")
    for shape in dict.fromkeys((layer.num_kv_heads, layer.head_dim) for layer in layers if layer.stores):
        cell = torch.empty(1, *shape, dtype=dtype, device="meta")
        kernels = fitted(kernels, KernelTable.store_kv, (cell, cell, cell, cell, cells), refusals=refusals)
    return kernels


def _sources(
    path: Path, config: ModelConfig, model: Architecture, weights: Weights, stack: ExitStack
) -> Mapping[str, Source]:
    """Return the source of each weight, in files that stay open until `stack` closes. For a GGUF
    file, drops the offsets of `weights`, because the file's norms include them.
    """
    if is_gguf(path):
        weights.offsets.clear()  # a GGUF file's weights include them
        targets, cuts = weights.targets, {name: cut for name, cut in weights.cuts.items() if name in weights.targets}
        shapes = {name: tuple(target.shape) for name, target in targets.items()}
        shapes |= {name: cut.shape(targets[name]) for name, cut in cuts.items()}
        found = gguf_sources(stack.enter_context(FileIO(path)), path, config, shapes)
        parts = {
            name: PartSource(found[name], cut, shapes[name], tuple(targets[name].shape)) for name, cut in cuts.items()
        }
        return _reordered({**found, **parts}, weights)
    quantization = read_quantization(config.raw)
    files = [stack.enter_context(closing(SafetensorsFile(file))) for file in checkpoint_files(path)]
    named = model.named({entry.name: entry.shape for file in files for entry in file.entries})
    weights.choose_stacks(named.values())
    harmless = (
        *HARMLESS,
        *model.ignored,
        *weights.elsewhere,
        *((TIED_HEAD,) if config.tie_word_embeddings or config.is_encoder else ()),
    )
    found = find_sources(files, weights.targets, named, harmless, quantization, weights.cuts)
    return _reordered(found, weights)


def _reordered(found: Mapping[str, Source], weights: Weights) -> Mapping[str, Source]:
    orders = {name: order for name, order in weights.orders.items() if name in found}
    return {**found, **{name: ReorderedSource(found[name], order) for name, order in orders.items()}}


def _counted(sources: Mapping[str, Source], progress: Progress | None) -> CountBytes:
    total = sum(source.num_bytes for source in sources.values())
    done = 0

    def report(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    return report
