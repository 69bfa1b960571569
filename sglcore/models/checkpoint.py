"""From a checkpoint folder to a model on the device: read the configuration, choose the dtype, load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from sglcore.device.config import EngineConfig
from sglcore.device.errors import ConfigError
from sglcore.device.facts import Facts
from sglcore.device.ledger import DecisionLedger, Row
from sglcore.layers.build import Model
from sglcore.models.config import ModelConfig, read_config
from sglcore.models.loader import load_model
from sglcore.runtime.kernels.table import KernelTable

DTYPES = ("float32", "bfloat16", "float16")


def load_checkpoint(
    config: EngineConfig,
    model_path: Path,
    *,
    facts: Facts,
    kernels: KernelTable,
    ledger: DecisionLedger,
    progress: Callable[[str, int, int], None],
) -> Model:
    """The checkpoint's model, its weights on the device. Raises ConfigError and CheckpointError; waits."""
    model_config = read_config(model_path)
    if config.max_model_len is not None and config.max_model_len > model_config.context_length:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the checkpoint's context is {model_config.context_length}",
            remedy=f"set max_model_len to at most {model_config.context_length}",
        )
    return load_model(
        model_path,
        model_config,
        kernels=kernels,
        device=facts.tensor_device,
        dtype=choose_dtype(config, model_config, ledger),
        max_positions=config.max_model_len,
        progress=lambda done, total: progress("loading weights", done, total),
    )


def choose_dtype(config: EngineConfig, model_config: ModelConfig, ledger: DecisionLedger) -> torch.dtype:
    """The dtype of weights and activations: the one asked for, or the checkpoint's own."""
    name = model_config.dtype if config.dtype == "auto" else config.dtype
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported", wanted=f"one of {', '.join(DTYPES)}", remedy="set dtype")
    reason = "the checkpoint's own" if config.dtype == "auto" else "asked for"
    ledger.record(Row("dtype", config.dtype, name, reason, "--dtype"))
    return getattr(torch, name)
