"""From a checkpoint folder to a model on the device: read the configuration, choose the dtype, load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from sglcore.device.config import EngineConfig
from sglcore.device.errors import ConfigError
from sglcore.device.facts import Facts
from sglcore.device.ledger import DecisionLedger, Row
from sglcore.layers.build import Model
from sglcore.models.config import read_config
from sglcore.models.loader import load_model
from sglcore.runtime.kernels.table import KernelTable

_COMPUTE: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
_HALF = ("bfloat16", "float16")


def load_checkpoint(
    config: EngineConfig,
    folder: Path,
    *,
    facts: Facts,
    kernels: KernelTable,
    ledger: DecisionLedger,
    progress: Callable[[str, int, int], None],
) -> Model:
    """The model of a checkpoint folder, as the configuration asks, on the device of `facts`. The dtype goes to the
    ledger. Raises ConfigError and what `load_model` raises; waits.
    """
    model_config = read_config(folder)
    if config.max_model_len is not None and config.max_model_len > model_config.context_length:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the checkpoint's context is {model_config.context_length}",
            remedy=f"set max_model_len to at most {model_config.context_length}",
        )
    dtype = choose_dtype(config.dtype, model_config.dtype, facts.preferred_dtype)
    ledger.record(dtype)
    return load_model(
        folder,
        model_config,
        kernels=kernels,
        device=facts.tensor_device,
        dtype=_COMPUTE[dtype.effective],
        max_positions=config.max_model_len,
        progress=lambda done, total: progress("loading weights", done, total),
    )


def choose_dtype(asked: str, stored: str, preferred: str | None) -> Row:
    """The decision on the element type; raises `ConfigError` for a name that is not one of ours.

    "auto" is the checkpoint's own type, except that one 16-bit type gives way to the one the device prefers.
    """
    if asked != "auto":
        effective, reason = asked, "asked for"
    elif stored in _HALF and preferred in _HALF and stored != preferred:
        effective, reason = str(preferred), f"this device prefers it to the checkpoint's {stored}"
    elif stored == "float64":
        effective, reason = "float32", "the checkpoint's float64 is wider than anything is computed in"
    else:
        effective, reason = stored, "the checkpoint's own"
    if effective not in _COMPUTE:
        raise ConfigError(
            f"the dtype {effective!r} can not be computed in", wanted=f"auto or one of {', '.join(_COMPUTE)}"
        )
    return Row("dtype", asked, effective, reason, "--dtype")
